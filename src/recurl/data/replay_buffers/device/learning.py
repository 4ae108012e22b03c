"""Burn-in and priorities for slices of one length, with fixed shapes."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import IS_INIT, MASK, STORED, NestedKey
from recurl.data.replay_buffers.recurrent import StateNetwork, check_eta
from recurl.sequences.entries import Entries, leaves
from recurl.sequences.sample_marks import mark_starts

__all__ = ["RowBurnIn", "row_priorities"]

_COLLECTED: NestedKey = (*STORED, IS_INIT)


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
        for key, states in StateNetwork(self.policy).run(_first(sample, self.steps)).items():
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
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> sample = Entries({"collector": Entries({"mask": mask}, mask.shape)}, mask.shape)
        >>> row_priorities(sample, torch.tensor([[1.0, -3.0], [2.0, 9.0]]), eta=0.5)
        tensor([2.5000, 2.0000])
    """
    check_eta(eta)
    mask = trained.get(MASK)
    error = td_error.detach().abs().reshape(mask.shape).masked_fill(~mask, 0.0)
    return eta * error.amax(-1) + (1 - eta) * error.sum(-1) / mask.sum(-1)
