from __future__ import annotations

import logging
from collections.abc import Generator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, which share fixtures, caches and imports, in one process of several."""
    for item in items:
        file = item.path.relative_to(item.config.rootpath).as_posix()
        if file.startswith("tests/") and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(file.removeprefix("tests/")))


@pytest.fixture(autouse=True)
def _seed():
    """Every test draws the same numbers, alone or in company."""
    torch.manual_seed(0)


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
