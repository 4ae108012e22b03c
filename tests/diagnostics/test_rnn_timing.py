import math
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from recurl.core.errors import ArgumentError, UsageError
from recurl.diagnostics import RNNCase, RNNTime, rnn_timing, take_turns, time_rnn
from recurl.diagnostics.rnn_timing import _Data, timed_backends
from recurl.recurrence import record_backends

SMALL = {"hidden_size": 8, "input_size": 5, "batch": 3, "time": 7}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 5e-2)])
def test_every_backend_is_measured_and_right(cell, dtype, limit):
    case = RNNCase(cell=cell, num_layers=2, mean_segment=3, dtype=dtype, **SMALL)
    with record_backends() as ran:
        results = time_rnn(case, ["loop", "pad", "reference"], repeats=3)
    assert {result.backend for result in results} == {"loop", "pad", "reference"} <= set(ran)
    assert all(len(result.times_ms) == 3 and result.error <= limit for result in results)
    medians = [result.median_ms for result in results]
    assert medians == sorted(medians)
    assert all(result.peak_mb is None and result.reason is None for result in results)
    assert results[0].tokens_per_s == pytest.approx(21 / medians[0] * 1e3)


def test_backends_that_cannot_run_come_last_with_a_reason():
    results = time_rnn(RNNCase(**SMALL), ["triton", "loop"], repeats=1)
    assert [result.backend for result in results] == ["loop", "triton"]
    assert ("NVIDIA GPU" if find_spec("triton") else "needs the package triton") in results[1].reason
    assert results[1].times_ms == ()
    assert math.isnan(results[1].error)
    (refused,) = time_rnn(RNNCase(precision="bf16", **SMALL), ["pad"], repeats=1)
    assert "computes in the dtype of the weights" in refused.reason


def test_all_backends_but_the_reference_by_default():
    results = time_rnn(RNNCase(**SMALL), repeats=1)
    assert {result.backend for result in results} == set(timed_backends())
    assert "reference" not in timed_backends()
    assert {"pad", "loop", "cpu", "triton"} <= set(timed_backends())


@pytest.mark.parametrize(("mean", "rate"), [(None, 0.0), (5, 0.2), (1, 1.0)])
def test_resets_have_the_requested_rate(mean, rate):
    flags = _Data(RNNCase(hidden_size=1, input_size=1, batch=100, time=100, mean_segment=mean)).is_init
    assert flags.float().mean().item() == pytest.approx(rate, abs=0.02)


def test_a_case_reads_like_a_sentence():
    assert str(RNNCase(mean_segment=5)) == "lstm 64>64, 32 x 128, a reset every 5"
    assert str(RNNCase(num_layers=2)) == "lstm 64>64, 2 layers, 32 x 128, no resets"


def test_calls_alternate_within_a_time_limit():
    order, clock = [], iter(range(100))
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    assert take_turns(calls, 2, 60, clock=lambda: float(next(clock))) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert order == ["a", "b", "a", "b"]
    assert take_turns(calls, 50, 0.0).keys() == {"a", "b"}
    assert len(order) == 6


def test_median():
    assert RNNTime(RNNCase(), "loop", (3.0, 1.0, 2.0)).median_ms == 2.0


@pytest.mark.parametrize("name", ["input_size", "hidden_size", "num_layers", "batch", "time", "mean_segment"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ArgumentError, match=f"--{name.replace('_', '-')} must be positive, got 0"):
        RNNCase(**{name: 0})


@pytest.mark.parametrize("name", ["dtype", "precision"])
def test_names_must_be_known(name):
    with pytest.raises(ArgumentError, match=rf"--{name} must be one of .*, got 'odd'"):
        RNNCase(**{name: "odd"})


def test_cells_must_be_known():
    with pytest.raises(ArgumentError, match=r"--cell: There is no cell 'ltsm'\. Did you mean lstm\?"):
        RNNCase(cell="ltsm")


def test_a_cell_of_ones_own_is_timed_where_it_runs():
    results = time_rnn(RNNCase(cell="tests.own_cells:FastWeights", **SMALL), ["loop", "pad", "scan"], repeats=1)
    assert {result.backend for result in results if result.error < 1e-5} == {"loop", "scan"}
    assert "it has kernels for lstm and gru only, not for the cell tests.own_cells:FastWeights" in results[-1].reason


def test_repeats_must_be_positive():
    with pytest.raises(ArgumentError, match="--repeats must be positive, got 0"):
        time_rnn(RNNCase(**SMALL), repeats=0)


def test_replays_of_a_graph_are_timed_after_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graphed:
        def __init__(self, step: Callable[[], object], device: torch.device, **_: str) -> None:
            self.step = step

        def __call__(self) -> None:
            calls.append("call")

    monkeypatch.setattr(rnn_timing, "GraphedFunction", Graphed)
    monkeypatch.setattr(rnn_timing, "numbered", lambda _: torch.device("cuda", 0))
    (result,) = time_rnn(RNNCase(hidden_size=4, batch=2, time=3), ["loop"], repeats=5, captured=True)
    assert len(result.times_ms) == 5
    assert len(calls) == 3 + 5  # two calls and a capture before


def test_graphs_are_timed_on_a_gpu_only() -> None:
    with pytest.raises(ArgumentError, match=r"captured=True times CUDA graphs, on a GPU; got device cpu"):
        time_rnn(RNNCase(**SMALL), ["loop"], captured=True)


def test_a_backend_that_cannot_be_captured_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graphed:
        def __init__(self, step: Callable[[], object], device: torch.device, **_: str) -> None:
            pass

        def __call__(self) -> None:
            raise UsageError("The step of the layer can't be captured as a CUDA graph.")

    monkeypatch.setattr(rnn_timing, "GraphedFunction", Graphed)
    monkeypatch.setattr(rnn_timing, "numbered", lambda _: torch.device("cuda", 0))
    (result,) = time_rnn(RNNCase(hidden_size=4, batch=2, time=3), ["loop"], captured=True)
    assert result.times_ms == ()
    assert result.reason == "The step of the layer can't be captured as a CUDA graph."
