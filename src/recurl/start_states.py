"""Recurrent states of a batch that are stored only where sequences start.

Learning reads the states at the starts of sequences only, so a batch ``[*B, T]`` that will be cut into sequences of L
steps needs T / L states of each row. Such a *sparse* state is an entry of the batch like any other: the X numbers of
the state at a sequence's start are spread over the L steps of the sequence, ``[*B, T, ceil(X / L)]``. They stay
together wherever whole sequences are selected, shuffled or moved. Beside them is the number of each step within its
sequence, by which another cut is noticed. In place of the tensor of the state there are two, nested under its key, the
first named after L::

    recurrent_state_h            [4, 64, 1, 128]        a state for every step
    (recurrent_state_h, every_32)  [4, 64, 4]           those of the steps 0 and 32
    (recurrent_state_h, step)      [4, 64]              0 to 31, twice
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.continuity import readable
from recurl.errors import UsageError
from recurl.keys import TRAJ_STEPS, NestedKey
from recurl.lowering import Entries, Step
from recurl.recurrence import Boundaries

__all__ = ["allocate", "check_cut", "check_sequences", "numbers_of", "refuse", "state_in"]

_EVERY, _STEP = "every_", "step"
_NAMED = re.compile(f"{_EVERY}[0-9]+")
_Path: TypeAlias = tuple[str, ...]


def allocate(
    batch_size: torch.Size, shape: torch.Size, every: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[TensorDict, Tensor]:
    """Return a sparse state, and a view of its memory ``[*B, T / L, X]`` to write states to.

    Args:
        batch_size: ``[*B, T]``.
        shape: shape of the state of one step, of X numbers.
        every: L, the length of a sequence; it must divide T.
        dtype: dtype of the state.
        device: device of the batch.

    Example:
        >>> entry, memory = allocate(torch.Size([4, 64]), torch.Size([1, 128]), 32, dtype=torch.float, device="cpu")
        >>> {name: value.shape for name, value in entry.items()}
        {'every_32': torch.Size([4, 64, 4]), 'step': torch.Size([4, 64])}
        >>> memory.shape
        torch.Size([4, 2, 128])
    """
    *rows, steps = batch_size
    numbers = shape.numel()
    spread = torch.zeros(*batch_size, -(-numbers // every), dtype=dtype, device=device)
    step = torch.arange(every, dtype=torch.int32, device=device).repeat(steps // every).expand(batch_size).contiguous()
    entry = TensorDict({f"{_EVERY}{every}": spread, _STEP: step}, batch_size, device=device)
    return entry, spread.view(*rows, steps // every, -1)[..., :numbers]


def state_in(batch: Step, key: NestedKey, shape: tuple[int, ...], *, sequences: bool = True) -> Tensor | None:
    """Return a state of every step of a batch, ``[*B, T, *shape]``, None if there is none.

    A sparse state is zero where it is not stored; see :func:`check_cut`.

    Args:
        batch: ``[*B, T]``.
        key: key of the state.
        shape: shape of the state of one step.
        sequences: whether it is read at the starts of sequences only, not at every step.

    Raises:
        UsageError: rows are no whole sequences, the state has another size, or is needed at every step.
    """
    entry: Any = batch.get(key, None)
    if not _is_sparse(entry):
        return entry
    name, every = _named(entry)
    if not sequences:
        raise UsageError(
            f"The state {key!r} is stored at the starts of sequences of {every} steps only, so this batch can't be run "
            "step by step: run whole sequences, with set_recurrent_mode(True)."
        )
    batch_size = batch.batch_size
    spread, numbers = entry.get(name), math.prod(shape)
    if spread.shape != torch.Size([*batch_size, -(-numbers // every)]):
        raise UsageError(
            f"The state {key!r}, stored at the starts of sequences of {every} steps, must have {numbers} numbers, "
            f"{-(-numbers // every)} at every step, got {list(spread.shape)} in a batch {list(batch_size)}: read it "
            "with the modules that it was collected with."
        )
    if not batch_size or batch_size[-1] % every:
        raise UsageError(f"{_rule(key, every)}, but its rows have {list(batch_size)[-1:]} steps. {_advice(every)}")
    return _placed(spread, every)[..., :numbers].reshape(*batch_size, *shape)


def numbers_of(entry: Any, *, placed: bool = False) -> Any:
    """Return the numbers of a sparse state, ``[*B, T, ...]``; what else is given, as it is.

    Args:
        entry: an entry of a batch.
        placed: all those of a state at the first step of its sequence, zeros elsewhere; otherwise as they are stored.
    """
    if not _is_sparse(entry):
        return entry
    name, every = _named(entry)
    return _placed(entry.get(name), every) if placed else entry.get(name)


def _placed(spread: Tensor, every: int) -> Tensor:
    starts = spread.reshape(-1, 1, every * spread.shape[-1])
    return F.pad(starts, (0, 0, 0, every - 1)).reshape(*spread.shape[:-1], -1)


def check_cut(batch: Step, keys: Iterable[NestedKey], boundaries: Boundaries) -> None:
    """Refuse a batch that is cut where its sparse states are not stored.

    Its tokens must be whole sequences, and a segment may begin inside one only where an episode does, for there the
    state is zero. Nothing is checked while a CUDA graph is captured, under ``torch.compile`` and ``torch.vmap``. On a
    GPU the check synchronises with the device, unless the batch is a minibatch of
    :class:`~recurl.data.SequenceMinibatches`, which has been checked when it was cut.

    Args:
        batch: ``[*B, T]``.
        keys: keys of the states that are read.
        boundaries: its segments.

    Raises:
        UsageError: it is cut elsewhere, or lacks ``("collector", "traj_steps")``.
    """
    for key in keys:
        entry = batch.get(key, None)
        if not _is_sparse(entry):
            continue
        every = _named(entry)[1]
        steps = batch.get(TRAJ_STEPS, None)
        if steps is None:
            raise UsageError(
                f"{_rule(key, every)}, which can't be checked without ('collector', 'traj_steps'): keep that entry in "
                "the batch."
            )
        if boundaries.begin_at_states or not readable(steps):
            continue
        step = _flat_step(batch, key)
        _check_whole(key, every, step, boundaries.starts & (step != 0) & (steps.reshape(-1) != 0))


def check_sequences(batch: Step, length: int) -> None:
    """Refuse sequences of ``length`` steps that begin where a sparse state of ``batch`` is not stored.

    The numbers are read as by :func:`check_cut`.

    Args:
        batch: ``[*B, T]``.
        length: into what its rows are cut; the last part may be shorter.

    Raises:
        UsageError: they do.
    """
    for key, every in _found(batch):
        if length % every or batch.batch_size[-1] % every:
            raise UsageError(
                f"{_rule(key, every)}, but rows of {batch.batch_size[-1]} steps are to be cut into sequences of "
                f"{length}. {_advice(every)}"
            )
        _check_whole(key, every, _flat_step(batch, key))


def refuse(batch: Step, reader: str) -> None:
    """Refuse a batch with sparse states.

    Args:
        batch: any batch.
        reader: what reads the states of all steps.

    Raises:
        UsageError: it has some.
    """
    for key, every in _found(batch):
        raise UsageError(
            f"{reader} needs the states of all steps, but {key!r} is stored at the starts of sequences of {every} "
            f"steps only: {_ALL}"
        )


def _found(batch: Any, prefix: _Path = ()) -> Iterator[tuple[NestedKey, int]]:
    """Yield key and L of the sparse states of a batch."""
    for name, value in batch.items():
        path = (*prefix, name)
        if _is_sparse(value):
            yield path[0] if len(path) == 1 else path, _named(value)[1]
        elif isinstance(value, Entries | TensorDictBase):
            yield from _found(value, path)


def _flat_step(batch: Step, key: NestedKey) -> Tensor:
    return batch.get(key).get(_STEP).reshape(-1)


def _check_whole(key: NestedKey, every: int, step: Tensor, wrong: Tensor | None = None) -> None:
    """Refuse tokens that are no whole sequences, given the number of each within its own, or that are ``wrong``."""
    if not readable(step):
        return
    torn = step != torch.arange(step.shape[0], device=step.device) % every
    torn = torn if wrong is None else torn | wrong
    if bool(torn.any()):
        token = int(torn.int().argmax())
        raise UsageError(
            f"{_rule(key, every)}, but a sequence begins, or is torn, at token {token}, which is step "
            f"{int(step[token])} of a stored one. {_advice(every)}"
        )


def _is_sparse(value: Any) -> bool:
    return not isinstance(value, Tensor) and isinstance(value, Entries | TensorDictBase) and _name(value) is not None


def _name(entry: Any) -> str | None:
    """Return the name of the tensor with the numbers, None if there is none."""
    found = (name for name, _ in entry.items() if _NAMED.fullmatch(name) and _STEP in entry)
    return next(found, None)


def _named(entry: Step) -> tuple[str, int]:
    name = _name(entry)
    assert name is not None
    return name, int(name.removeprefix(_EVERY))


_ALL = "collect the states of all steps: Collector(...) without sequence_length; --store-states all."


def _rule(key: NestedKey, every: int) -> str:
    return (
        f"The state {key!r} of this batch is stored at the starts of sequences of {every} steps only, so the batch "
        "must be cut there"
    )


def _advice(every: int) -> str:
    return (
        f"Cut it into sequences of {every} steps, or a multiple, as SequenceMinibatches(..., slice_len={every}) does; "
        f"or {_ALL}"
    )
