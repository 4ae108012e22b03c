"""Fixtures shared by all tests, including doctests."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.programs import Programs

from recurl.envs.workers import Interpreter
from recurl.trainers.export import policy_file
from recurl.trainers.export.verification import verify
from recurl.trainers.files.durable import write_atomic
from recurl.trainers.report import plots


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker process waits for another at the end."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "learning")))}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _seed():
    """Seed every test, so that results don't depend on other tests; use one thread, as other workers need the cores."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _drawn_once() -> Generator:
    """Plot the learning curve only for a module's first run, as plotting takes a third of a small run's time."""
    pictures, draw = dict[str, bytes](), plots.draw_returns

    def draw_once(path: Path, *arguments: Any, **options: Any) -> None:
        if path.suffix not in pictures:
            draw(path, *arguments, **options)
            pictures[path.suffix] = path.read_bytes()
        write_atomic(path, pictures[path.suffix])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_returns", draw_once)
        yield


_MOST_IDLE = 2


@pytest.fixture(autouse=True)
def _verified_briefly() -> Generator:
    """Verify exported policies with 100 steps, as a thousand take seconds; fixtures of modules take precedence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_file, "verify", functools.partial(verify, steps=100))
        yield


class _Turn:
    """A persistent interpreter, in exclusive use by one group of workers."""

    def __init__(self, interpreter: Interpreter, turns: set[_Turn]) -> None:
        self._interpreter, self._turns = interpreter, turns
        turns.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def end(self) -> None:
        """Release the interpreter to the next group."""
        self._turns.discard(self)


class _Lasting:
    """Persistent interpreters by their arguments, and the groups that are using them."""

    def __init__(self) -> None:
        self.interpreters = dict[str, Interpreter]()
        self.turns = set[_Turn]()

    def begin(self, modules: Collection[str]) -> _Turn:
        variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        outputs = [os.fstat(number).st_ino for number in (1, 2)]
        given = repr((sorted(modules), sys.path, variables, outputs))
        interpreter = self.interpreters.pop(given, None)
        if interpreter is None or interpreter.returncode is not None:
            interpreter = Interpreter(modules)
        self.interpreters[given] = interpreter  # the last of them
        taken = {turn.pid for turn in self.turns}
        for old in [key for key, each in self.interpreters.items() if each.pid not in taken][:-_MOST_IDLE]:
            self.interpreters.pop(old).end()
        return _Turn(interpreter, self.turns)


@pytest.fixture(scope="session")
def _lasting() -> Generator[_Lasting]:
    lasting = _Lasting()
    yield lasting
    for interpreter in lasting.interpreters.values():
        interpreter.end()


@pytest.fixture(autouse=True)
def _lasting_interpreters(request: pytest.FixtureRequest, _lasting: _Lasting) -> Generator:
    """Let groups of workers that would start the same interpreter fork from one, as its imports take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if "new_interpreters" not in request.fixturenames:
            patch.setattr("recurl.envs.workers.Interpreter", _lasting.begin)
        yield


@pytest.fixture
def new_interpreters() -> None:
    """Start an interpreter for each group of workers. For tests of the start and end of workers."""


@pytest.fixture(scope="session")
def descriptors(_lasting: _Lasting) -> Callable[[], int]:
    """Count the open files of this process. A persistent interpreter counts while a group is using it."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) - len(_lasting.interpreters) + len(_lasting.turns)

    return count


@pytest.fixture(scope="session")
def programs() -> Generator[Programs]:
    """Launcher of programs that start immediately; see tests/programs.py."""
    programs = Programs()
    yield programs
    programs.end()


@pytest.fixture
def forked_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Gymnasium's processes immediately, as forks of a persistent one. Spawning them is tested elsewhere."""
    multiprocessing.set_forkserver_preload(["recurl.envs"])
    monkeypatch.setattr("recurl.envs.gym_vector._CONTEXT", "forkserver")


@pytest.fixture
def jobs_are_forks(monkeypatch: pytest.MonkeyPatch, programs: Programs) -> None:
    """Start the runs of sweeps in this process immediately; sweeps run as commands start interpreters."""
    names = SimpleNamespace(Popen=programs.Popen, PIPE=subprocess.PIPE)
    monkeypatch.setattr("recurl.trainers.study.sweep.subprocess", names)


@pytest.fixture(scope="module")
def ray_cluster() -> Generator:
    """A Ray cluster of two nodes with two CPUs each, to which the program is connected; one per test module."""
    import ray
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
