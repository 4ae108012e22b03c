"""Lower bounds on the memory that a run needs, checked before it begins."""

from __future__ import annotations

from recurl.hardware import check_device, check_memory
from recurl.trainers.config import RunConfig

_MATRICES = {"lstm": 8, "gru": 6, "none": 8}  # of hidden x hidden; "none" has them once, whatever the layers
_STATES = {"lstm": 2, "gru": 1, "none": 0}
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
    layers, hidden = config.num_layers, config.hidden_size
    weights = _MATRICES[config.cell] * (1 if config.cell == "none" else layers) * hidden * hidden * _NUMBER
    if not learning:
        return {"the networks": weights}
    states = _STATES[config.cell] * layers * hidden * _NUMBER
    step = states + _FLAGS_AND_REWARD
    parts = {
        "the networks": 4 * weights,  # with gradients and two moments
        "a batch": config.frames_per_batch * (step + states),  # states before and after a step
    }
    if config.replay_steps:
        parts["the replay buffer"] = config.replay_steps * step
    return parts
