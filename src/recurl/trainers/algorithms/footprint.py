"""Lower bounds on the memory that a run needs, checked before it begins."""

from __future__ import annotations

import math

from recurl.hardware import check_device, check_memory
from recurl.recurrence import Sizes, load_cell
from recurl.trainers.config import NO_CELL, RunConfig

_CONTROL = 8  # matrices of hidden x hidden without a memory, whatever the layers
_NUMBER = 4  # bytes
_FLAGS_AND_REWARD = 20  # bytes per step


def check_machine(config: RunConfig, *, learning: bool = True) -> None:
    """Refuse a run whose device is missing, or that needs more memory than the device has.

    Args:
        config: the options.
        learning: False for a policy that is only evaluated.

    Raises:
        ArgumentError: naming the options to change.
    """
    check_device(config.device)
    sizes = "--hidden-size, --num-layers, --num-envs or --rollout-steps"
    if config.replay_steps:
        sizes = f"--buffer-size, {sizes}"
    check_memory(config.device, footprint(config, learning=learning), f"lower {sizes}")


def footprint(config: RunConfig, *, learning: bool = True) -> dict[str, int]:
    """Return a lower bound on the bytes of the networks, a batch and the replay buffer, whatever the environment.

    Args:
        config: the options.
        learning: False leaves out gradients, optimiser and data.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> {name: size // 2**20 for name, size in footprint(PPOConfig(env="x", hidden_size=1024)).items()}
        {'the networks': 128, 'a batch': 16}
    """
    weights, states = (_NUMBER * numbers for numbers in _weights_and_states(config))
    if not learning:
        return {"the networks": weights}
    step = states + _FLAGS_AND_REWARD
    parts = {
        "the networks": 4 * weights,  # with gradients and two moments
        "a batch": config.frames_per_batch * (step + states),  # states before and after a step
    }
    if config.replay_steps:
        parts["the replay buffer"] = config.replay_steps * step
    return parts


def _weights_and_states(config: RunConfig) -> tuple[int, int]:
    """Return how many numbers the memory's weights have, and its states in one row."""
    if config.cell == NO_CELL:
        return _CONTROL * config.hidden_size**2, 0
    cell, sizes = load_cell(config.cell), Sizes(config.hidden_size, config.hidden_size)
    weights, states = cell.parameters(sizes).values(), cell.state_shapes(sizes)
    return config.num_layers * sum(map(math.prod, weights)), config.num_layers * sum(map(math.prod, states))
