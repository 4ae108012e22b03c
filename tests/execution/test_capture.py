"""Capture of CUDA graphs, on a fake of torch.cuda."""

import gc
import threading
from contextlib import contextmanager

import pytest
import torch

from recurl.core.errors import UsageError
from recurl.execution import capture
from recurl.execution.capture import GraphedFunction, on_side_stream, record
from tests.graphs import fake_graphs

GPU = torch.device("cuda", 0)


class FakeCuda:
    """Records calls, and the stream that is current."""

    def __init__(self):
        self.calls = []
        self.fails = False
        self.made = 0
        self.current = self.Stream("default")

        cuda = self

        class Graph:
            def register_generator_state(self, generator):
                cuda.calls.append(f"register generator of {generator.device}")

            def replay(self):
                cuda.calls.append(f"replay on {cuda.current.name}")

        self.Graph = Graph

    def Stream(self, name):
        cuda = self

        class Stream:
            def __init__(self):
                self.name = name

            def wait_stream(self, other):
                cuda.calls.append(f"{name} waits for {other.name}")

        return Stream()

    def new_stream(self, device):
        self.made += 1
        return self.Stream(f"side {self.made} of {device}")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, stream, capture_error_mode):
        before, self.current = self.current, stream
        self.calls.append(f"begin on {stream.name}, {capture_error_mode}")
        try:
            yield
        finally:
            if self.fails:  # torch doesn't restore the stream then
                raise RuntimeError("operation not permitted when stream is capturing")
            self.current = before


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(capture, "_streams", capture._Streams())
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.Graph)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.mark.slow
def test_record(cuda):
    def run():
        cuda.calls.append(f"run on {cuda.current.name}, collects garbage: {gc.isenabled()}")
        return 3

    replay, result = record(run, GPU, torch.default_generator)
    replay()
    assert result == 3
    assert gc.isenabled()
    assert cuda.calls == [
        "register generator of cpu",
        "begin on side 1 of cuda:0, thread_local",
        "run on side 1 of cuda:0, collects garbage: False",
        "replay on default",
    ]


@pytest.mark.slow
def test_a_failed_capture_restores_the_stream(cuda):
    cuda.fails = True
    with pytest.raises(RuntimeError, match="capturing"):
        record(lambda: None, GPU)
    assert cuda.current.name == "default"
    assert gc.isenabled()


def test_side_streams_wait_for_the_current_one_and_back(cuda):
    with on_side_stream(torch.device("cuda")):
        cuda.calls.append(f"run on {cuda.current.name}")
    with pytest.raises(ValueError, match="inside"), on_side_stream(GPU):
        raise ValueError("inside")
    side = "side 1 of cuda:0"
    waits = [f"{side} waits for default", f"default waits for {side}"]
    assert cuda.calls == [waits[0], f"run on {side}", waits[1], *waits]
    assert cuda.current.name == "default"


@pytest.mark.slow
def test_side_streams_are_those_of_a_thread(cuda):
    names = []

    def note():
        with on_side_stream(GPU):
            names.append(cuda.current.name)

    note()
    record(note, GPU)
    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    note()
    assert names == [f"side {number} of cuda:0" for number in (1, 1, 2, 1)]


@pytest.mark.slow
def test_torchs_own_capture_stays(cuda):
    before = torch.cuda.graph
    found = []
    record(lambda: found.append(torch.cuda.graph), GPU)
    assert found == [before] == [torch.cuda.graph]


def advance(left, right):
    """Swap two tensors in place, add one to the second, and return their sum before."""
    total = left + right
    new = left.clone() + 1
    left.copy_(right)
    right.copy_(new)
    return total


@pytest.fixture
def advancing(monkeypatch):
    """The function above, graphed, and the devices of its captures."""
    devices = fake_graphs(monkeypatch)
    return GraphedFunction(advance, torch.device("cpu"), name="function", instead="don't"), devices


def test_a_function_is_captured_at_its_third_call_and_continues_from_its_memory(advancing):
    graphed, devices = advancing
    values, captures = [torch.tensor([1.0]), torch.tensor([10.0])], []
    expected = [value.clone() for value in values]
    for _ in range(6):
        total = graphed(*values)
        assert total.tolist() == advance(*expected).tolist()
        assert [value.item() for value in graphed.memory] == [value.item() for value in expected]
        values = graphed.memory
        captures.append(len(devices))
    assert captures == [0, 0, 1, 1, 1, 1]


def test_the_given_tensors_stay_as_they_are_and_results_are_overwritten(advancing):
    graphed, _ = advancing
    given = [torch.tensor([1.0]), torch.tensor([10.0])]
    totals = [graphed(*given) for _ in range(4)]
    assert [value.item() for value in given] == [1.0, 10.0]
    later = graphed(torch.tensor([2.0]), torch.tensor([20.0]))
    assert totals[2] is totals[3] is later
    assert later.item() == 22.0


def test_memory_in_another_order_is_read_before_it_is_overwritten(advancing):
    graphed, _ = advancing
    for _ in range(3):
        graphed(torch.tensor([1.0]), torch.tensor([10.0]))
    left, right = graphed.memory
    assert (left.item(), right.item()) == (10.0, 2.0)
    graphed(right, left)
    assert (left.item(), right.item()) == (10.0, 3.0)


def test_strides_are_kept(advancing):
    graphed, _ = advancing
    columns = [torch.zeros(2, 3).t() for _ in range(2)]
    for _ in range(3):
        graphed(*columns)
    assert [value.stride() for value in graphed.memory] == [(1, 3), (1, 3)]


def test_a_discarded_graph_is_captured_again_at_once(advancing):
    graphed, devices = advancing
    for _ in range(4):
        graphed(torch.tensor([1.0]), torch.tensor([10.0]))
    assert graphed.captured
    graphed.discard()
    assert not graphed.captured
    assert graphed(torch.tensor([3.0]), torch.tensor([4.0])).item() == 7.0
    assert len(devices) == 2


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("operation not permitted when stream is capturing", UsageError, r"The f can't be captured.*as .*:\d+ does"),
        ("the shapes don't fit", RuntimeError, "the shapes don't fit"),
    ],
)
def test_a_function_that_cannot_be_captured_can_be_tried_again(monkeypatch, said, kind, words):
    def run(value):
        calls.append(value)
        if len(calls) in (3, 4):
            raise RuntimeError(said)
        return value + 1

    calls = []
    fake_graphs(monkeypatch)
    graphed = GraphedFunction(run, torch.device("cpu"), name="f", instead="don't")
    assert [graphed(torch.tensor(1)).item() for _ in range(2)] == [2, 2]
    for _ in range(2):
        with pytest.raises(kind, match=words):
            graphed(torch.tensor(1))
    assert graphed(torch.tensor(5)).item() == 6


def test_a_warm_up_that_fails_is_repeated(monkeypatch):
    def run(value):
        calls.append(value)
        if len(calls) == 1:
            raise ValueError("once")
        return value + 1

    calls, devices = [], fake_graphs(monkeypatch)
    graphed = GraphedFunction(run, torch.device("cpu"), name="f", instead="don't")
    with pytest.raises(ValueError, match="once"):
        graphed(torch.tensor(1))
    captures = []
    for _ in range(3):
        assert graphed(torch.tensor(1)).item() == 2
        captures.append(len(devices))
    assert captures == [0, 0, 1]
