"""Checks of the temporal order of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from recurl.core.errors import MissingKeyError, UsageError
from recurl.core.keys import ACTION, DONE, IS_INIT, MASK, NEXT, STORED, TRAJ_STEPS, NestedKey, next_key
from recurl.sequences.entries import Step, leaves
from recurl.sequences.index import SequenceIndex, readable

__all__ = ["boundaries_in", "check_order", "check_starts"]

boundaries_in = SequenceIndex.of
"""Index of a batch, see :meth:`~recurl.sequences.index.SequenceIndex.of`."""
_RTOL, _ATOL = 1e-4, 1e-5  # stored states may have been rounded


def check_starts(batch: Step, states: Iterable[NestedKey], starts: Tensor | None = None) -> None:
    """Check that sequences that begin inside a trajectory have recurrent states to start from.

    The first token of a row is exempt: a critic that was not run during collection has no state there and starts from
    zero.

    Args:
        batch: ``[*B, T]``.
        states: keys of the states read by the networks.
        starts: bool, N tokens, True where a sequence begins; those of the batch's index when None.

    Raises:
        MissingKeyError: a state is missing, and either a sequence begins after the first step of its trajectory, or the
            batch is a minibatch or a replay buffer sample.
    """
    missing = [key for key in states if batch.get(key, None) is None]
    if not missing:
        return
    steps = batch.get(TRAJ_STEPS, None)
    cut = batch.get((*STORED, IS_INIT), None) is not None
    if not cut and steps is not None and batch.get(IS_INIT, None) is not None and readable(steps):
        starts = SequenceIndex.of(batch).starts if starts is None else starts
        inside = starts.reshape(batch.batch_size)[..., 1:] & (steps.reshape(batch.batch_size)[..., 1:] > 0)
        cut = bool((inside & ~_flags(batch)[..., 1:]).any())
    if cut:
        raise MissingKeyError(
            f"The sequences of this batch begin in the middle of episodes, but the states {missing} to start from are "
            "not in the batch, so a network would lose its memory there. Keep these entries in the batch; to store the "
            "states of a critic, collect with it: Collector(env, TensorDictSequential(actor, critic), ...)."
        )


def check_order(batch: Step, starts: Tensor | None = None) -> None:
    """Check that the stored states of a batch without boundary marks are consistent with the order of its tokens.

    The root state of a token must equal the state that the previous token wrote under ``"next"``. The check is skipped

    * if the batch has trajectory steps or the marks of a sample, which already define the boundaries,
    * at padding, see ``("collector", "mask")``,
    * if there are no states under ``"next"``, if they are all equal, or if a recurrent pass has rewritten them (the
      observations are then still consecutive),
    * during CUDA graph capture, and under ``torch.compile`` and ``torch.vmap``.

    On a GPU the check synchronizes with the device, once for each state if the tokens are consecutive.

    Args:
        batch: ``[*B, T]``.
        starts: bool, N tokens, True where a sequence begins; those of the batch's index when None.

    Raises:
        UsageError: a root state differs from the state that the previous token wrote under ``"next"``.
    """
    if batch.ndim == 0 or batch.batch_size.numel() == 0:
        return
    if batch.get(TRAJ_STEPS, None) is not None or batch.get(STORED, None) is not None:
        return
    found = list(_states(batch))
    if not found or batch.batch_size[-1] < 2 or not readable(found[0][1]):
        return
    if starts is None:
        if batch.get(IS_INIT, None) is None:
            return
        starts = SequenceIndex.of(batch).starts
    inner = ~starts.reshape(batch.batch_size)[..., 1:]
    mask = batch.get(MASK, None)
    if mask is not None:  # values at padding are arbitrary
        valid = mask.reshape(batch.batch_size)
        inner = inner & valid[..., 1:] & valid[..., :-1]
    for key, state, after in found:
        suspects = inner & _differ(state, after, batch.ndim)
        if not suspects.any():
            continue
        broken = suspects & ~_continues(state, after, batch.ndim) & ~_is_constant(after, batch.ndim)
        if broken.any() and not _observations_follow(batch, inner):
            where = int(broken.reshape(-1).nonzero()[0])
            row, token = divmod(where, inner.shape[-1])
            raise UsageError(
                f"The tokens of this batch don't follow each other: the state {key!r} of token {token + 1}"
                f"{f' of row {row}' if inner.shape[:-1].numel() > 1 else ''} is not the one that the previous token "
                f"wrote under 'next' ({int(broken.sum())} such places), and no boundary is marked there. Keep "
                "('collector', 'traj_ids') and ('collector', 'traj_steps') of the collector in the batch; or keep rows "
                "separate, [*B, T], and set 'is_init' where a token doesn't continue the previous one."
            )


def _states(batch: Step) -> Iterator[tuple[NestedKey, Tensor, Tensor]]:
    """Yield key, root value and ``"next"`` value of each entry that has the shape of a recurrent state.

    This is ``[*B, T, L, H]``, or ``[*B, T, L, ..., 2]`` for complex numbers stored as pairs. Images have neither shape.
    """
    for path, value in leaves(batch):
        own = value.ndim - batch.ndim
        if path[0] != NEXT and value.is_floating_point() and (own == 2 or (own > 2 and value.shape[-1] == 2)):
            after = batch.get(next_key(path), None)
            if after is not None and after.shape == value.shape:
                yield path[0] if len(path) == 1 else path, value, cast(Tensor, after)


def _neighbors(value: Tensor, after: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    """Return the root values of tokens t + 1, and the ``"next"`` values of tokens t."""
    time = lead - 1
    return value.narrow(time, 1, value.shape[time] - 1), after.narrow(time, 0, value.shape[time] - 1)


def _differ(value: Tensor, after: Tensor, lead: int) -> Tensor:
    """Return bool ``[*B, T - 1]``: whether the values differ; exact comparison is much faster than with a tolerance."""
    held, left = _neighbors(value, after, lead)
    return (held != left).flatten(lead).sum(-1) > 0


def _continues(value: Tensor, after: Tensor, lead: int) -> Tensor:
    """Return bool ``[*B, T - 1]``: token t + 1 has the ``"next"`` value of token t, up to rounding."""
    held, left = _neighbors(value, after, lead)
    if not value.is_floating_point():
        return (held == left).flatten(lead).all(-1) if value.ndim > lead else held == left
    close = torch.isclose(held, left.to(held.dtype), rtol=_RTOL, atol=_ATOL, equal_nan=True)
    return close.flatten(lead).all(-1) if value.ndim > lead else close


def _is_constant(after: Tensor, lead: int) -> Tensor:
    """Return bool ``[*B, T - 1]``: the previous token's state is zero or constant, so it is not informative."""
    left = after.narrow(lead - 1, 0, after.shape[lead - 1] - 1).flatten(lead)
    first = after.flatten(0, lead - 1)[:1]
    return (left == 0).all(-1) | (after == first).all()


def _observations_follow(batch: Step, inner: Tensor) -> bool:
    """Return whether observations vary, and every ``inner`` token has the next observation of the previous token."""
    varies = False
    states = {key for key, _, _ in _states(batch)}
    for path, value in leaves(batch):
        key = path[0] if len(path) == 1 else path
        if path[0] in (NEXT, ACTION, DONE, IS_INIT) or key in states:
            continue
        after = batch.get(next_key(path), None)
        if after is None or after.shape != value.shape or value.dtype == torch.bool:
            continue
        if not (_continues(value, after, batch.ndim) | ~inner).all():
            return False
        varies |= not bool((value == value.flatten(0, batch.ndim - 1)[:1]).all())
    return varies


def _flags(batch: Step) -> Tensor:
    return cast(Tensor, batch.get(IS_INIT)).reshape(batch.batch_size).bool()
