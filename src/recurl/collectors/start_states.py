"""Collection of sparse recurrent states, stored only where sequences start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.core.keys import next_key, path_of
from recurl.envs.rollout import Policy
from recurl.modules import recurrent_modules
from recurl.sequences.start_states import allocate

__all__ = ["SparseStates", "StartStates", "start_states"]

_Path: TypeAlias = tuple[str, ...]


class StartStates:
    """Rule for storing recurrent states only before the first step of each sequence.

    Args:
        keys: keys of the states.
        every: length of a sequence, L.
    """

    def __init__(self, keys: Sequence[_Path], every: int) -> None:
        self.keys = tuple(keys)
        self.every = every
        self._next = [next_key(key) for key in keys]

    def take(self, found: dict[_Path, Tensor]) -> dict[_Path, Tensor]:
        """Remove the states before and after a step from its entries, and return those before it."""
        for key in self._next:
            found.pop(key, None)
        return {key: found.pop(key) for key in self.keys if key in found}

    def begin(self, step: int) -> bool:
        """Return whether a sequence begins at a step of a batch."""
        return step % self.every == 0


class SparseStates:
    """Sparse states of one batch.

    Args:
        starts: which states are kept.
        batch_size: batch size of the batch, ``[*B, T]``.
        device: device of the batch; that of the states when None.
    """

    def __init__(self, starts: StartStates, batch_size: torch.Size, device: torch.device | None) -> None:
        self._starts = starts
        self._batch_size, self._device = batch_size, device
        self._entries: dict[_Path, tuple[TensorDict, Tensor]] = {}
        self._like: dict[_Path, Tensor] = {}  # states of one step
        self._steps: dict[_Path, Tensor] = {}  # states of all steps, before they are stored
        self._stored: set[int] = set()

    def expect(self, found: dict[_Path, Tensor]) -> dict[_Path, Tensor]:
        """Remove the states from the entries of a step, and return those before it; all steps have such ones."""
        self._like = self._starts.take(found)
        return self._like

    def take(self, step: int, rows: Any, found: dict[_Path, Tensor]) -> None:
        """Remove the states from the entries of a step, and store them if a sequence begins there.

        Args:
            step: index of the step in the batch.
            rows: index of the rows in the batch.
            found: entries of the step.
        """
        states = self.expect(found)
        if self._starts.begin(step):
            self._stored.add(step)
            for key, state in states.items():
                self.write(step, rows, key, state)

    def in_place(self) -> dict[_Path, Tensor]:
        """Return memory for the states before and after all steps, ``[T, *B, ...]``; :meth:`finish` reads it."""
        *rows, steps = self._batch_size
        self._steps = {
            path: torch.empty((steps, *rows, *state.shape[len(rows) :]), dtype=state.dtype)
            for key, state in self._like.items()
            for path in (key, next_key(key))
        }
        return self._steps

    def write(self, step: int, rows: Any, key: _Path, state: Tensor) -> None:
        """Store the state before the first step of a sequence."""
        lead = len(self._batch_size) - 1
        if key not in self._entries:
            device = self._device or state.device
            self._entries[key] = allocate(
                self._batch_size, state.shape[lead:], self._starts.every, dtype=state.dtype, device=device
            )
        memory = self._entries[key][1][rows]
        memory.select(lead, step // self._starts.every).copy_(state.reshape(*state.shape[:lead], -1))

    def finish(self, batch: TensorDict) -> None:
        """Add the states to the batch."""
        begins = range(0, self._batch_size[-1], self._starts.every)
        for step in sorted({*begins} - self._stored) if self._steps else ():  # those written in place
            for key in self._like:
                self.write(step, ..., key, self._steps[key][step])
        for key, (entry, _) in self._entries.items():
            batch.set(key, entry)


def start_states(policy: Policy | None, sequence_length: int | None, steps: int) -> StartStates | None:
    """Return the rule that stores a policy's states at the starts of sequences, or None if all are stored.

    Args:
        policy: the policy.
        sequence_length: length of the sequences; None to store all states.
        steps: number of steps of a batch.

    Raises:
        ArgumentError: the length does not divide the number of steps.
    """
    if sequence_length is None:
        return None
    if sequence_length < 1 or steps % sequence_length:
        raise ArgumentError(
            f"sequence_length must divide the {steps} steps of a row of a batch, so that rows are whole sequences, got "
            f"{sequence_length}."
        )
    modules = recurrent_modules(policy) if isinstance(policy, nn.Module) else []
    keys: Any = dict.fromkeys(key for module in modules for key in module.state_keys)
    return StartStates([path_of(key) for key in keys], sequence_length)
