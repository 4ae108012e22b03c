"""Programs of the C++ library: independence of threads and tiles, and errors."""

from __future__ import annotations

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.native import program
from recurl.native.library import instruction_sets
from recurl.native.program import ProgramBuilder, Value
from recurl.recurrence import CELLS
from tests.recurrence.contract import Case

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")


def policy(case: Case) -> tuple[program.Program, list[torch.Tensor], list[int]]:
    """Linear, tanh, LSTM and a head, with the tensors that the program reads and writes."""
    builder, rows = ProgramBuilder(case.x.dtype), case.x.shape[0]
    tensors: list[torch.Tensor] = []

    def outside(tensor: torch.Tensor) -> Value:
        tensors.append(tensor)
        return builder.outside(tensor.shape[1:].numel())

    x = outside(torch.randn(rows, 6, dtype=case.x.dtype))
    before = [outside(state) for state in case.states]
    after = [outside(torch.full_like(state, torch.nan)) for state in case.states]
    out = outside(torch.full((rows, 3), torch.nan, dtype=case.x.dtype))
    hidden = case.weights[0][0].w_hh.shape[1]
    embedded, memory = builder.inside(case.x.shape[1]), builder.inside(hidden)
    builder.linear(x, torch.randn(case.x.shape[1], 6, dtype=case.x.dtype), None, embedded)
    builder.activate("tanh", embedded, embedded)
    builder.recur(CELLS[case.cell], case.weights, embedded, None, before, after, memory)
    builder.linear(memory, torch.randn(3, hidden, dtype=case.x.dtype), None, out)
    places = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.shape[1:].numel())]
    return builder.finish(), tensors, places


def test_threads_and_tiles_change_nothing() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        case = Case("lstm", shape=(300,), hidden=70)
        run, tensors, places = policy(case)
        results: list[list[torch.Tensor]] = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert run(places, 300)
            results.append([tensor.clone() for tensor in tensors])
        assert all(torch.equal(*pair) for later in results[1:] for pair in zip(results[0], later, strict=True))
        assert not torch.stack([tensor.isnan().any() for tensor in tensors]).any()


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 50])
@pytest.mark.parametrize(("cell", "options"), [("lstm", {"layers": 2}), ("gru", {}), ("lstm", {"projection": 4})])
def test_rows_may_lie_apart(cell: str, options: dict[str, int], rows: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        run, tensors, places = policy(Case(cell, shape=(rows,), hidden=10, **options))
        assert run(places, rows)
        expected = [tensor.clone() for tensor in tensors]
        memory = [tensor.new_full((rows, 3, *tensor.shape[1:]), torch.nan) for tensor in tensors]
        apart = [tensor[:, 1] for tensor in memory]
        for tensor, given in list(zip(apart, tensors, strict=True))[
            : len(tensors) // 2
        ]:  # the other places are written
            tensor.copy_(given)
        places = [number for tensor in apart for number in (tensor.data_ptr(), tensor.stride(0))]
        assert run(places, rows)
        assert all(torch.equal(*pair) for pair in zip(apart, expected, strict=True))
        assert all(tensor[:, [0, 2]].isnan().all() for tensor in memory)


def test_what_the_library_lacks_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"computes in float32 and float64, not in torch.bfloat16"):
        ProgramBuilder(torch.bfloat16)
    builder = ProgramBuilder(torch.float32)
    x, y = builder.inside(3), builder.inside(2)
    with pytest.raises(UnsupportedError, match=r"a weight is Tensor of torch.float64"):
        builder.linear(x, torch.ones(2, 3, dtype=torch.float64), None, y)
    for weight in (torch.ones(3, 2).t(), torch.ones(2, 4)):
        with pytest.raises(UnsupportedError, match="a weight has the shape"):
            builder.linear(x, weight, None, y)
    case = Case("gru", shape=(1,))
    with pytest.raises(UnsupportedError, match="has no step for this lstm"):
        builder.recur(CELLS["lstm"], case.weights, x, None, [], [], y)


def test_out_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "run_function", lambda: lambda *args: 1)
    builder = ProgramBuilder(torch.float32)
    with pytest.raises(MemoryError, match="could not allocate"):
        builder.finish()([], 1)
