"""Operators of linear recurrences: opcheck, torch.compile, torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.library import opcheck

from recurl.core.errors import UnsupportedError
from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries, linear_recurrence, record_backends
from recurl.recurrence.built_in import OPERATIONS
from recurl.recurrence.linear.kernels import LinearInputs
from recurl.recurrence.linear.operator import layer_call
from recurl.recurrence.operation import arguments_of

from .problems import DTYPES, KERNELS, exact, problem, worst_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
]


def arguments(a, b, states, starts):
    """The leading arguments of the operators; their gradients are those of b, a and the states, or b, states and a."""
    return arguments_of(layer_call(LinearInputs(a, b, states, Boundaries(starts, (b.shape[0],)))))


def forward(backend, *inputs):
    """h, from the operator."""
    return OPERATIONS[f"linear_{backend}"].forward(*arguments(*inputs), False)[0]


def backward(backend, h, grad, *inputs):
    """The gradients, from the operator."""
    return OPERATIONS[f"linear_{backend}"].backward(*arguments(*inputs), [h], [], [grad], [True] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", KERNELS)
def test_opcheck(backend, dtype, constant):
    case, operation = problem(dtype=dtype, constant=constant), OPERATIONS[f"linear_{backend}"]
    tensors = [one.detach().requires_grad_() for one in case.tensors]
    opcheck(operation.forward, (*arguments(*tensors, case.boundaries.starts), False))
    h, inputs = (
        forward(backend, *case.tensors, case.boundaries.starts),
        arguments(*case.tensors, case.boundaries.starts),
    )
    for needs in ([True] * 3, [False, True, False]):
        opcheck(operation.backward, (*inputs, [h], [], [case.grad], needs))


@pytest.mark.parametrize("backend", KERNELS)
def test_the_operator_is_differentiable_twice(backend):
    for constant in (False, True):
        case = problem((5,), (2,), constant=constant)
        tensors = [one.detach().requires_grad_() for one in case.tensors]

        def run(*tensors, starts=case.boundaries.starts):
            return forward(backend, *tensors, starts)

        assert torch.autograd.gradcheck(run, tensors)
        assert torch.autograd.gradgradcheck(run, tensors)


# "auto" is the scan while compiling, so the two names share the dtypes and forms. The operators of the other kernels
# are opaque to the compiler, so two cases have each dtype and each form.
REAL, COMPLEX = DTYPES
TRACED = [
    *(("auto", REAL, False), ("scan", COMPLEX, True), ("loop", COMPLEX, True), ("cpu", REAL, True)),
    *(pytest.param("scan", *case, marks=pytest.mark.full) for case in ((REAL, True), (COMPLEX, False))),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("loop", REAL, False), ("cpu", COMPLEX, False))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype", "constant"), TRACED)
def test_compiled(backend, dtype, constant):
    """One graph for several lengths, with only the requested gradients; "auto" is fully compiled."""

    def run(a, b, states, is_init):
        return linear_recurrence(a, b.exp(), states, Boundaries.from_is_init(is_init), backend)

    torch._dynamo.reset()
    compiler = "inductor" if backend == "auto" else "aot_eager"
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=compiler)
    for shape in ((3, 7), (2, 12)):
        case = problem(shape, dtype=dtype, constant=constant)
        is_init = case.boundaries.starts.view(shape)
        results = []
        for function in (run, compiled):
            tensors = [one.detach().requires_grad_() for one in case.tensors]
            with record_backends() as ran:
                h = function(*tensors, is_init)
            # The scan is traced through, so only torch's own code runs.
            assert ran == ([] if function is compiled and backend in ("scan", "auto") else [ran[0]])
            results.append((h, *torch.autograd.grad(h, tensors, case.grad)))
        assert worst_error(results[1], results[0]) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_compiled_without_gradients_and_forwards(backend):
    case = problem()

    def run(a, b, states):
        return linear_recurrence(a, b, states, case.boundaries, backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(compiled(*case.tensors), run(*case.tensors)) <= 1e-14
    torch._dynamo.reset()
    along = torch.compile(lambda *tensors: jvp(run, tensors, tensors), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"'{backend}' has no forward-mode derivatives"):
        along(*case.tensors)


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, 1, 1, None), (None, 0, 0, None), (0, None, None, 0)])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_vmap_equals_a_loop(backend, constant, in_dims):
    """Values and gradients for mapped and shared inputs, with mapped dimensions at different positions."""
    cases = [problem((9,), (2,), constant=constant, seed=seed) for seed in range(3)]
    parts = [(*case.tensors, case.boundaries.starts) for case in cases]
    stacked = [
        one[0] if dim is None else torch.stack(one, dim)
        for one, dim in zip(zip(*parts, strict=True), in_dims, strict=True)
    ]

    def run(a, b, states, starts):
        return linear_recurrence(a, b, states, Boundaries(starts, (9,)), backend)

    def loss(a, b, states, starts):
        return (run(a, b, states, starts) * cases[0].grad).square().sum()

    def one(index):
        return [x if dim is None else x.select(dim, index) for x, dim in zip(stacked, in_dims, strict=True)]

    assert relative_error(vmap(run, in_dims)(*stacked), torch.stack([run(*one(k)) for k in range(3)])) <= 1e-12
    mapped = vmap(grad(loss, (0, 1, 2)), in_dims)(*stacked)
    looped = [grad(loss, (0, 1, 2))(*one(k)) for k in range(3)]
    assert worst_error(mapped, tuple(torch.stack(each) for each in zip(*looped, strict=True))) <= 1e-12
    shared = [x.detach().requires_grad_() for x in stacked[:3]]
    total = vmap(loss, in_dims)(*shared, stacked[3]).sum()
    found = torch.autograd.grad(total, shared)
    expected = [
        sum(each) if dim is None else torch.stack(each, dim)
        for each, dim in zip(zip(*looped, strict=True), in_dims, strict=False)
    ]
    assert worst_error(found, expected) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, 0, 1, None)])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_vmap_of_the_operators(backend, constant, in_dims):
    cases = [problem((9,), (2,), constant=constant, seed=seed) for seed in range(3)]
    starts = [cases[0].boundaries.starts if in_dims[3] is None else case.boundaries.starts for case in cases]
    inputs = [(*case.tensors, start) for case, start in zip(cases, starts, strict=True)]
    h = [forward(backend, *each) for each in inputs]
    columns = [(one, case.grad, *each) for one, case, each in zip(h, cases, inputs, strict=True)]
    dims = (0, 0, *in_dims)
    stacked = [
        one[0] if dim is None else torch.stack(one, dim)
        for one, dim in zip(zip(*columns, strict=True), dims, strict=True)
    ]
    found = vmap(lambda *tensors: tuple(backward(backend, *tensors)), dims)(*stacked)
    expected = [backward(backend, *column) for column in columns]
    assert worst_error(found, tuple(torch.stack(each) for each in zip(*expected, strict=True))) <= 1e-12
    mapped = vmap(lambda *tensors: forward(backend, *tensors), in_dims)(*stacked[2:])
    assert relative_error(mapped, torch.stack(h)) <= 1e-12


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_forward_mode(backend, constant):
    case = problem((4, 5), (2,), constant=constant)
    tangents = tuple(torch.randn_like(one) for one in case.tensors)
    _, along = jvp(lambda *t: linear_recurrence(*t, case.boundaries, backend), case.tensors, tangents)
    gradients = exact(case)[1:]
    expected = sum((one * other).sum() for one, other in zip(gradients, tangents, strict=True))
    assert abs((along * case.grad).sum() - expected) <= 1e-10


@pytest.mark.parametrize("backend", KERNELS)
def test_the_operator_refuses_tangents(backend):
    case = problem()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(case.b, case.b)
        with pytest.raises(UnsupportedError, match="no forward-mode derivatives"):
            forward(backend, case.a, dual, case.states, case.boundaries.starts)


def test_programs_exported_by_earlier_versions_run():
    case = problem()
    for backend in KERNELS:
        h = torch.ops.recurl.linear_recurrence(*case.tensors, case.boundaries.starts, 7, backend)
        assert torch.equal(h, linear_recurrence(*case.tensors, case.boundaries, backend))
