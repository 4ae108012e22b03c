"""Gated matrix recurrences on an NVIDIA GPU.

A program walks over the chunks of a row with the state of one head in registers; a chunk is a few matrix products. What
the delta rule needs of a chunk and doesn't depend on the state is found before, for all chunks at once. Rows that are
too few and too long to occupy the GPU are cut into pieces, whose maps of the state are found side by side.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.cells import States
from recurl.recurrence.cuda.backend import missing_package, refused_device
from recurl.recurrence.cuda.matrix.config import LARGEST, Plan, Sizes, plan_for
from recurl.recurrence.matrix.kernels import MatrixInputs, MatrixKernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Gradients = tuple[Tensor | None, ...]


class TritonMatrix(MatrixKernels):
    """Forward pass, backward pass and single steps of matrix recurrences.

    Args:
        plan_for: rule for the division among programs: :func:`~recurl.recurrence.cuda.matrix.config.plan_for`.
        precision: of products of float32 operands: ``"tf32x3"`` or ``"ieee"`` (accurate to float32), or ``"tf32"``.
            Operands of bfloat16 are multiplied as such, those of float16 in tf32, which has as many bits and the range
            that states need. Sums and states are float32.
    """

    name = "triton"

    def __init__(self, plan_for: Callable[[Sizes], Plan] = plan_for, precision: str = "tf32x3") -> None:
        self.plan_for, self.precision = plan_for, precision

    def missing(self) -> str | None:
        """Return how to install Triton, which comes with torch's CUDA builds, if it is missing, else None."""
        return missing_package()

    def unsupported(self, support: OperatorSupport) -> str | None:
        """Return why a call isn't supported, or None: it needs an NVIDIA GPU of compute capability 8.0 or newer.

        Keys and values of a head have at most :data:`recurl.recurrence.cuda.matrix.config.LARGEST` numbers.
        """
        if support.dtype not in _DTYPES:
            return f"it computes in float32, bfloat16 and float16, got {support.dtype}; use 'chunked' or 'loop'"
        if max(support.keys, support.values) > LARGEST:
            sizes = f"{support.keys} and {support.values}"
            return f"keys and values of a head have at most {LARGEST} numbers, got {sizes}; use 'chunked'"
        return refused_device(support.device)

    def forward(self, inputs: MatrixInputs, keep: bool) -> tuple[States, States]:
        """Return the results; see :meth:`recurl.recurrence.matrix.kernels.MatrixKernels.forward`."""
        return _launch().run_forward(inputs, keep, self._plan(inputs), self.precision)

    def backward(
        self,
        inputs: MatrixInputs,
        after: States,
        saved: States,
        grads: States,
        needs: tuple[bool, ...] = (True,) * 6,
    ) -> Gradients:
        """Return the gradients of query, key, value, log_decay, rate and states, None where ``needs`` is false.

        Args:
            inputs: inputs of :meth:`forward`.
            after: its results.
            saved: what it saved; what it didn't is computed again.
            grads: gradients of the results. That of the states is read only at the last token of each segment.
            needs: which gradients to return. That of the states is at all tokens, zero except at the first one of each
                segment that starts from a stored state, and None without stored states.
        """
        plan = self._plan(inputs)
        if not saved:
            _, saved = self.forward(inputs._replace(after=False), keep=True)
        found = _launch().run_backward(inputs, saved, grads, needs[5], plan, self.precision)
        return tuple(one if need else None for one, need in zip(found, needs, strict=True))

    def saved_like(self, inputs: MatrixInputs) -> States:
        """Return empty tensors like those that :meth:`forward` saves."""
        return _launch().saved_like(inputs, self._plan(inputs), self.precision)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        states: Tensor | None,
        is_init: Tensor | None = None,
        delta: bool = False,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of one token of each row and the states after it, from one kernel, without gradients.

        Args:
            query: ``[B, heads, K]``, already scaled.
            key: ``[B, heads, K]``.
            value: ``[B, heads, V]``.
            log_decay: ``[B, heads]``.
            rate: ``[B, heads]``.
            states: ``[B, heads, K, V]``, or None: zeros.
            is_init: bool ``[B]`` or ``[B, 1]``, true where a row starts from zero and its state isn't read; or None.
            delta: whether the recurrence has the delta rule.
            in_place: whether to overwrite ``states``, whose matrices must be contiguous.

        Returns:
            ``[B, heads, V]`` and ``[B, heads, K, V]``.

        Raises:
            ArgumentError: ``states`` can't be overwritten.
        """
        if in_place and (states is None or states.stride()[2:] != (value.shape[-1], 1) or 0 in states.stride()[:2]):
            found = "None" if states is None else f"strides {states.stride()}"
            raise ArgumentError(
                "States that are overwritten must be given, each row and head with a contiguous matrix of its own; got "
                f"{found}. Clone them, or use in_place=False."
            )
        return _launch().run_step(query, key, value, log_decay, rate, states, is_init, delta, in_place)

    def _plan(self, inputs: MatrixInputs) -> Plan:
        tokens, heads, keys = inputs.key.shape
        length = inputs.boundaries.batch_shape[-1]
        bits = 8 * inputs.key.dtype.itemsize
        processors = _launch().processors_of(inputs.key.device)
        sizes = Sizes(tokens // length, length, heads, keys, inputs.value.shape[-1], bits, inputs.delta, processors)
        return self.plan_for(sizes)


def _launch() -> Any:
    # By name: a static import would make users without a GPU load Triton.
    return importlib.import_module("recurl.recurrence.cuda.matrix.launch")
