"""Which tokens of a batch are a trajectory's next step after the token before: read off its entries, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from recurl.autograd import is_functorch_active
from recurl.errors import MissingKeyError, UsageError
from recurl.keys import ACTION, DONE, IS_INIT, MASK, NEXT, STORED, TRAJ_IDS, TRAJ_STEPS, NestedKey, next_key
from recurl.lowering import Step, leaves
from recurl.recurrence import Boundaries, boundaries_of

__all__ = ["boundaries_in", "check_order", "check_starts", "sources_of"]

_RTOL, _ATOL = 1e-4, 1e-5  # of states that were rounded on their way


def sources_of(batch: Step) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what the boundaries of a batch with ``"is_init"`` follow from: the flag, trajectory ids and steps."""
    return batch.get(IS_INIT), batch.get(TRAJ_IDS, None), batch.get(TRAJ_STEPS, None)


def boundaries_in(batch: Step) -> Boundaries:
    """Return the boundaries of a batch ``[*B, T]`` that has ``"is_init"``."""
    is_init, traj_ids, traj_steps = sources_of(batch)
    return boundaries_of(is_init, traj_ids, batch.batch_size, traj_steps)


def check_starts(batch: Step, states: Iterable[NestedKey], starts: Tensor | None = None) -> None:
    """Refuse sequences that begin in the middle of trajectories without the recurrent states to start from.

    A row's first token is let pass: a critic that didn't collect has no state there and starts from zero.

    Args:
        batch: ``[*B, T]``.
        states: keys of the states that networks read.
        starts: bool ``[*B, T]``, where sequences begin; by default as :func:`boundaries_in` finds them.

    Raises:
        MissingKeyError: a state is missing where a sequence begins after the first step of its trajectory, or in a
            sample of a buffer or a minibatch.
    """
    missing = [key for key in states if batch.get(key, None) is None]
    if not missing:
        return
    steps = batch.get(TRAJ_STEPS, None)
    cut = batch.get((*STORED, IS_INIT), None) is not None
    if not cut and steps is not None and batch.get(IS_INIT, None) is not None and _readable(steps):
        starts = boundaries_in(batch).starts if starts is None else starts
        inside = starts.reshape(batch.batch_size)[..., 1:] & (steps.reshape(batch.batch_size)[..., 1:] > 0)
        cut = bool((inside & ~_flags(batch)[..., 1:]).any())
    if cut:
        raise MissingKeyError(
            f"The sequences of this batch begin in the middle of episodes, but the states {missing} to start from are "
            "not in it, so a network would forget what came before. Keep them in the batch; those of a critic come "
            "from collection with it: Collector(env, TensorDictSequential(actor, critic), ...)."
        )


def check_order(batch: Step, starts: Tensor | None = None) -> None:
    """Refuse a batch that nothing marks and whose stored states show that its tokens don't follow each other.

    The state that a token was collected with is the one that the token before wrote under ``"next"``. Where trajectory
    steps or the marks of a sample are in the batch they decide, and nothing is checked. Padding, as
    ``("collector", "mask")`` says, is left out. It can't be told where there are no states under ``"next"``, where they
    are all the same, or where a recurrent pass has rewritten them (which observations that follow each other show); nor
    is anything read while a CUDA graph is captured, or under ``torch.compile`` and ``torch.vmap``. On a GPU this waits
    for the device once.

    Args:
        batch: ``[*B, T]``.
        starts: bool ``[*B, T]``, where sequences begin; by default as :func:`boundaries_in` finds them.

    Raises:
        UsageError: a state is not the one that the token before left.
    """
    if batch.ndim == 0 or batch.batch_size.numel() == 0:
        return
    if batch.get(TRAJ_STEPS, None) is not None or batch.get(STORED, None) is not None:
        return
    found = list(_states(batch))
    if not found or batch.batch_size[-1] < 2 or not _readable(found[0][1]):
        return
    if starts is None:
        if batch.get(IS_INIT, None) is None:
            return
        starts = boundaries_in(batch).starts
    inner = ~starts.reshape(batch.batch_size)[..., 1:]
    mask = batch.get(MASK, None)
    if mask is not None:  # padding holds anything
        valid = mask.reshape(batch.batch_size)
        inner = inner & valid[..., 1:] & valid[..., :-1]
    for key, state, after in found:
        broken = inner & ~_alike(state, after, batch.ndim) & ~_untold(after, batch.ndim)
        if broken.any() and not _observations_follow(batch, inner):
            where = int(broken.reshape(-1).nonzero()[0])
            row, token = divmod(where, inner.shape[-1])
            raise UsageError(
                f"The tokens of this batch don't follow each other: the state {key!r} of token {token + 1}"
                f"{f' of row {row}' if inner.shape[:-1].numel() > 1 else ''} is not the one that the token before left "
                f"under 'next' ({int(broken.sum())} such places), and nothing marks a boundary there. Keep "
                "('collector', 'traj_ids') and ('collector', 'traj_steps') of the collector in the batch; or keep rows "
                "apart, [*B, T], and raise 'is_init' where a token doesn't continue the one before."
            )


def _readable(value: Tensor) -> bool:
    """Whether values may be looked at: not under transforms, nor while a CUDA graph is captured."""
    if torch.compiler.is_compiling() or is_functorch_active():
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def _states(batch: Step) -> Iterator[tuple[NestedKey, Tensor, Tensor]]:
    """Yield key, root value and value under ``"next"`` of what has the shape of recurrent states, ``[*B, T, L, H]``."""
    for path, value in leaves(batch):
        if path[0] != NEXT and value.ndim == batch.ndim + 2 and value.is_floating_point():
            after = batch.get(next_key(path), None)
            if after is not None and after.shape == value.shape:
                yield path[0] if len(path) == 1 else path, value, cast(Tensor, after)


def _alike(value: Tensor, after: Tensor, lead: int) -> Tensor:
    """Return bool ``[*B, T - 1]``: each token but the first holds what the one before has under ``"next"``."""
    time = lead - 1
    held, left = value.narrow(time, 1, value.shape[time] - 1), after.narrow(time, 0, value.shape[time] - 1)
    if not value.is_floating_point():
        return (held == left).flatten(lead).all(-1) if value.ndim > lead else held == left
    alike = torch.isclose(held, left.to(held.dtype), rtol=_RTOL, atol=_ATOL, equal_nan=True)
    return alike.flatten(lead).all(-1) if value.ndim > lead else alike


def _untold(after: Tensor, lead: int) -> Tensor:
    """Return bool ``[*B, T - 1]``: what the token before left says nothing, as it is zero or everywhere the same."""
    left = after.narrow(lead - 1, 0, after.shape[lead - 1] - 1).flatten(lead)
    first = after.flatten(0, lead - 1)[:1]
    return (left == 0).all(-1) | (after == first).all()


def _observations_follow(batch: Step, inner: Tensor) -> bool:
    """Whether observations that change say of all ``inner`` tokens that they continue the one before."""
    told = False
    states = {key for key, _, _ in _states(batch)}
    for path, value in leaves(batch):
        key = path[0] if len(path) == 1 else path
        if path[0] in (NEXT, ACTION, DONE, IS_INIT) or key in states:
            continue
        after = batch.get(next_key(path), None)
        if after is None or after.shape != value.shape or value.dtype == torch.bool:
            continue
        if not (_alike(value, after, batch.ndim) | ~inner).all():
            return False
        told |= not bool((value == value.flatten(0, batch.ndim - 1)[:1]).all())
    return told


def _flags(batch: Step) -> Tensor:
    return cast(Tensor, batch.get(IS_INIT)).reshape(batch.batch_size).bool()
