"""Programs of the library over all tokens of a batch, with derivatives."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from recurl.recurrence.cpu.library import check, pass_functions, surrogate_function
from recurl.recurrence.cpu.program import Program

__all__ = ["Pass"]

_PASS = struct.Struct("9q")  # recurl_pass


class Pass:
    """A program over all tokens of a batch, forward and backward.

    Args:
        program: what runs; its builder's ``why_not_differentiable`` is None.
        weights: those that have gradients; and where, among the numbers of all gradients, those of each begin.
    """

    def __init__(self, program: Program, weights: Sequence[tuple[Tensor, int]]) -> None:
        self._pointer, self._kept = program.address, program
        self._places = struct.Struct(f"{2 * program.given}q")
        self._weights = [
            (tensor.data_ptr(), first * tensor.element_size(), tensor.numel()) for tensor, first in weights
        ]
        self._memory, self._forward, self._backward = pass_functions()
        self._surrogate = surrogate_function()

    def memory(self, tokens: int) -> Tensor:
        """Return memory that a pass over so many tokens works in."""
        return torch.empty(self._memory(self._pointer, tokens), dtype=torch.uint8)

    def forward(self, places: Sequence[int], tokens: int, starts: Tensor) -> Tensor:
        """Run forward; return what the backward pass needs.

        Args:
            places: a pointer and a stride for each slot that lies outside; null for states after a step.
            tokens: N.
            starts: bool ``[N]``, contiguous.
        """
        memory, given = self.memory(tokens), self._buffer(places)
        check(self._forward(self._call(given, tokens, starts, memory, 0, b"")))
        return memory

    def backward(
        self, places: Sequence[int], grads: Sequence[int], tokens: int, starts: Tensor, memory: Tensor, into: Tensor
    ) -> None:
        """Add the gradients of all weights to the numbers ``into``.

        Args:
            places: as those of forward.
            grads: likewise, gradients of the slots; null for none.
            tokens: N.
            starts: as that of forward.
            memory: what forward returned.
            into: gradients of all weights, contiguous.
        """
        given, of_given, weights = self._buffer(places), self._buffer(grads), self._into(into)
        check(self._backward(self._call(given, tokens, starts, memory, ctypes.addressof(of_given), weights)))

    def descend(
        self,
        places: Sequence[int],
        grads: Sequence[int],
        tokens: int,
        starts: Tensor,
        memory: Tensor,
        into: Tensor,
        surrogate: bytes,
    ) -> None:
        """Run forward, compute the losses of PPO, and run backward; gradients of weights are overwritten.

        Args:
            places: as those of forward; ``surrogate`` reads what is written there, and writes ``grads``.
            grads: as those of backward.
            tokens: N.
            starts: as that of forward.
            memory: what :meth:`memory` returned.
            into: as that of backward.
            surrogate: recurl_surrogate.
        """
        given, of_given, weights = self._buffer(places), self._buffer(grads), self._into(into)
        call = self._call(given, tokens, starts, memory, ctypes.addressof(of_given), weights)
        check(self._surrogate(call, surrogate))

    def _into(self, into: Tensor) -> bytes:
        """Return an array of recurl_weight."""
        first = into.data_ptr()
        numbers = [number for weight, offset, count in self._weights for number in (weight, first + offset, count)]
        return struct.pack(f"{len(numbers)}q", *numbers)

    def _buffer(self, places: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(self._places.pack(*places), self._places.size)

    def _call(
        self,
        given: ctypes.Array[ctypes.c_char],
        tokens: int,
        starts: Tensor,
        memory: Tensor,
        grads: int,
        weights: bytes,
    ) -> bytes:
        of_weights = ctypes.cast(ctypes.c_char_p(weights), ctypes.c_void_p).value
        threads, pointer = torch.get_num_threads(), memory.data_ptr()
        numbers = (self._pointer, ctypes.addressof(given), tokens, threads, starts.data_ptr(), pointer, grads)
        return _PASS.pack(*numbers, len(self._weights) if weights else 0, of_weights or 0)
