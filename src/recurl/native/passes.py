"""Differentiable runs of library programs over all tokens of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from recurl.native import structures
from recurl.native.library import check, pass_functions, surrogate_function
from recurl.native.program import Program

__all__ = ["Pass"]

_PASS = structures.Pass.packer()


class Pass:
    """Forward and backward pass of a program over all tokens of a batch.

    Args:
        program: the program; its builder's ``gradient_obstacle`` must be None.
        weights: the weights that have gradients, each with the offset of its gradient in the flat gradient tensor.
    """

    def __init__(self, program: Program, weights: Sequence[tuple[Tensor, int]]) -> None:
        self._pointer, self._kept = program.address, program
        self._places = structures.Place.packer(program.given)
        self._weights = [
            (tensor.data_ptr(), first * tensor.element_size(), tensor.numel()) for tensor, first in weights
        ]
        self._packed_weights = structures.Weight.packer(len(self._weights))
        self._memory, self._forward, self._backward = pass_functions()
        self._surrogate = surrogate_function()

    def memory(self, tokens: int) -> Tensor:
        """Allocate the working memory of a pass over ``tokens`` tokens."""
        return torch.empty(self._memory(self._pointer, tokens), dtype=torch.uint8)

    def forward(self, places: Sequence[int], tokens: int, starts: Tensor) -> Tensor:
        """Run the forward pass and return the memory that the backward pass needs.

        Args:
            places: a pointer and a stride for each external slot; null for states after a step.
            tokens: N.
            starts: bool ``[N]``, contiguous.
        """
        memory, given = self.memory(tokens), self._buffer(places)
        check(self._forward(self._call(given, tokens, starts, memory, 0, b"")))
        return memory

    def backward(
        self, places: Sequence[int], grads: Sequence[int], tokens: int, starts: Tensor, memory: Tensor, into: Tensor
    ) -> None:
        """Run the backward pass and add the gradients of all weights to ``into``.

        Args:
            places: as in :meth:`forward`.
            grads: gradients of the slots in the same format; null for none.
            tokens: N.
            starts: as in :meth:`forward`.
            memory: result of :meth:`forward`.
            into: gradients of all weights, flat and contiguous.
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
        """Run the forward pass, compute the PPO losses, and run the backward pass; weight gradients are overwritten.

        Args:
            places: as in :meth:`forward`; the losses of ``surrogate`` read its outputs and write ``grads``.
            grads: as in :meth:`backward`.
            tokens: N.
            starts: as in :meth:`forward`.
            memory: result of :meth:`memory`.
            into: as in :meth:`backward`.
            surrogate: bytes of a recurl_surrogate.
        """
        given, of_given, weights = self._buffer(places), self._buffer(grads), self._into(into)
        call = self._call(given, tokens, starts, memory, ctypes.addressof(of_given), weights)
        check(self._surrogate(call, surrogate))

    def _into(self, into: Tensor) -> bytes:
        """Return an array of recurl_weight."""
        first = into.data_ptr()
        numbers = [number for weight, offset, count in self._weights for number in (weight, first + offset, count)]
        return self._packed_weights.pack(*numbers)

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
