"""Fixtures shared by all tests, including doctests."""

from __future__ import annotations

import functools
import gc
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.programs import Programs

from recurl.envs.workers import SERVER
from recurl.trainers.export.verification import verify


def pytest_configure() -> None:
    """Keep what the tests compile in this folder, not in the user's cache, and hide GPUs, which runs would choose.

    What needs a GPU is checked by ``benchmarks/check_*_gpu.py``.
    """
    os.environ.setdefault("RECURL_CACHE_DIR", str(Path(__file__).parent / "build" / "cache"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out adapters of libraries that aren't installed, and tests of JAX, whose threads don't survive forks."""
    if collection_path.parent.name == "adapters" and collection_path.stem not in ("__init__", "recurl"):
        return True
    wanted = config.option.markexpr
    if collection_path.suffix != ".py" or "jax" not in wanted:
        return None
    of_jax = "jax" in collection_path.name
    return of_jax if "not jax" in wanted else not of_jax and collection_path.name != "test_site.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker process waits for another at the end."""
    for item in items:
        if "jax" in item.nodeid:
            item.add_marker("jax")
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "learning")))}
    items.sort(key=lambda item: item.path not in slow)


_GROWTH = 300 * 2**20
_peak_at_collection = 0


def _peak_memory() -> int:
    """Return the largest memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Hide what exists from the garbage collector, which otherwise visits all modules and tests: a second per visit.

    When the memory of the process has grown, everything is collected.
    """
    global _peak_at_collection
    peak = _peak_memory()
    if peak > _peak_at_collection + _GROWTH:
        gc.unfreeze()
        gc.collect()
        _peak_at_collection = peak
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let pytest find warnings of objects in reference cycles at its end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed():
    """Seed every test, so that results don't depend on other tests; use OMP_NUM_THREADS threads, one by default."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture
def plots() -> None:
    """Draw the learning curves of a test in a module with ``no_curves``."""


@pytest.fixture
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no learning curve at the end of a run in this process, which takes longer than a small run.

    Replaces the drawing; tests with the fixture ``plots``, those of modules without this one and programs draw.
    """
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("recurl.trainers.run.trainer.plot_learning_curve", lambda *_, **__: None)


@pytest.fixture(scope="session")
def descriptors() -> Callable[[], int]:
    """Count the open files of this process."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count


@pytest.fixture(scope="session")
def shared_interpreter() -> Generator[None]:
    """Keep the server that workers are forked from until the end of all tests, as its imports take seconds.

    Replaces its end with the last group of workers; tests/envs/test_workers.py also has servers that end.
    """
    SERVER.acquire({"recurl.collectors.multi", "recurl.envs.parallel"})
    SERVER.ensure_running()  # before a test counts open files
    yield
    SERVER.release()


@pytest.fixture
def programs() -> Generator[Programs]:
    """Launcher of programs that start immediately; see tests/programs.py."""
    programs = Programs()
    yield programs
    programs.end()


@pytest.fixture(scope="session")
def _table_of_onnx() -> Callable:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return functools.cache(ONNXRegistry.from_torchlib)


@pytest.fixture
def brief_verification(monkeypatch: pytest.MonkeyPatch, _table_of_onnx: Callable) -> None:
    """Verify exported policies with 100 steps, and read PyTorch's table of ONNX functions once per process.

    Replaces 1000 steps, which take seconds, and a second per table. The fixture ``files`` of
    tests/trainers/export/test_policy_file.py does neither.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_table_of_onnx))  # also called on instances
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
