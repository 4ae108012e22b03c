# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108
# Kernel bodies are a language of their own: Triton's types are known to its compiler, not to pyright.
"""Pieces of the kernels with one slot per program: float32 functions, rings of shared memory, products by plain FMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from recurl.recurrence.triton import registers
from recurl.recurrence.triton.registers import four_of, store_gates, two_of

CHUNK = gl.constexpr(16)  # columns of the recurrent weights that neighbouring threads share


@gluon.jit
def exact_sigmoid(x):
    """Logistic function to float32 accuracy; saturates to 0 and 1 without NaN."""
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def exact_tanh(x):
    """Hyperbolic tangent to float32 accuracy: odd polynomial near zero, where the quotient would cancel."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = gl.exp(-2.0 * gl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return gl.where(square < 0.0625, near, gl.where(x < 0, -far, far))


@gluon.jit
def sigmoid(x, EXACT: gl.constexpr):
    """Logistic function, in float32 accuracy or in one instruction."""
    if EXACT:
        y = exact_sigmoid(x)
    else:
        y = registers.sigmoid(x)
    return y


@gluon.jit
def tanh(x, EXACT: gl.constexpr):
    """Hyperbolic tangent, in float32 accuracy or in one instruction."""
    if EXACT:
        y = exact_tanh(x)
    else:
        y = registers.tanh(x)
    return y


@gluon.jit
def ring_of(kind, RING: gl.constexpr, UNITS: gl.constexpr):
    """A place in shared memory for RING steps of one value per unit."""
    return gl.allocate_shared_memory(kind, [RING, UNITS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def page_of(UNITS: gl.constexpr):
    """A place in shared memory for one value per unit."""
    return gl.allocate_shared_memory(gl.float32, [UNITS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def bring(ring, slot, pointer, inside):
    """Start to copy one step's values."""
    async_copy.async_copy_global_to_shared(ring.index(slot), pointer, mask=inside)


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
    """The weights of one gate from or to the units, as [units, CHUNK]: HELD in registers, the rest in shared memory."""
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
            found = found + (value,)  # noqa: RUF005 - the language has no unpacking here
        else:
            page = gl.allocate_shared_memory(gl.float32, [unit.shape[0], CHUNK], PAGE, value)
            found = found + (page,)  # noqa: RUF005
    return found


@gluon.jit
def add_product(acc, weights, chunk: gl.constexpr, value, HELD: gl.constexpr, L2: gl.constexpr):
    """``acc`` and the products of one chunk of :func:`weight_chunks`, still apart in CHUNK columns."""
    if chunk < HELD:
        acc += weights[chunk] * value
    else:
        acc += weights[chunk].load(L2) * value
    return acc


@gluon.jit
def store_kept(gates, at, inside, g0, g1, g2, g3, EXACT: gl.constexpr):
    """Keep the gates of a unit together: as float16, or as float32."""
    if EXACT:
        registers.store_two(gates, 2 * at, inside, g0, g1, 32)
        registers.store_two(gates, 2 * at + 1, inside, g2, g3, 32)
    else:
        store_gates(gates, at, inside, g0, g1, g2, g3)


@gluon.jit
def kept(ring, other, slot, LU, EXACT: gl.constexpr):
    """What :func:`store_kept` kept, from the rings that it was copied to."""
    if EXACT:
        g0, g1 = two_of(ring.index(slot).load(LU), 32)
        g2, g3 = two_of(other.index(slot).load(LU), 32)
    else:
        g0, g1, g2, g3 = four_of(ring.index(slot).load(LU))
    return g0, g1, g2, g3
