"""Gated matrix recurrences: every backend against a token-by-token oracle, resets, and numbers that aren't finite."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.execution.traced import InductorFunction
from recurl.recurrence import Boundaries, gated_matrix_recurrence, record_backends
from recurl.recurrence.matrix import MATRIX, chunked

BACKENDS = ["reference", "loop", "chunked", "cpu"]
DELTA = pytest.mark.parametrize("delta", [False, True])
HEADS, KEYS, VALUES = 2, 3, 4


class Case:
    """Random inputs of a batch; ``stored`` is where states aren't zero: "rows", "all", or None for no states."""

    def __init__(self, shape: tuple[int, ...], starts: float = 0.2, stored: str | None = "all", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.rand(shape, generator=generator) < starts
        self.boundaries = Boundaries.from_is_init(first, batch_shape=shape)
        tokens = self.boundaries.num_tokens

        def draw(*sizes: int) -> Tensor:
            return torch.randn(tokens, HEADS, *sizes, generator=generator, dtype=torch.float64)

        query, value = draw(KEYS), draw(VALUES)
        key = torch.nn.functional.normalize(draw(KEYS), dim=-1)
        self.inputs = [query, key, value, -draw().abs(), draw().sigmoid()]
        self.states = None if stored is None else draw(KEYS, VALUES)
        if self.states is not None and stored == "rows":
            self.states[torch.arange(tokens) % shape[-1] > 0] = 0

    def sparse(self, spacing: int) -> tuple[Case, Case]:
        """Return this case with zeros for states but those of every S-th token, and with these states alone."""
        assert self.states is not None
        dense, sparse = copy.copy(self), copy.copy(self)
        stored = torch.arange(len(self.states)) % spacing == 0
        dense.states = torch.where(stored[:, None, None, None], self.states, 0)
        sparse.states = self.states[::spacing].clone()
        return dense, sparse

    def given(self) -> list[Tensor]:
        return [*self.inputs, *([] if self.states is None else [self.states])]

    def run(self, backend: str, delta: bool) -> tuple[Tensor, Tensor]:
        result, after = gated_matrix_recurrence(*self.inputs, self.states, self.boundaries, backend, delta=delta)
        assert after is not None
        return result, after

    def with_gradients(self, backend: str, delta: bool, sick: int | None = None) -> list[Tensor]:
        """Results, states after and the gradients of all inputs; the gradient of one token's result may be NaN."""
        for one in self.given():
            one.requires_grad_()
        outputs = self.run(backend, delta)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in outputs]
        if sick is not None:
            grads[0][sick, 0] = torch.nan
        return [*(one.detach() for one in outputs), *torch.autograd.grad(list(outputs), self.given(), grads)]


def oracle(case: Case, delta: bool) -> tuple[np.ndarray, np.ndarray]:
    query, key, value, log_decay, rate = (one.numpy() for one in case.inputs)
    starts, ends = case.boundaries.starts.tolist(), case.boundaries.ends.tolist()
    results, after = np.zeros_like(value), np.zeros((len(starts), HEADS, KEYS, VALUES))
    for head in range(HEADS):
        memory = np.zeros((VALUES, KEYS))  # values by keys, as in the papers
        for n, (starting, ending) in enumerate(zip(starts, ends, strict=True)):
            if starting:
                memory = np.zeros((VALUES, KEYS)) if case.states is None else case.states[n, head].numpy().T
            k, b = key[n, head], rate[n, head]
            kept = np.eye(KEYS) - b * np.outer(k, k) if delta else np.eye(KEYS)
            memory = np.exp(log_decay[n, head]) * memory @ kept + b * np.outer(value[n, head], k)
            results[n, head] = memory @ query[n, head]
            if ending:
                after[n, head] = memory.T
    return results, after


@DELTA
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 70), (41,), (2, 2, 33), (5, 1), (1, 64)], ids=str)
def test_results_are_the_formula_s(shape: tuple[int, ...], backend: str, delta: bool) -> None:
    case = Case(shape)
    for found, wanted in zip(case.run(backend, delta), oracle(case, delta), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)


@DELTA
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 80),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([None, "rows", "all"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_gradients_are_the_reference_s(
    delta: bool, rows: int, steps: int, starts: float, stored: str | None, readable: bool, seed: int
) -> None:
    """Also where the lengths of segments can't be read, as in a CUDA graph."""
    case = Case((rows, steps), starts, stored, seed)
    wanted = case.with_gradients("reference", delta)
    with pytest.MonkeyPatch.context() as patch:
        if not readable:
            patch.setattr(chunked, "readable", lambda value: False)
        found = case.with_gradients("chunked", delta)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(case.with_gradients("loop", delta), wanted, rtol=1e-9, atol=1e-10)


@DELTA
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("spacing", [1, 3, 16, 32, 48, 96])
def test_states_of_every_s_th_token(spacing: int, readable: bool, backend: str, delta: bool) -> None:
    """A segment that starts elsewhere starts from zeros; with states after segments, and without."""
    dense, sparse = Case((2, 96), seed=spacing).sparse(spacing)
    with pytest.MonkeyPatch.context() as patch:
        if not readable:
            patch.setattr(chunked, "readable", lambda value: False)
        *wanted, of_dense = dense.with_gradients("reference", delta)
        *found, of_sparse = sparse.with_gradients(backend, delta)
        alone = gated_matrix_recurrence(*sparse.given(), sparse.boundaries, backend, delta=delta, after=False)[0]
        (of_alone,) = torch.autograd.grad(alone.sum(), sparse.states)
        given = [one.detach() for one in sparse.given()]

        def loss(states: Tensor) -> Tensor:
            return gated_matrix_recurrence(*given[:5], states, sparse.boundaries, backend, delta=delta, after=False)[
                0
            ].sum()

        transformed = torch.func.grad(loss)(given[5])
    torch.testing.assert_close([*found, of_sparse], [*wanted, of_dense[::spacing]], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(alone, found[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(of_alone, transformed, rtol=1e-9, atol=1e-10)


@DELTA
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("where", [0, 1, 2, 3, 4, 5], ids=["query", "key", "value", "log_decay", "rate", "states"])
def test_what_is_not_finite_stays_in_its_segment(where: int, backend: str, delta: bool) -> None:
    """A query reaches its own result only, others all later results of their segment and head."""
    case, token = Case((2, 40), 0.1), 47
    clean = case.run(backend, delta)
    start = int(case.boundaries.start_index[token])
    last = int(case.boundaries.ends[token:].nonzero()[0]) + token
    assert start < token < last
    case.given()[where][start if where == 5 else token, 0] = torch.nan
    found = case.run(backend, delta)
    reached = (found[0].isnan().any(-1)).nonzero().tolist()
    first, past = (token, token + 1) if where == 0 else (start if where == 5 else token, last + 1)
    assert reached == [[n, 0] for n in range(first, past)]
    assert found[1].isnan().flatten(2).any(-1).nonzero().tolist() == ([] if where == 0 else [[last, 0]])
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one.nan_to_num(), other.masked_fill(one.isnan(), 0))


@DELTA
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_gradients_that_are_not_finite_reach_earlier_tokens_of_their_segment(backend: str, delta: bool) -> None:
    case, token = Case((2, 40), 0.1, stored=None), 47
    clean, found = case.with_gradients(backend, delta), case.with_gradients(backend, delta, sick=token)
    start = int(case.boundaries.start_index[token])
    for one, other in zip(found[2:], clean[2:], strict=True):
        broken = ~one.reshape(*one.shape[:2], -1).isfinite().all(-1)
        assert set(map(tuple, broken.nonzero().tolist())) <= {(n, 0) for n in range(start, token + 1)}
        assert torch.equal(one[~broken], other[~broken])
    assert not found[3][start, 0].isfinite().all()


@DELTA
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("spacing", [1, 20])
@pytest.mark.parametrize("alone", [True, False])
def test_gradients_that_are_not_finite_reach_the_state_of_their_segment(
    alone: bool, spacing: int, backend: str, delta: bool
) -> None:
    """Whether or not streams need gradients, also by transforms; no other state is reached."""
    _, case = Case((2, 40), 0.1, stored="all").sparse(spacing)
    sick = torch.ones_like(case.inputs[2])
    sick[25, 0] = torch.nan
    streams = [one.requires_grad_(not alone) for one in case.inputs]

    def loss(states: Tensor) -> Tensor:
        result, _ = gated_matrix_recurrence(*streams, states, case.boundaries, backend, delta=delta, after=False)
        return (result * sick).sum()

    assert case.states is not None
    (eager,) = torch.autograd.grad(loss(case.states.requires_grad_()), case.states)
    start = int(case.boundaries.start_index[25])
    read = [[start // spacing, 0]] if start % spacing == 0 else []
    for found in (eager, torch.func.grad(loss)(case.states.detach())):
        assert (~found.isfinite()).flatten(2).any(-1).nonzero().tolist() == read


@DELTA
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("where", [(2, 4), (1,), (3,)], ids=["value and rate", "key", "log_decay"])
def test_what_overflows_stays_in_its_segment(where: tuple[int, ...], backend: str, delta: bool) -> None:
    """Numbers are finite, but not their products: with those of the token itself, or with queries of other segments."""
    case, token = Case((2, 40), 0.2, None), 54
    start = case.boundaries.start_index
    other = start != start[token]
    assert all(part.any() for part in (other[40:token], other[token:72]))  # of the chunk
    case.inputs[0][other] *= 1e170
    clean = case.with_gradients(backend, delta)
    for number in where:
        case.inputs[number] = case.inputs[number].detach().clone()
        case.inputs[number][token, 0] = 1e170
    found = case.with_gradients(backend, delta)
    before = (torch.arange(80) < token) & ~other
    assert torch.equal(found[0][before], clean[0][before])
    for one, expected in zip(found, clean, strict=True):
        assert torch.equal(one[other], expected[other])


@DELTA
def test_stored_states_inside_segments_are_never_read(delta: bool) -> None:
    case = Case((3, 40))
    assert case.states is not None
    clean = [case.run(backend, delta) for backend in BACKENDS]
    case.states[~case.boundaries.starts] = torch.nan
    for backend, wanted in zip(BACKENDS, clean, strict=True):
        torch.testing.assert_close(case.run(backend, delta), wanted, rtol=0, atol=0)


@DELTA
def test_decays_of_zero_and_sudden_forgetting(delta: bool) -> None:
    case = Case((1, 50), 0.0)
    case.inputs[3][10], case.inputs[3][30] = -torch.inf, -1e6
    for found, wanted in zip(case.run("chunked", delta), oracle(case, delta), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert all(one.isfinite().all() for one in case.with_gradients("chunked", delta))


@DELTA
@pytest.mark.parametrize("backend", ["loop", "chunked"])
def test_transforms_of_functions(backend: str, delta: bool) -> None:
    case = Case((2, 5), stored="all")
    tensors = [one.requires_grad_() for one in case.given()]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return gated_matrix_recurrence(*given, case.boundaries, backend, delta=delta)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)
    fixed = [one.detach() for one in tensors]
    _, tangent = torch.func.jvp(lambda query: run(query, *fixed[1:])[0], (fixed[0],), (fixed[0],))
    torch.testing.assert_close(tangent, run(*fixed)[0])
    if backend == "chunked":
        both = torch.stack([fixed[0], 2 * fixed[0]])
        mapped = torch.func.vmap(torch.func.grad(lambda query: run(query, *fixed[1:])[0].square().sum()))(both)
        torch.testing.assert_close(mapped[1], 2 * mapped[0])


@DELTA
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_tangents_of_states_that_are_zero(backend: str, delta: bool) -> None:
    case = Case((2, 9), 0.3, stored="all")
    assert case.states is not None
    zeros, direction = torch.zeros_like(case.states), case.states

    def run(states: Tensor) -> Tensor:
        return gated_matrix_recurrence(*case.inputs, states, case.boundaries, backend, delta=delta, after=False)[0]

    with torch.autograd.forward_ad.dual_level():
        dual = run(torch.autograd.forward_ad.make_dual(zeros, direction))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(tangent, run(direction) - run(zeros))  # linear in the states


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@DELTA
@pytest.mark.parametrize("spacing", [1, 20])
def test_it_compiles(spacing: int, delta: bool) -> None:
    _, case = Case((2, 40), stored="rows").sparse(spacing)
    starts, shape = case.boundaries.starts, case.boundaries.batch_shape

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return gated_matrix_recurrence(*given, Boundaries(starts, shape), "auto", delta=delta)  # type: ignore[return-value]

    tensors = [one.requires_grad_() for one in case.given()]
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
    wanted = run(*tensors)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(sum(one.sum() for one in outputs), tensors) for outputs in (found, wanted)]
    torch.testing.assert_close(*grads)


@DELTA
def test_inductor_compiles_a_row_of_one_chunk(delta: bool) -> None:
    case = Case((1, 16), stored=None)
    boundaries = case.boundaries

    def run(*given: Tensor) -> tuple[Tensor]:
        output, _ = gated_matrix_recurrence(*given, None, boundaries, "chunked", delta=delta, after=False)
        return (output.reshape(16, HEADS * VALUES),)

    torch.testing.assert_close(InductorFunction(run, case.inputs)(*case.inputs), run(*case.inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_states_in_float32(dtype: torch.dtype) -> None:
    case = Case((2, 100))
    narrow = [
        *(one.to(dtype) for one in case.inputs[:3]),
        *(one.float() for one in case.inputs[3:]),
        case.states.float(),
    ]
    result, after = gated_matrix_recurrence(*narrow, case.boundaries, "chunked", delta=True)
    assert after is not None
    assert (result.dtype, after.dtype) == (dtype, torch.float32)
    exact = gated_matrix_recurrence(*(one.double() for one in narrow), case.boundaries, "reference", delta=True)
    error = (result.double() - exact[0]).abs().max() / exact[0].abs().max()
    assert error < 2 * torch.finfo(dtype).eps


@DELTA
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_matrices_alone(backend: str, delta: bool) -> None:
    case = Case((2, 40))
    narrow = [one.float() for one in case.given()]
    expected = gated_matrix_recurrence(*narrow, case.boundaries, backend, delta=delta)
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_matrix_recurrence(*narrow, case.boundaries, backend, delta=delta)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_shapes_of_batches_and_empty_ones() -> None:
    case = Case((2, 3, 7))
    flat = case.run("chunked", delta=True)
    batched = [one.unflatten(0, (2, 3, 7)) for one in case.given()]
    result, after = gated_matrix_recurrence(*batched, case.boundaries, delta=True)
    assert after is not None
    torch.testing.assert_close((result.flatten(0, 2), after.flatten(0, 2)), flat)
    with record_backends() as ran:
        assert gated_matrix_recurrence(*batched, case.boundaries, after=False)[1] is None
    assert ran == ["chunked"]
    empty = gated_matrix_recurrence(*(one[:0] for one in case.inputs), None, Boundaries.from_is_init(torch.ones(0) > 0))
    assert [list(one.shape) for one in empty if one is not None] == [[0, HEADS, VALUES], [0, HEADS, KEYS, VALUES]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: lambda x: x.float()}, "must have the same dtype, one of bfloat16, float16, float32, float64; got"),
        ({3: lambda x: x.float()}, "For values of torch.float64, log_decay, rate and states must be torch.float64"),
        ({2: lambda x: x[1:]}, "with the N=12 tokens of the boundaries"),
        ({1: lambda x: x[:, :1]}, "query and key must be"),
        ({4: lambda x: x[:, :1]}, "log_decay and rate must have one number per token and head"),
        ({5: lambda x: x[..., :1]}, "states must be"),
        ({5: lambda x: x[:5]}, r"where S divides the T=12 tokens of a row; got \[5, 2, 3, 4\]"),
        ({5: lambda x: x[0, 0, 0, 0]}, r"got \[\]"),
        ({5: lambda x: torch.cat([x, x])}, r"got \[24, 2, 3, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    case = Case((12,))
    given = [change.get(number, lambda x: x)(one) for number, one in enumerate(case.given())]
    with pytest.raises(ArgumentError, match=message):
        gated_matrix_recurrence(*given, case.boundaries)


def test_time_major_tensors_are_refused() -> None:
    case = Case((2, 6))
    given = [one.unflatten(0, (2, 6)).transpose(0, 1) for one in case.given()]
    with pytest.raises(ArgumentError, match=r"of \[2, 6\] tokens, the value \[6, 2, .* the last dimension is time"):
        gated_matrix_recurrence(*given, case.boundaries)


def test_backends_are_named() -> None:
    assert set(BACKENDS) <= set(MATRIX.names)
    with pytest.raises(ArgumentError, match="The backend of a matrix recurrence must be one of auto, fastest, loop"):
        gated_matrix_recurrence(*Case((3,)).given(), Case((3,)).boundaries, "scan")
