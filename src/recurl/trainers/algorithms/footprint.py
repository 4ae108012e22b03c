"""Lower bounds on the memory that a run needs, checked before it starts."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch

from recurl.core.devices import check_device, check_memory, total_memory
from recurl.core.keys import is_within
from recurl.core.specs import Composite
from recurl.recurrence import GTrXLCell, Sizes, load_cell
from recurl.recurrence.experiment import memory_of_check, size_options
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.machine import weights_and_states

_NUMBER = 4  # bytes of a float32
_FLAGS_AND_REWARD = 20  # bytes per step
_STATES_AT_ONCE = {"cpu": 2**28, "cuda": 2**31}  # bytes of large states that an estimate of values computes at once
_NETWORKS, _BATCH, _FRAMES, _REPLAY = "the networks", "a batch", "the images of a gradient step", "the replay buffer"


def check_machine(config: RunConfig, spec: Composite | None = None, *, learning: bool = True) -> None:
    """Check that the device of a run exists and has enough memory.

    Args:
        config: the options.
        spec: spec of the environments' observations, ``[*B]``, if known.
        learning: False for a policy that is only evaluated.

    Raises:
        ArgumentError: if the device is missing or too small; the message names options to change, and a size that fits.
    """
    check_device(config.device)
    parts = footprint(config, spec, learning=learning)
    check_memory(config.device, parts, lambda: _advice(config, parts))


def _advice(config: RunConfig, parts: dict[str, int]) -> str:
    """Return which options to lower."""
    sizes = ["--hidden-size", "--num-layers", "--num-envs or --rollout-steps"]
    if config.encoder_width or config.encoder_layers > 1:
        sizes[:0] = ["--encoder-width", "--encoder-layers"]
    if config.replay_steps:
        sizes.insert(0, "--buffer-size")
    if config.cell != NO_CELL:
        sizes[:0] = [f"the {name} of --cell" for name in size_options(load_cell(config.cell), _sizes(config))]
    return f"lower {', '.join(sizes)}{_fitting(config, parts)}"


def footprint(config: RunConfig, spec: Composite | None = None, *, learning: bool = True) -> dict[str, int]:
    """Return lower bounds on the memory of the networks, a batch and the replay buffer, in bytes.

    Args:
        config: the options.
        spec: spec of the environments' observations, ``[*B]``; None for a bound that holds for any observations.
        learning: False to exclude gradients, optimizer state and data.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> config = PPOConfig(env="x", cell="gtrxl(window=256)", hidden_size=1024, device="cpu")
        >>> {name: size // 2**20 for name, size in footprint(config).items()}
        {'the networks': 400, 'a batch': 160}
    """
    weights, states = (_NUMBER * numbers for numbers in weights_and_states(config))
    if not learning:
        return {_NETWORKS: weights}
    observed = _Observed.of(config, spec)
    # states and observations before and after a step
    others = 2 * (observed.images + observed.others) + _FLAGS_AND_REWARD
    parts = {
        _NETWORKS: 4 * weights,  # with gradients and Adam's two moments
        _BATCH: config.frames_per_batch * (_stored(config, states) + others) + _returned(config, large_states(config)),
    }
    if observed.encoded_images and config.gradient_steps_per_batch:
        frames = -(-config.frames_per_batch // config.gradient_steps_per_batch)
        parts[_FRAMES] = frames * observed.encoded_images * _NUMBER
    if config.replay_steps:
        # an image is stored once: the next image is that of the next step
        step = states + _FLAGS_AND_REWARD + observed.images + 2 * observed.others
        parts[_REPLAY] = config.replay_steps * step
    return parts


def _stored(config: RunConfig, states: int) -> int:
    """Return the bytes of states that a batch stores per step."""
    return 2 * states if config.states_every is None else states // config.states_every


def large_states(config: RunConfig) -> int:
    """Return the bytes of the recurrent states of a step if these are matrices or windows, else 0."""
    large = config.cell != NO_CELL and bool(load_cell(config.cell).read_at_starts)
    return large * _NUMBER * weights_and_states(config)[1]


def rows_at_once(config: RunConfig, states: int) -> int:
    """Return the number of rows of a batch whose values are estimated at once.

    The pass of the critic returns the states after all steps. Bootstrap steps read those at the ends of sequences,
    whose number isn't known on a GPU: instead of fewer states, large ones are returned for fewer rows. A GPU, which few
    rows don't occupy, takes more of them. The number is a power of two, so that most batches have parts of one size.

    Args:
        config: the options.
        states: result of :func:`large_states`.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> [rows_at_once(PPOConfig(env="x", device=name, rollout_steps=64), 2**20) for name in ("cpu", "cuda")]
        [4, 32]
    """
    at_once = _STATES_AT_ONCE.get(torch.device(config.device).type, _STATES_AT_ONCE["cpu"])
    rows = max(1, at_once // max(1, states * config.rollout_steps))
    return 1 << (rows.bit_length() - 1)


def _returned(config: RunConfig, states: int) -> int:
    """Return the bytes of large states that an estimate of values needs at once, if the batch stores few."""
    if config.states_every is None:
        return 0
    normalizes = getattr(config, "normalize_advantages", False)  # over a batch, which isn't processed in parts
    rows = config.num_envs if normalizes else min(config.num_envs, rows_at_once(config, states))
    return rows * config.rollout_steps * states


def _sizes(config: RunConfig) -> Sizes:
    """Return the sizes of the first layer."""
    return Sizes(config.encoder_width or config.hidden_size, config.hidden_size)


def _window(config: RunConfig) -> int:
    """Return the number of past inputs that the cell's states hold, or 0 for other cells."""
    cell = None if config.cell == NO_CELL else load_cell(config.cell)
    return cell.window if isinstance(cell, GTrXLCell) else 0


class _Observed(NamedTuple):
    """Bytes of the observations of a step."""

    images: int = 0
    others: int = 0
    encoded_images: int = 0
    """Bytes of the images that convolutions encode."""

    @classmethod
    def of(cls, config: RunConfig, spec: Composite | None) -> _Observed:
        if spec is None:
            return cls()
        images = others = 0
        for key, leaf in spec.items(include_nested=True, leaves_only=True):
            shape, dtype = leaf.shape[len(spec.shape) :], leaf.dtype
            if dtype is None or is_within(key, config.drop_observations):
                continue
            if dtype == torch.uint8 and len(shape) > 1:
                images += shape.numel()
            else:
                others += shape.numel() * dtype.itemsize
        return cls(images, others, 0 if config.encoder == "mlp" else images)


def _fitting(config: RunConfig, parts: dict[str, int]) -> str:
    """Return the size at which the largest part would fit, as the end of a sentence."""
    largest = max(parts, key=lambda name: parts[name])
    steps = {_BATCH: config.frames_per_batch, _FRAMES: config.frames_per_batch, _REPLAY: config.replay_steps}
    if largest not in steps:
        return ""
    scaled = [name for name in parts if name == largest or (largest != _REPLAY and name in (_BATCH, _FRAMES))]
    rest = sum(size for name, size in parts.items() if name not in scaled)
    room = total_memory(config.device) - rest
    fits = room * steps[largest] // sum(parts[name] for name in scaled)
    if config.cell != NO_CELL and room < memory_of_check(load_cell(config.cell), _sizes(config), _NUMBER):
        fits = 0  # few states are too many already
    what = "--buffer-size" if largest == _REPLAY else "a batch (--num-envs x --rollout-steps) of"
    window = _fitting_window(config, parts)
    found = [*([f"{what} {fits:,} fits"] if fits > 0 else []), *([f"a window of {window:,} fits"] if window else [])]
    return f"; {', or '.join(found)}" if found else ""


def _fitting_window(config: RunConfig, parts: dict[str, int]) -> int:
    """Return the window with which the run fits, or 0."""
    present = _window(config)
    states = _NUMBER * weights_and_states(config)[1]

    def needed(window: int) -> int:
        of_step = states * window // max(1, present)
        stored = config.frames_per_batch * _stored(config, of_step) + config.replay_steps * of_step
        return stored + _returned(config, of_step)

    room = total_memory(config.device) - (sum(parts.values()) - needed(present))
    return max(0, bisect_right(range(present), room, key=needed) - 1)
