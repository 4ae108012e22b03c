"""Launches that arrange weights in the order of the kernels, and restore their gradients."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.cuda import arrange, pointwise
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.prepared import PreparedLaunch, prepared

_ARRANGED_ROWS, _ARRANGED_COLUMNS, _RESTORED_COLUMNS = 8, 128, 256
_PACKED = 32
_PRECISIONS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SUMMED_ROWS, _SUMMED_COLUMNS, _SUMMING_PROGRAMS = 32, 128, 264


def arranged(w: Tensor, layout: GateLayout, dtype: torch.dtype, biases: tuple[Tensor | None, Tensor | None]) -> States:
    """Return weights ``[G * H, I]`` in the order of the input product, ``[G * W, I]``, and the biases' sum ``[G * W]``.

    Without any bias the sum is empty. A GRU's b_hn is excluded: it enters inside the reset gate.
    """
    rows, columns = layout.num_gates * layout.width, w.shape[1]
    b_ih, b_hh = biases
    in_bias, hidden_bias = b_ih is not None, b_hh is not None
    weight = torch.empty(rows, columns, dtype=dtype, device=w.device)
    bias = torch.empty(rows if in_bias or hidden_bias else 0, dtype=dtype, device=w.device)
    arrange_weights = _arrange_launch(layout, in_bias, hidden_bias)
    arrange_weights(w.contiguous(), *[w if b is None else b.contiguous() for b in biases], weight, bias, columns)
    return weight, bias


@lru_cache(maxsize=256)
def _arrange_launch(layout: GateLayout, in_bias: bool, hidden_bias: bool) -> PreparedLaunch:
    return prepared(
        *(arrange.arrange_kernel, -(-layout.num_gates * layout.width // _ARRANGED_ROWS)),
        **layout.constants,
        IN_BIAS=in_bias,
        HIDDEN_BIAS=hidden_bias,
        ROWS=_ARRANGED_ROWS,
        BLOCK=_ARRANGED_COLUMNS,
        num_warps=4,
    )


def restored(
    grad_gates: Tensor,
    to_w_ih: Tensor | None,
    to_w_hh: Tensor | None,
    layout: GateLayout,
    biases: bool,
    sums: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of w_ih, w_hh, b_ih and b_hh in the order of torch.nn, float32; None where not requested.

    Args:
        grad_gates: gradients of the gates ``[N, 4 * W]``, summed for the biases in float32: ATen's reduction is three
            times slower on so tall a matrix.
        to_w_ih: the product ``[G * W, I]`` in the order of the input product, or None.
        to_w_hh: the product ``[G * W, H]`` in the order of the hidden product, or None.
        layout: layout of these products.
        biases: whether the gradients of the biases are requested.
        sums: partial sums of ``grad_gates`` if they are known, ``[parts, 4 * W]``.
    """
    rows, device = layout.num_gates * layout.hidden, grad_gates.device
    if not biases:
        sums = grad_gates[:0]
    elif sums is None:
        sums = _sums(grad_gates)
    found = [
        None if value is None else torch.empty(rows, value.shape[1], dtype=torch.float32, device=device)
        for value in (to_w_ih, to_w_hh)
    ]
    b_ih, b_hh = [torch.empty(rows if biases else 0, dtype=torch.float32, device=device) for _ in range(2)]
    _restore_launch(layout)(
        *[sums if value is None else value for value in (to_w_ih, to_w_hh, *found)],
        *(sums, b_ih, b_hh, sums.shape[0]),
        *[0 if value is None else value.shape[1] for value in found],
    )
    return *found, *((b_ih, b_hh) if biases else (None, None))


def _sums(grad_gates: Tensor) -> Tensor:
    """Return partial sums over all tokens, float32."""
    tokens, columns = grad_gates.shape
    share = max(_SUMMED_ROWS, -(-tokens // _SUMMING_PROGRAMS))
    sums = torch.empty(-(-tokens // share), columns, dtype=torch.float32, device=grad_gates.device)
    _sums_launch(sums.shape[0], -(-columns // _SUMMED_COLUMNS))(grad_gates, sums, tokens, share, columns)
    return sums


@lru_cache(maxsize=256)
def _sums_launch(shares: int, across: int) -> PreparedLaunch:
    return prepared(pointwise.sums_kernel, shares, across, ROWS=_SUMMED_ROWS, COLUMNS=_SUMMED_COLUMNS, num_warps=4)


@lru_cache(maxsize=256)
def _restore_launch(layout: GateLayout) -> PreparedLaunch:
    rows = layout.num_gates * layout.hidden
    return prepared(arrange.restore_kernel, rows, **layout.constants, BLOCK=_RESTORED_COLUMNS, num_warps=4)


def packed(direction: str, w_hh: Tensor, layout: GateLayout, dtype: torch.dtype, exact: bool = False) -> Tensor:
    """Return the recurrent weights ``[G * H, H]`` as the tiles read them, flat; see ``arrange.pack_kernel``."""
    width, gates = layout.width, layout.num_gates
    found = torch.empty((2 if exact else 1) * gates * width * width, dtype=dtype, device=w_hh.device)
    pack = prepared(
        *(arrange.pack_kernel, gates, width // _PACKED, width // _PACKED),
        HIDDEN=layout.hidden,
        WIDTH=width,
        GATES=gates,
        FORWARD=direction == "forward",
        PRECISION=_PRECISIONS[dtype],
        SPLIT=exact,
        BLOCK=_PACKED,
        num_warps=4,
    )
    pack(w_hh, found)
    return found
