"""Fixtures shared by all tests, including doctests."""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
from collections.abc import Callable, Collection, Generator
from types import SimpleNamespace

import pytest
import torch
from tests.programs import Programs

from recurl.envs.workers import Interpreter
from recurl.trainers.export.verification import verify


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker process waits for another at the end."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "learning")))}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _seed():
    """Seed every test, so that results don't depend on other tests; use OMP_NUM_THREADS threads, one by default."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def _shared_by_doctests(request: pytest.FixtureRequest) -> None:
    """Start one interpreter for the workers of all doctests."""
    if isinstance(request.node, pytest.DoctestItem) and request.node.path.stem in ("multi", "overlapped", "parallel"):
        request.getfixturevalue("shared_interpreter")


@pytest.fixture(scope="session")
def descriptors() -> Callable[[], int]:
    """Count the open files of this process."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count


class _Shared(Interpreter):
    """An interpreter that outlives the groups of workers that it serves."""

    def end(self) -> None:
        """Leave the interpreter to the next group."""


@pytest.fixture(scope="session")
def _interpreters() -> Generator[list[_Shared]]:
    started: list[_Shared] = []
    yield started
    for interpreter in started:
        Interpreter.end(interpreter)


@pytest.fixture
def shared_interpreter(monkeypatch: pytest.MonkeyPatch, _interpreters: list[_Shared]) -> None:
    """Fork the workers of all groups from one interpreter, as its imports take seconds.

    Replaces the start and the end of an interpreter per group. tests/envs/test_workers.py and the tests of workers
    without this fixture start one per group.
    """

    def running(modules: Collection[str] = ()) -> _Shared:
        if not _interpreters or _interpreters[-1].returncode is not None:
            _interpreters.append(_Shared({*modules, "recurl.collectors.multi", "recurl.envs.parallel"}))
        return _interpreters[-1]

    running()  # before a test counts open files
    monkeypatch.setattr("recurl.envs.workers.Interpreter", running)


@pytest.fixture
def programs() -> Generator[Programs]:
    """Launcher of programs that start immediately; see tests/programs.py."""
    programs = Programs()
    yield programs
    programs.end()


@pytest.fixture
def brief_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify exported policies with 100 steps.

    Replaces 1000 steps, which take seconds. The fixture ``files`` of tests/trainers/export/test_policy_file.py and
    tests/cli/test_main.py verify with 1000.
    """
    monkeypatch.setattr("recurl.trainers.export.policy_file.verify", functools.partial(verify, steps=100))


@pytest.fixture
def forked_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Gymnasium's processes immediately, as forks of the interpreter of tests/programs.py.

    Replaces the start method. tests/envs/test_gym.py spawns them.
    """
    monkeypatch.setattr("recurl.envs.gym_vector._CONTEXT", "forkserver")


@pytest.fixture
def jobs_are_forks(monkeypatch: pytest.MonkeyPatch, programs: Programs) -> None:
    """Start the runs of sweeps in this process immediately.

    Replaces the start of interpreters, which sweeps that are commands do in tests/cli/test_sweep.py.
    """
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
