from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from recurl.envs.workers_process import Interpreter
from recurl.trainers.files.durable import write_whole
from recurl.trainers.report import plots


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests: those that are left at the end keep no process waiting for another."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "learning")))}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _seed():
    """Every test draws the same numbers, alone or in company."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _drawn_once() -> Generator:
    """Draw the learning curve of a module's first run alone, as drawing takes a third of a small run's time."""
    pictures, draw = dict[str, bytes](), plots.draw_returns

    def draw_once(path: Path, *arguments: Any, **options: Any) -> None:
        if path.suffix not in pictures:
            draw(path, *arguments, **options)
            pictures[path.suffix] = path.read_bytes()
        write_whole(path, pictures[path.suffix])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_returns", draw_once)
        yield


class _Lasting(Interpreter):
    """An interpreter that a group of workers leaves to the next one."""

    def end(self) -> None:
        """Go on, until :meth:`end_with_session`."""

    def end_with_session(self) -> None:
        super().end()


@pytest.fixture(scope="session")
def _lasting() -> Generator[dict[str, _Lasting]]:
    interpreters = dict[str, _Lasting]()
    yield interpreters
    for interpreter in interpreters.values():
        interpreter.end_with_session()


@pytest.fixture
def lasting_interpreter(_lasting: dict[str, _Lasting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups of workers that would start the same interpreter fork from one, as its imports take seconds.

    For tests of what workers do. Those of how they begin and end do without.
    """

    def interpreter(modules: Collection[str]) -> _Lasting:
        variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        outputs = [os.fstat(number).st_ino for number in (1, 2)]
        given = repr((sorted(modules), sys.path, os.getcwd(), variables, outputs))
        if given not in _lasting or _lasting[given].returncode is not None:
            _lasting[given] = _Lasting(modules)
        return _lasting[given]

    monkeypatch.setattr("recurl.envs.workers.Interpreter", interpreter)


@pytest.fixture(scope="module")
def ray_cluster() -> Generator:
    """A Ray cluster of two nodes of two CPUs, to which the program is connected; for the tests of a module."""
    import ray
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
