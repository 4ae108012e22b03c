"""A step of a cell on a GPU, with kernels for attention and for matrices where nothing is differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.core.torch_compat import are_modes_active
from recurl.recurrence.backend import OperatorSupport, record_run
from recurl.recurrence.built_in import ATTENTION, MATRIX
from recurl.recurrence.cells.attention import Attention
from recurl.recurrence.cells.time import OneStep
from recurl.recurrence.cuda.step.operation import RECORDED, can_step_on


class KernelStep(OneStep):
    """One step of every row: each window and each matrix is read once, and written once."""

    attention: Any = ATTENTION.named("triton")
    matrices: Any = MATRIX.named("triton")

    def attend(self, attention: Attention, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the last inputs; return the result and the inputs to keep."""
        query = attention.query
        support = OperatorSupport(query.device, query.dtype, False, query.shape[-1], before.shape[-1])
        if not _can_run(*attention, inputs, before) or self.attention.unsupported(support) is not None:
            return super().attend(attention, inputs, before)
        record_run(RECORDED)
        return self.attention.step(attention, inputs, before)

    def remember(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        before: Tensor,
        delta: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Write into a matrix of each head; return what it holds for the query, and the matrices."""
        given = (query, key, value, log_decay, rate, before)
        support = OperatorSupport(value.device, value.dtype, False, key.shape[-1], value.shape[-1])
        if not _can_run(*given) or self.matrices.unsupported(support) is not None:
            return super().remember(*given, delta)
        record_run(RECORDED)
        return self.matrices.step(*given, delta=delta)


KERNEL_STEP = KernelStep()


def _can_run(*tensors: Tensor) -> bool:
    first = tensors[0]
    if not first.shape[0] or not can_step_on(first) or are_modes_active():
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return False
    return all(one.dtype == first.dtype and one.device == first.device for one in tensors)
