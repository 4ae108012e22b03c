# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Parts of the kernels with one slot per program: rings in shared memory, products by plain FMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recurl.recurrence.cuda.registers import copy_async

CHUNK = gl.constexpr(16)  # columns of the recurrent weights that adjacent threads share


@gluon.jit
def ring_of(kind, RING: gl.constexpr, UNITS: gl.constexpr):
    """Allocate shared memory for RING steps of one value per unit."""
    return gl.allocate_shared_memory(kind, [RING, UNITS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def page_of(UNITS: gl.constexpr):
    """Allocate shared memory for one value per unit."""
    return gl.allocate_shared_memory(gl.float32, [UNITS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def bring(ring, slot, pointer, inside):
    """Start to copy the values of one step."""
    copy_async(ring.index(slot), pointer, mask=inside)


@gluon.jit
def weight_chunks(
    w_hh,
    unit,
    gate: gl.constexpr,
    CHUNKS: gl.constexpr,
    HELD: gl.constexpr,
    HIDDEN: gl.constexpr,
    L2: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Load the weights of one gate from or to the units, [units, CHUNK]: HELD in registers, others in shared memory."""
    PAGE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row = unit[:, None]
    found = ()
    for chunk in gl.static_range(CHUNKS):
        column = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L2))[None, :]
        if TRANSPOSED:
            at = w_hh + (gate * HIDDEN + column) * HIDDEN + row
        else:
            at = w_hh + (gate * HIDDEN + row) * HIDDEN + column
        value = gl.load(at, mask=(row < HIDDEN) & (column < HIDDEN), other=0.0)
        if chunk < HELD:
            found = found + (value,)  # noqa: RUF005 - Gluon has no unpacking here
        else:
            page = gl.allocate_shared_memory(gl.float32, [unit.shape[0], CHUNK], PAGE, value)
            found = found + (page,)  # noqa: RUF005 - likewise
    return found


@gluon.jit
def add_product(acc, weights, chunk: gl.constexpr, value, HELD: gl.constexpr, L2: gl.constexpr):
    """Add the products of one chunk of :func:`weight_chunks` to ``acc``, still separate for its CHUNK columns."""
    if chunk < HELD:
        acc += weights[chunk] * value
    else:
        acc += weights[chunk].load(L2) * value
    return acc
