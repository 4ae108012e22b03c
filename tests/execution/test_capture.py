"""Capture of CUDA graphs, on a fake of torch.cuda."""

import gc
import threading
from contextlib import contextmanager

import pytest
import torch

from recurl.execution import capture
from recurl.execution.capture import on_side_stream, record

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
