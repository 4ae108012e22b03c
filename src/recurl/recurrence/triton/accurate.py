# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments.
"""Matrix products accurate to float32 on tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x):
    """Return x rounded to as few bits as tensor cores read, and the rest, which keeps a NaN that rounding may lose."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high
