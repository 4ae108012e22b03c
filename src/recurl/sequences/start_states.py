"""Sparse recurrent states: states of a batch that are stored only where sequences start.

Learning reads states only at the starts of sequences, so a batch ``[*B, T]`` that will be cut into sequences of L steps
needs T / L states per row. A *sparse* state is an ordinary entry of the batch: the X numbers of the state at a
sequence's start are spread over the L steps of the sequence, ``[*B, T, ceil(X / L)]``. They stay together if whole
sequences are selected, shuffled or moved. A second tensor holds the index of each step within its sequence, to detect
batches that were cut elsewhere. Both tensors are nested under the key of the state; the first is named after L::

    recurrent_state_h            [4, 64, 1, 128]        dense: a state for every step
    (recurrent_state_h, every_32)  [4, 64, 4]           sparse: states of steps 0 and 32
    (recurrent_state_h, step)      [4, 64]              0 to 31, twice
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.core.errors import UsageError
from recurl.core.keys import TRAJ_STEPS, NestedKey
from recurl.sequences.entries import Entries, Step
from recurl.sequences.index import SequenceIndex, readable
from recurl.sequences.stored import stored_everywhere

__all__ = ["allocate", "check_cut", "check_sequences", "refuse", "sparse_values", "state_in"]

_EVERY, _STEP = "every_", "step"
_NAMED = re.compile(f"{_EVERY}[0-9]+")
_Path: TypeAlias = tuple[str, ...]


def allocate(
    batch_size: torch.Size, shape: torch.Size, every: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[TensorDict, Tensor]:
    """Allocate a sparse state; return it and a view of its memory, ``[*B, T / L, X]``, for writing states.

    Args:
        batch_size: ``[*B, T]``.
        shape: shape of the state of one step, which has X numbers.
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
    """Return a state of a batch, ``[*B, T, *shape]``, or None if the batch does not have it.

    A sparse state is ``[*B, T / L, *shape]``, from every L-th step; see :func:`check_cut`.

    Args:
        batch: ``[*B, T]``.
        key: key of the state.
        shape: shape of the state of one step.
        sequences: whether the state is read only at the starts of sequences, rather than at every step.

    Raises:
        UsageError: rows are not whole sequences, the state has another size, or it is needed at every step.
    """
    entry: Any = batch.get(key, None)
    if not _is_at_starts(entry):
        return entry
    name, every = _named(entry)
    if not sequences:
        raise UsageError(
            f"The state {key!r} is stored only at the starts of sequences of {every} steps, so this batch can't be run "
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
    *rows, steps = batch_size
    return spread.reshape(*rows, steps // every, every * spread.shape[-1])[..., :numbers].unflatten(-1, shape)


def sparse_values(entry: Any, *, placed: bool = False) -> Any:
    """Return the numbers of a sparse state, ``[*B, T, ...]``; return any other entry unchanged.

    Args:
        entry: an entry of a batch.
        placed: put all numbers of a state at the first step of its sequence, with zeros elsewhere; otherwise return
            them as stored.
    """
    if not _is_at_starts(entry):
        return entry
    name, every = _named(entry)
    spread = entry.get(name)
    if not placed:
        return spread
    starts = spread.reshape(-1, every * spread.shape[-1])
    return stored_everywhere(starts, starts.shape[0] * every).reshape(*spread.shape[:-1], -1)


def check_cut(batch: Step, keys: Iterable[NestedKey], index: SequenceIndex) -> None:
    """Check that a batch is cut only where its sparse states are stored.

    Its tokens must be whole sequences. A segment may begin inside a sequence only where an episode begins, as the state
    is zero there. The check is skipped during CUDA graph capture, and under ``torch.compile`` and ``torch.vmap``. On a
    GPU it synchronizes with the device, unless the batch is a minibatch as :class:`~recurl.data.SequenceMinibatches`
    yields it, which was checked when it was cut.

    Args:
        batch: ``[*B, T]``.
        keys: keys of the states being read.
        index: its index.

    Raises:
        UsageError: the batch is cut elsewhere, or lacks ``("collector", "traj_steps")``.
    """
    for key in keys:
        entry = batch.get(key, None)
        if not _is_at_starts(entry):
            continue
        every = _named(entry)[1]
        steps = batch.get(TRAJ_STEPS, None)
        if steps is None:
            raise UsageError(
                f"{_rule(key, every)}, which can't be checked without ('collector', 'traj_steps'): keep that entry in "
                "the batch."
            )
        if index.begin_at_states or not readable(steps):
            continue
        step = _flat_step(batch, key)
        _check_whole(key, every, step, index.starts & (step != 0) & (steps.reshape(-1) != 0))


def check_sequences(batch: Step, length: int) -> None:
    """Check that the sparse states of ``batch`` are stored wherever sequences of ``length`` steps begin.

    The check is skipped, or synchronizes with the device, as in :func:`check_cut`.

    Args:
        batch: ``[*B, T]``.
        length: length of the sequences that rows are cut into; the last one may be shorter.

    Raises:
        UsageError: a sequence begins where a state is not stored.
    """
    for key, every in _found(batch):
        if length % every or batch.batch_size[-1] % every:
            raise UsageError(
                f"{_rule(key, every)}, but rows of {batch.batch_size[-1]} steps would be cut into sequences of "
                f"{length}. {_advice(every)}"
            )
        _check_whole(key, every, _flat_step(batch, key))


def refuse(batch: Step, reader: str) -> None:
    """Check that a batch has no sparse states.

    Args:
        batch: any batch.
        reader: what needs the states of all steps, as the subject of the message.

    Raises:
        UsageError: the batch has a sparse state.
    """
    for key, every in _found(batch):
        raise UsageError(
            f"{reader} needs the states of all steps, but {key!r} is stored only at the starts of sequences of {every} "
            f"steps: {_ALL}"
        )


def _found(batch: Any, prefix: _Path = ()) -> Iterator[tuple[NestedKey, int]]:
    """Yield the key and the sequence length L of each sparse state of a batch."""
    for name, value in batch.items():
        path = (*prefix, name)
        if _is_at_starts(value):
            yield path[0] if len(path) == 1 else path, _named(value)[1]
        elif isinstance(value, Entries | TensorDictBase):
            yield from _found(value, path)


def _flat_step(batch: Step, key: NestedKey) -> Tensor:
    return batch.get(key).get(_STEP).reshape(-1)


def _check_whole(key: NestedKey, every: int, step: Tensor, wrong: Tensor | None = None) -> None:
    """Check that tokens are whole sequences, given the index of each in its sequence, and that none is ``wrong``."""
    if not readable(step):
        return
    misaligned = step != torch.arange(step.shape[0], device=step.device) % every
    misaligned = misaligned if wrong is None else misaligned | wrong
    if bool(misaligned.any()):
        token = int(misaligned.int().argmax())
        raise UsageError(
            f"{_rule(key, every)}, but a sequence begins or is interrupted at token {token}, which is step "
            f"{int(step[token])} of a stored one. {_advice(every)}"
        )


def _is_at_starts(value: Any) -> bool:
    return not isinstance(value, Tensor) and isinstance(value, Entries | TensorDictBase) and _name(value) is not None


def _name(entry: Any) -> str | None:
    """Return the name of the tensor that holds the numbers, or None if ``entry`` is not a sparse state."""
    found = (name for name, _ in entry.items() if _NAMED.fullmatch(name) and _STEP in entry)
    return next(found, None)


def _named(entry: Step) -> tuple[str, int]:
    name = _name(entry)
    assert name is not None
    return name, int(name.removeprefix(_EVERY))


_ALL = "collect the states of all steps: Collector(...) without sequence_length; --store-states all."


def _rule(key: NestedKey, every: int) -> str:
    return (
        f"The state {key!r} of this batch is stored only at the starts of sequences of {every} steps, so the batch "
        "must be cut there"
    )


def _advice(every: int) -> str:
    return (
        f"Cut it into sequences of {every} steps or a multiple, as SequenceMinibatches(..., slice_len={every}) does; "
        f"or {_ALL}"
    )
