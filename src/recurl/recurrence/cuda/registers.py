# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913, SIM108
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Parts of the Gluon kernels that map to single machine instructions, and the pointwise math of a step."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.jit
def tanh(x, EXACT: gl.constexpr):
    """Hyperbolic tangent: in one instruction, with a relative error of 2^-11, or to float32 accuracy."""
    if EXACT:  # an odd polynomial near zero, where the quotient would cancel
        square = x * x
        near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
        decay = gl.exp(-2.0 * gl.abs(x))
        far = (1.0 - decay) / (1.0 + decay)
        y = gl.where(square < 0.0625, near, gl.where(x < 0, -far, far))
    else:
        y = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)
    return y


@gluon.jit
def sigmoid(x, EXACT: gl.constexpr):
    """Logistic function, as :func:`tanh`; saturates to 0 and 1 without NaN."""
    if EXACT:
        y = 1.0 / (1.0 + gl.exp(-x))
    else:
        y = 0.5 * tanh(0.5 * x, False) + 0.5
    return y


@gluon.jit
def operand(x, BITS: gl.constexpr, EXACT: gl.constexpr):
    """Convert to an operand: bfloat16 (BITS = 16), float32 rounded to tf32, or float32 that :func:`product` splits."""
    if BITS == 16:
        y = x.to(gl.bfloat16)
    elif EXACT:
        y = x
    else:
        y = rounded(x)
    return y


@gluon.jit
def half(x):
    """Round float32 to float16; finite numbers stay finite, infinity and NaN are unchanged."""
    finite = gl.where(x > 65504.0, 65504.0, gl.where(x < -65504.0, -65504.0, x))
    return gl.where(gl.abs(x) == float("inf"), x, finite).to(gl.float16)


@gluon.jit
def rounded(x):
    """Round float32 to tf32."""
    return gl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def split(x, EXACT: gl.constexpr):
    """Split an operand into its tf32 part and the rest, or return it twice if it is tf32 already."""
    if EXACT:  # rounding may lose a NaN, which the rest then keeps
        high = ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)
        low = x - high
    else:
        high = x
        low = x
    return high, low


@gluon.jit
def product(a, high, low, acc, EXACT: gl.constexpr):
    """Return ``acc + a @ b`` of :func:`operand` values, b by :func:`split`; EXACT: to float32, by three products.

    Tensor cores truncate their sums, so EXACT products are summed over these columns only and added by ordinary
    addition. They have separate accumulators so that they don't wait for each other.
    """
    if EXACT:
        a_high, a_low = split(a, True)
        zero = gl.zeros_like(acc)
        third = mma_v2(a_low, high, zero, input_precision="tf32")
        second = mma_v2(a_high, low, zero, input_precision="tf32")
        acc += mma_v2(a_high, high, zero, input_precision="tf32") + (second + third)
    else:
        acc = mma_v2(a, high, acc, input_precision="tf32")
    return acc


@gluon.jit
def load_two(at, index, inside, BITS: gl.constexpr):
    """Load ``at[2 * index]`` and ``at[2 * index + 1]`` in one access; BITS per value, float32 or bfloat16."""
    if BITS == 32:
        pair = gl.load(at.to(gl.pointer_type(gl.int64)) + index, mask=inside, other=0)
    else:
        pair = gl.load(at.to(gl.pointer_type(gl.int32)) + index, mask=inside, other=0)
    return pair


@gluon.jit
def two_of(pair, BITS: gl.constexpr):
    """Unpack the values loaded by :func:`load_two`."""
    if BITS == 32:
        low, high = gl.inline_asm_elementwise(
            "mov.b64 {$0, $1}, $2;", "=f,=f,l", [pair], (gl.float32, gl.float32), is_pure=True, pack=1
        )
    else:
        low = (pair << 16).to(gl.float32, bitcast=True)
        high = (pair & -65536).to(gl.float32, bitcast=True)
    return low, high


@gluon.jit
def store_two(at, index, inside, low, high, BITS: gl.constexpr):
    """Write ``at[2 * index]`` and ``at[2 * index + 1]`` in one access."""
    if BITS == 32:
        pair = gl.inline_asm_elementwise("mov.b64 $0, {$1, $2};", "=l,f,f", [low, high], gl.int64, is_pure=True, pack=1)
        gl.store(at.to(gl.pointer_type(gl.int64)) + index, pair, mask=inside)
    else:
        pair = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
        )
        gl.store(at.to(gl.pointer_type(gl.int32)) + index, pair, mask=inside)


@gluon.jit
def store_kept(gates, at, inside, g0, g1, g2, g3, EXACT: gl.constexpr):
    """Store the gates of a unit together, for the backward pass: as float16, or as float32."""
    if EXACT:
        store_two(gates, 2 * at, inside, g0, g1, 32)
        store_two(gates, 2 * at + 1, inside, g2, g3, 32)
    else:
        store_gates(gates, at, inside, g0, g1, g2, g3)


@gluon.jit
def load_kept(gates, at, inside, EXACT: gl.constexpr):
    """Load gates stored by :func:`store_kept`, packed in two words (float16: in one, returned twice)."""
    words = gates.to(gl.pointer_type(gl.int64))
    if EXACT:
        first = gl.load(words + 2 * at, mask=inside, other=0)
        second = gl.load(words + 2 * at + 1, mask=inside, other=0)
    else:
        first = gl.load(words + at, mask=inside, other=0)
        second = first
    return first, second


@gluon.jit
def kept_of(first, second, EXACT: gl.constexpr):
    """Unpack the gates loaded by :func:`load_kept`."""
    if EXACT:
        g0, g1 = two_of(first, 32)
        g2, g3 = two_of(second, 32)
    else:
        g0, g1, g2, g3 = four_of(first)
    return g0, g1, g2, g3


@gluon.jit
def store_gates(at, index, inside, a, b, c, d):
    """Store four values as float16 at ``at[4 * index]`` and after it, in one access."""
    asm: gl.constexpr = """{ .reg .b32 low, high;
        cvt.rn.f16x2.f32 low, $2, $1;
        cvt.rn.f16x2.f32 high, $4, $3;
        mov.b64 $0, {low, high}; }"""
    packed = gl.inline_asm_elementwise(asm, "=l,f,f,f,f", [a, b, c, d], gl.int64, is_pure=True, pack=1)
    gl.store(at.to(gl.pointer_type(gl.int64)) + index, packed, mask=inside)


@gluon.jit
def four_of(packed):
    """Unpack four float16 values."""
    asm: gl.constexpr = """{ .reg .b16 a, b, c, d;
        mov.b64 {a, b, c, d}, $4;
        cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"""
    return gl.inline_asm_elementwise(
        asm, "=f,=f,=f,=f,l", [packed], (gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1
    )


# Renamed between Triton 3.6 and 3.9.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def arrive(flag):
    """Signal to the group that the values written by this program may be read."""
    barrier()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def wait(flag, arrivals):
    """Wait until ``flag`` counts ``arrivals``; what those programs wrote before arriving is then visible."""
    asm: gl.constexpr = """{ .reg .pred early;
        again: ld.acquire.gpu.global.s32 $0, [$1];
        setp.lt.s32 early, $0, $2;
        @early bra again; }"""
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [flag, arrivals], gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish(buffer, slot, unit, STRIDE: gl.constexpr, values):
    """Publish a program's columns of ``[slots, STRIDE]`` to its group."""
    gl.store(buffer + slot * STRIDE + unit, values)


@gluon.jit
def collect(source, page, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIDE: gl.constexpr, WARPS: gl.constexpr):
    """Start to copy ``[ROWS, COLUMNS]`` of a matrix with STRIDE columns to shared memory, bypassing the L1 cache."""
    VECTOR: gl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
    ACROSS: gl.constexpr = min(32, COLUMNS // VECTOR)
    WIDE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WIDE))[None, :]
    copy_async(page, source + row * STRIDE + column, cache_modifier=".cg")


@gluon.jit
def collected():
    """Wait for the copies of :func:`collect`."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()


@gluon.jit
def fetch(input_gates, token, unit, inside, WIDTH: gl.constexpr, LSTM: gl.constexpr, BITS: gl.constexpr):
    """Load the input gates of one step, as packed words: LSTM (i, f), (g, o); GRU (r, z), n."""
    if LSTM:
        at = token * (2 * WIDTH) + 2 * unit
        first = load_two(input_gates, at, inside, BITS)
        second = load_two(input_gates, at + 1, inside, BITS)
    else:
        row = input_gates + token * (3 * WIDTH)
        first = load_two(row + WIDTH, unit, inside, BITS)
        second = gl.load(row + unit, mask=inside, other=0.0)
    return first, second


@gluon.jit
def lstm_step(a0, a1, a2, a3, c, EXACT: gl.constexpr):
    """Return i, f, g, o, the new c and the new h, given the pre-activations of the gates and c."""
    g0 = sigmoid(a0, EXACT)
    g1 = sigmoid(a1, EXACT)
    g2 = tanh(a2, EXACT)
    g3 = sigmoid(a3, EXACT)
    c = g1 * c + g0 * g2
    return g0, g1, g2, g3, c, g3 * tanh(c, EXACT)


@gluon.jit
def gru_step(a0, a1, x, hidden, h, EXACT: gl.constexpr):
    """Return r, z, n, the hidden product of n as it is kept, and the new h."""
    g0 = sigmoid(a0, EXACT)
    g1 = sigmoid(a1, EXACT)
    g2 = tanh(x + g0 * hidden, EXACT)
    if EXACT:
        g3 = hidden
    else:
        g3 = gl.minimum(gl.maximum(hidden, -65504.0), 65504.0)  # the only kept value without a bound
    return g0, g1, g2, g3, g2 + g1 * (h - g2)


@gluon.jit
def lstm_back(g0, g1, g2, g3, c, before, dh, dc, EXACT: gl.constexpr):
    """Return the gradients of i, f, g, o before activation, and of the previous c, given those of h and c."""
    tanh_c = tanh(c, EXACT)
    dc += dh * g3 * (1.0 - tanh_c * tanh_c)
    d0 = dc * g2 * g0 * (1.0 - g0)
    d1 = dc * before * g1 * (1.0 - g1)
    d2 = dc * g0 * (1.0 - g2 * g2)
    d3 = dh * tanh_c * g3 * (1.0 - g3)
    return d0, d1, d2, d3, dc * g1


@gluon.jit
def gru_back(g0, g1, g2, g3, before, dh):
    """Return the gradients of r, z, n's hidden and input part, and the part of h's that bypasses the products."""
    dn = dh * (1.0 - g1) * (1.0 - g2 * g2)
    d0 = dn * g3 * g0 * (1.0 - g0)
    d1 = dh * (before - g2) * g1 * (1.0 - g1)
    return d0, d1, dn * g0, dn, dh * g1


@gluon.jit
def store_gradients(
    grad_gates, token, unit, inside, d0, d1, d2, d3, WIDTH: gl.constexpr, LSTM: gl.constexpr, BITS: gl.constexpr
):
    """Store the gradients of one step's gates: LSTM i, f, g, o; GRU r, z, hidden part of n, input part of n."""
    if LSTM:
        store_two(grad_gates, token * (2 * WIDTH) + 2 * unit, inside, d0, d1, BITS)
        store_two(grad_gates, token * (2 * WIDTH) + 2 * unit + 1, inside, d2, d3, BITS)
    else:
        row = grad_gates + token * (4 * WIDTH)
        store_two(row + WIDTH, unit, inside, d0, d1, BITS)
        gl.store(row + unit, d3.to(grad_gates.dtype.element_ty), mask=inside)
        gl.store(row + 3 * WIDTH + unit, d2.to(grad_gates.dtype.element_ty), mask=inside)
