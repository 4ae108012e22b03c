"""Recurrent training from replayed slices: burn-in, zero start states, state refresh, slice priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError, UsageError
from recurl.core.keys import IS_INIT, MASK, STORED, TRAJ_IDS, TRAJ_STEPS, NestedKey, next_key, normalize_key
from recurl.execution.lowering import Network, inputs_of, modules_leading_to
from recurl.recurrence import Cell, record_backends
from recurl.sequences.continuity import boundaries_in
from recurl.sequences.entries import Entries, Step, StepT, leaves
from recurl.sequences.index import Boundaries
from recurl.sequences.mode import set_recurrent_mode
from recurl.sequences.sample_marks import mark_starts

if TYPE_CHECKING:
    from recurl.data.replay_buffers.buffers import ReplayBuffer
    from recurl.data.replay_buffers.device.buffer import DeviceSliceBuffer

__all__ = [
    "BurnIn",
    "MidEpisodeBurnIn",
    "RowBurnIn",
    "ZeroStart",
    "refresh_states",
    "row_priorities",
    "slice_priorities",
]
_COLLECTED: NestedKey = (*STORED, IS_INIT)


class StateNetwork:
    """The part of a policy, as currently composed, that computes its recurrent states."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        modules = [module for module in policy.modules() if hasattr(module, "make_tensordict_primer")]
        if not modules:
            raise ArgumentError(f"The policy must have a recurrent module; {type(policy).__name__} has none.")
        self.keys = list(dict.fromkeys(key for module in modules for key in cast(Any, module).state_keys))
        cells = (getattr(getattr(module, "net", None), "cell", None) for module in modules)
        self.partial = [cell for cell in cells if isinstance(cell, Cell) and cell.states_at_ends]
        self._network = Network(modules_leading_to(policy, map(next_key, self.keys)))
        read = [normalize_key(key) for module in self._network.modules for key in module.in_keys]
        self._reads = list(dict.fromkeys([*read, IS_INIT, TRAJ_IDS, TRAJ_STEPS]))

    def select(self, sample: TensorDictBase) -> TensorDictBase:
        """Return the entries of ``sample`` read by the network."""
        return sample.select(*self._reads, strict=False)

    def run(self, sequences: Step) -> dict[NestedKey, Tensor]:
        """Return the states after every step of ``sequences``, flat ``[N]`` or rows, by root key, without gradients."""
        with torch.no_grad(), set_recurrent_mode(True):
            result = self._network(inputs_of(sequences, self._reads, [self._network]))
        return {key: result.get(next_key(key)) for key in self.keys}


class BurnIn:
    """Burn-in: runs a policy over the first steps of each slice, and starts the remaining steps from the final states.

    Stored states were computed by the policy that collected the data. After a few burn-in steps, the current policy's
    states are close to those it would have reached over the whole trajectory. Source: Kapturowski et al., "Recurrent
    experience replay in distributed reinforcement learning" (R2D2, 2019), section 3.

    When called with a flat sample ``[N]``, whose slices may differ in length, it returns the steps after the prefixes,
    ``[M]``. The first one of each slice has the state after the prefix, computed without gradients, and ``"is_init"``
    set. A slice of ``steps`` or fewer steps keeps its last step. The sample is not modified. Use it as a buffer's
    ``transform``, or once for each network with its own states (for a target network, apply a separate BurnIn to the
    same sample).

    Args:
        policy: module that contains recurrent modules; only the modules that their states depend on are run.
        steps: length of the prefix, not negative.

    Raises:
        ArgumentError: ``steps`` is negative, the policy has no recurrent module, or the sample isn't flat.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> is_init = (torch.arange(10) % 5 == 0).unsqueeze(-1)  # two slices of five steps
        >>> sample = TensorDict({"observation": torch.randn(10, 4), "is_init": is_init}, [10])
        >>> rest = BurnIn(gru, 3)(sample)
        >>> rest["is_init"].squeeze(-1).tolist(), rest["recurrent_state"].shape
        ([True, False, True, False], torch.Size([4, 1, 8]))
    """

    def __init__(self, policy: TensorDictModuleBase, steps: int) -> None:
        if steps < 0:
            raise ArgumentError(f"The number of burn-in steps must not be negative, got {steps}.")
        self.policy = policy
        self.steps = steps
        StateNetwork(policy)

    def __call__(self, sample: TensorDictBase) -> TensorDictBase:
        """Return the steps after the prefixes."""
        prefix = self.prefix(sample)
        rest = sample[~prefix]
        memory = StateNetwork(self.policy)
        sequences = memory.select(sample)[prefix]
        if sequences.numel() == 0:
            return rest
        after_prefix = torch.cat([prefix.new_zeros(1), prefix[:-1]])
        cuts = after_prefix[~prefix]
        ends = ~torch.cat([prefix[1:], prefix.new_zeros(1)])[prefix]
        for key, state in memory.run(sequences).items():
            stored = rest.get(key, None)
            fresh = state.new_zeros(rest.numel(), *state.shape[1:]) if stored is None else stored.clone()
            fresh[cuts] = state[ends]
            rest.set(key, fresh)
        mark_starts(rest, cuts)
        return rest

    def prefix(self, sample: TensorDictBase) -> Tensor:
        """Return the mask of the burn-in steps of a sample ``[N]``, bool ``[N]``."""
        segments = _segments(sample)
        position = segments.positions
        length = torch.zeros_like(position).index_add_(0, segments.segment_ids, torch.ones_like(position))
        return position < (length[segments.segment_ids] - 1).clamp_max(self.steps)


class MidEpisodeBurnIn(BurnIn):
    """A :class:`BurnIn` limited to slices that begin in the middle of an episode.

    A slice that begins with its episode starts from the zero state, which is exact. It is also the only kind of slice
    through which gradients reach the episode's first steps: with burn-in, information shown only there (such as the cue
    of a T-maze) would never be learned.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> marked = (torch.arange(10) % 5 == 0).unsqueeze(-1)  # two slices, the first begins an episode
        >>> sample = TensorDict({"observation": torch.randn(10, 4), "is_init": marked}, [10])
        >>> sample["collector", "stored", "is_init"] = (torch.arange(10) == 0).unsqueeze(-1)
        >>> MidEpisodeBurnIn(gru, 3)(sample)["is_init"].squeeze(-1).tolist()
        [True, False, False, False, False, True, False]
    """

    def __call__(self, sample: StepT) -> StepT:
        """Return the steps after the prefixes; of a padded sample, see :class:`RowBurnIn`, all steps with a mask."""
        if isinstance(sample, Entries):
            return RowBurnIn(self.policy, self.steps)(sample)
        return super().__call__(sample)  # pyright: ignore[reportReturnType, reportArgumentType] - a TensorDict

    def prefix(self, sample: TensorDictBase) -> Tensor:
        """Return the mask of the burn-in steps of a sample ``[N]``, bool ``[N]``."""
        starts = boundaries_in(sample).start_index
        begins_episode = torch.as_tensor(sample.get(_COLLECTED)).reshape(-1)[starts]
        return super().prefix(sample) & ~begins_episode


class RowBurnIn:
    """Shape-preserving variant of :class:`~recurl.data.MidEpisodeBurnIn` for slices of one length.

    When called with a sample ``[S, L]`` of a :class:`DeviceSliceBuffer`, it returns a sample of the same shape. The
    first steps of slices that begin within an episode are masked, and the step after them begins a sequence from the
    state that ``policy`` reaches there, computed without gradients. The sample is not modified.

    Args:
        policy: module that contains recurrent modules; only the modules that their states depend on are run.
        steps: length of the prefix, positive; a shorter slice keeps its last step.

    Raises:
        ArgumentError: ``steps`` is not positive, or the policy has no recurrent module.
    """

    def __init__(self, policy: TensorDictModuleBase, steps: int) -> None:
        if steps < 1:
            raise ArgumentError(f"The number of burn-in steps must be positive, got {steps}.")
        self.policy = policy
        self.steps = steps
        StateNetwork(policy)

    def __call__(self, sample: Entries) -> Entries:
        """Return the sample with the prefixes masked."""
        mask = sample.get(MASK)
        slices, length = mask.shape
        begins = sample.get(_COLLECTED).reshape(mask.shape)[:, 0]
        count = (mask.sum(-1) - 1).clamp_max(self.steps).masked_fill(begins, 0).unsqueeze(-1)  # burn-in steps, [S, 1]
        offset = torch.arange(length, device=mask.device)
        begin = (offset == count) & (count > 0)
        rest = sample.copy()
        first = _first(sample, self.steps)
        mark_starts(first, (offset == count)[:, : first.batch_size[1]])  # the state is needed at the end of a sequence
        for key, states in StateNetwork(self.policy).run(first).items():
            inner = (1,) * (states.ndim - 2)
            last = (count - 1).clamp_min(0).reshape(slices, 1, *inner).expand(-1, -1, *states.shape[2:])
            after = states.gather(1, last)
            stored = rest.get(key, None)
            kept = 0.0 if stored is None else stored
            rest.set(key, torch.where(begin.reshape(slices, length, *inner), after, kept))
        mark_starts(rest, begin)
        rest.set(MASK, mask & (offset >= count))
        return rest


def _first(sample: Entries, steps: int) -> Entries:
    """Return the first steps of all rows."""
    slices, length = sample.batch_size
    first = Entries({}, torch.Size([slices, min(steps, length)]), sample.device)
    for key, value in leaves(sample):
        first.set(key, value[:, :steps])
    return first


class ZeroStart:
    """Start every slice from zero states instead of the stored ones: R2D2's "zero start state".

    When called with a sample, it returns a copy in which the policy's states are zero wherever ``"is_init"`` is true
    (the stored tensors are not modified). Use it as a buffer's ``transform``; to combine it with :class:`BurnIn`, apply
    it first.

    Args:
        policy: module with recurrent modules inside.

    Raises:
        ArgumentError: the policy has no recurrent module.
    """

    def __init__(self, policy: TensorDictModuleBase) -> None:
        self.policy = policy
        StateNetwork(policy)

    def __call__(self, sample: StepT) -> StepT:
        """Return the sample with zero states at slice starts."""
        starts = sample.get(IS_INIT).reshape(sample.batch_size)
        result: StepT = sample.copy()
        for key in StateNetwork(self.policy).keys:
            state = result.get(key, None)
            if state is not None:
                result.set(key, state.masked_fill(starts.reshape(*starts.shape, *(1,) * (state.ndim - starts.ndim)), 0))
        return result


def refresh_states(
    buffer: ReplayBuffer | DeviceSliceBuffer, sample: TensorDictBase, policy: TensorDictModuleBase
) -> None:
    """Run ``policy`` over a sample and write its current states after every step back to ``buffer``.

    Each slice starts from its stored state. Steps that were overwritten since they were sampled are skipped.

    Args:
        buffer: buffer that the sample was drawn from.
        sample: flat sample, ``[N]``, with its ``"index"``.
        policy: module with recurrent modules inside.

    Raises:
        UsageError: the recurrent backend is ``"pad"``, or a cell has large states, such as matrices: these are returned
            at segment ends only.
        ArgumentError: the policy has no recurrent module, or a state is not stored.
        MissingKeyError: the sample has no ``"index"``.
        UnsupportedError: the storage is a list.
    """
    memory = StateNetwork(policy)
    with record_backends() as ran:
        states = memory.run(memory.select(sample))
    if "pad" in ran:
        raise UsageError(
            "Refreshing needs the states after every step, but the recurrent backend 'pad' returns them at segment "
            "ends only: give the module recurrent_backend='fastest' or 'loop'."
        )
    if memory.partial:
        raise UsageError(
            f"Refreshing needs the states after every step, but {memory.partial[0]} returns them at segment ends only: "
            "leave it out, or use a cell with smaller states, such as 'lstm'."
        )
    buffer.update_states_(sample, states)


def slice_priorities(
    sample: TensorDictBase | Entries,
    td_error: Tensor,
    trained: TensorDictBase | Entries | None = None,
    eta: float = 0.9,
) -> Tensor:
    """Return the priorities of slices, ``eta * max |td_error| + (1 - eta) * mean |td_error|`` over each slice.

    Source: Kapturowski et al. (R2D2, 2019), section 2.3.

    Args:
        sample: the sample, ``[N]``; or a padded one, see :func:`row_priorities`.
        td_error: ``[M]`` or ``[M, 1]``, one per step of ``trained``.
        trained: the sample after :class:`BurnIn`, ``[M]``; the sample itself when None.
        eta: weight of the maximum, from 0 to 1.

    Returns:
        ``[N]``: for every step of the sample, a possible start, the priority of its slice. Pass it to
        ``buffer.update_priority(sample["index"], ..., sample["collector", "write_step"])``.

    Raises:
        ArgumentError: ``eta`` is out of range, or there is not one error per step.

    Example:
        >>> from tensordict import TensorDict
        >>> sample = TensorDict({"is_init": torch.tensor([True, False, True, False])}, [4])
        >>> slice_priorities(sample, torch.tensor([1.0, -3.0, 0.0, 2.0]), eta=0.5)
        tensor([2.5000, 2.5000, 1.5000, 1.5000])
    """
    trained = sample if trained is None else trained
    if isinstance(sample, Entries) or isinstance(trained, Entries):
        return row_priorities(Entries.of(trained), td_error, eta)
    check_eta(eta)
    if td_error.numel() != trained.numel():
        raise ArgumentError(f"There must be one error per step, {trained.numel()}, got shape {tuple(td_error.shape)}.")
    error = td_error.detach().abs().reshape(-1)
    ids = _segments(trained).segment_ids
    zero = error.new_zeros(sample.numel())
    largest = zero.scatter_reduce(0, ids, error, "amax")
    mean = zero.scatter_reduce(0, ids, error, "mean", include_self=False)
    return (eta * largest + (1 - eta) * mean)[_segments(sample).segment_ids]


def row_priorities(trained: Entries, td_error: Tensor, eta: float = 0.9) -> Tensor:
    """Return the priorities of slices of one length; see :func:`~recurl.data.slice_priorities`.

    Args:
        trained: the sample, ``[S, L]``, after :class:`RowBurnIn` if it is used.
        td_error: ``[S, L]`` or ``[S, L, 1]``.
        eta: weight of the maximum, from 0 to 1.

    Returns:
        ``[S]``.

    Raises:
        ArgumentError: ``eta`` is out of range.

    Example:
        >>> from recurl.execution.lowering import Entries
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> sample = Entries({"collector": Entries({"mask": mask}, mask.shape)}, mask.shape)
        >>> row_priorities(sample, torch.tensor([[1.0, -3.0], [2.0, 9.0]]), eta=0.5)
        tensor([2.5000, 2.0000])
    """
    check_eta(eta)
    mask = trained.get(MASK)
    error = td_error.detach().abs().reshape(mask.shape).masked_fill(~mask, 0.0)
    return eta * error.amax(-1) + (1 - eta) * error.sum(-1) / mask.sum(-1)


def check_eta(eta: float) -> None:
    """Check that ``eta``, the weight of a slice's largest error, is in [0, 1]."""
    if not 0.0 <= eta <= 1.0:
        raise ArgumentError(f"eta must be in [0, 1], got {eta}.")


def _segments(sample: TensorDictBase) -> Boundaries:
    if sample.batch_dims != 1:
        raise ArgumentError(f"A flat sample [N] is needed, got batch size {tuple(sample.batch_size)}: reshape(-1) it.")
    return boundaries_in(sample)
