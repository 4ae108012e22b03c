"""Array API functions give the same results on NumPy arrays and on tensors."""

import numpy as np
import pytest
import torch

from recurl.core.torch_compat import compiling, traced_graph
from recurl.envs.tasks.namespaces import HOST, tensors_on

REAL = np.random.default_rng(0).normal(size=(3, 4))
WHOLE = np.random.default_rng(1).integers(0, 3, size=(3, 4))
CALLS = """
asarray([0.1, 0.2]) | asarray(0.5) | asarray([1, 2]) | asarray([True]) | asarray([0.1], dtype=xp.float32) | asarray(a)
arange(3) | arange(0.0, 1.0, 0.1) | linspace(0.0, 1.0, 5) | zeros(3) | zeros((2, 3), dtype=xp.int64) | full(3, 2)
full((2,), 1.5) | full((2,), True) | where(b, 1.0, 0.0) | where(b, i, 0.5) | where(b, 0.5, i) | where(b, 1, 0.5)
where(b, a, 0) | where(b, True, False) | where(b, i, 1) | where(b, i, a)
max(a, axis=0) | min(a, axis=0) | max(a) | max(a, axis=0, keepdims=True) | maximum(a, 0.0) | minimum(0.5, a)
maximum(i, 1) | maximum(i, 0.5) | clip(a, -0.5, 0.5) | clip(a, 0.0, None) | clip(i, 0, 1) | clip(a, -0.5, a + 1)
sum(a, axis=0) | sum(b, axis=0) | mean(a, axis=0) | mean(i) | prod(a, axis=0) | var(a, axis=0) | std(a, axis=0)
any(b, axis=0) | all(b, axis=0) | argmax(a, axis=0) | cumsum(a, axis=0) | cumulative_sum(a, axis=0)
sort(a, axis=0) | argsort(a, axis=0) | concat((a, a), axis=1) | stack([a, a], axis=1) | expand_dims(a, axis=0)
squeeze(a[None], axis=0) | permute_dims(a, (1, 0)) | matrix_transpose(a) | reshape(a, (4, 3))
broadcast_to(a, (2, 3, 4))
flip(a) | flip(a, axis=0) | roll(a, 1) | roll(a, 1, axis=0) | tile(a, (2, 1)) | repeat(a, 2, axis=0) | unstack(a)[1]
take(a, i[0], axis=0) | take(a, xp.asarray([0, 2]), axis=1) | take_along_axis(a, i, axis=0) | pick(a, i[0])
sin(a) | sqrt(i) | exp(1.5) | atan2(a, 1.0) | atan2(i, i) | hypot(a, 2.0) | pow(a, 2) | pow(i, 0.5) | abs(i) | sign(a)
floor(a) | round(a) | divide(i, 2) | divide(a, i + 1) | floor_divide(i, 2) | remainder(a, 0.3)
mod(i, 2) | multiply(2, a)
equal(i, 1) | not_equal(a, a) | less(0.0, a) | greater_equal(a, i) | logical_and(b, i > 0) | logical_not(b)
bitwise_and(i, 1) | bitwise_xor(i, i) | bitwise_invert(i) | bitwise_left_shift(i, 2) | vecdot(a, a) | matmul(a, a.T)
isfinite(a) | tril(a) | diff(a, axis=0) | astype(i, xp.bool) | astype(a, xp.int64) | zeros_like(i) | full_like(a, 2.0)
"""


@pytest.mark.parametrize(
    "call", [call.strip() for line in CALLS.split("\n") for call in line.split("|") if call.strip()]
)
def test_the_host_and_tensors_do_the_same(call):
    function = eval(f"lambda xp, a, i, b: xp.{call}")
    expected = np.asarray(function(HOST, REAL, WHOLE, WHOLE > 0))
    tensors = [torch.from_numpy(array.copy()) for array in (REAL, WHOLE, WHOLE > 0)]
    came = function(tensors_on("cpu"), *tensors).numpy()
    assert came.dtype == expected.dtype
    np.testing.assert_allclose(came, expected, rtol=1e-14)


def test_programs_sort_by_torchs_own_kernel():
    xp = tensors_on("cpu")
    keys = torch.rand(52, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def order(x):
        return xp.argsort(x, axis=0), xp.argsort(x.T)

    with compiling():
        program = traced_graph(order, [keys])
    assert [str(node.target) for node in program.graph.nodes].count("recurl.argsort.default") == 2
    for found, expected in zip(program(keys), order(keys), strict=True):
        assert torch.equal(found, expected)
        assert found.is_contiguous()
    torch.library.opcheck(torch.ops.recurl.argsort.default, (keys.T, 0))
