# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201
# Kernel bodies are a language of their own: Triton's types are known to its compiler, not to pyright.
"""Pieces of the Gluon kernels that come down to single machine instructions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def tanh(x):
    """Hyperbolic tangent in one instruction, with a relative error of 2^-11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    """Logistic function by the instruction of :func:`tanh`."""
    return 0.5 * tanh(0.5 * x) + 0.5


@gluon.jit
def operand(x, BITS: gl.constexpr):
    """What enters a product: bfloat16 (BITS = 16), or float32 rounded to tf32."""
    if BITS == 16:
        y = x.to(gl.bfloat16)
    else:
        y = gl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)
    return y


@gluon.jit
def load_two(at, index, inside, BITS: gl.constexpr):
    """The values ``at[2 * index]`` and ``at[2 * index + 1]`` in one access; BITS per value, float32 or bfloat16."""
    if BITS == 32:
        pair = gl.load(at.to(gl.pointer_type(gl.int64)) + index, mask=inside, other=0)
    else:
        pair = gl.load(at.to(gl.pointer_type(gl.int32)) + index, mask=inside, other=0)
    return pair


@gluon.jit
def two_of(pair, BITS: gl.constexpr):
    """Unpack what :func:`load_two` read."""
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
def store_gates(at, index, inside, a, b, c, d):
    """Write four values as float16 to ``at[4 * index]`` and after, in one access."""
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
    kind: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    return gl.inline_asm_elementwise(asm, "=f,=f,=f,=f,l", [packed], kind, is_pure=True, pack=1)


barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed between Triton 3.6 and 3.9


@gluon.jit
def meet(flag, arrivals):
    """Wait until every program of a group has come here; see ``parts.meet``."""
    barrier()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")
    while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    barrier()


@gluon.jit
def publish(buffer, slots, units, WIDTH: gl.constexpr, values):
    """Write a program's columns of ``[ROWS, WIDTH]`` for the others of its group; values ``[UNITS, ROWS]``."""
    gl.store(buffer + slots[None, :] * WIDTH + units[:, None], values)


@gluon.jit
def collect(buffer, page, ROWS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Start to bring what the group published into shared memory, past the first-level cache."""
    VECTOR: gl.constexpr = 128 // buffer.dtype.element_ty.primitive_bitwidth
    WIDE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))[:, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))[None, :]
    async_copy.async_copy_global_to_shared(page, buffer + row * WIDTH + column, cache_modifier=".cg")


@gluon.jit
def collected():
    """Wait until what was collected is there."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
