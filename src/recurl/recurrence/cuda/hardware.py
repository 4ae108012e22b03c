"""Properties of a GPU that the choice of kernels depends on."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from recurl.recurrence.cuda.cluster.config import CLUSTERS
from recurl.recurrence.cuda.family import lazy_import
from recurl.recurrence.cuda.triton_compat import nvrtc_library

__all__ = ["ALL_REGISTERS", "Hardware", "hardware_of"]

_WITH_CLUSTERS = (9, 0)
ALL_REGISTERS = 255
"""Most registers of a thread. Left to choose, ptxas 12.8 gives kernels that need many more only 32, and spills."""


class Hardware(NamedTuple):
    """Properties of a GPU.

    Attributes:
        capability: compute capability.
        processors: number of multiprocessors.
        shared: bytes of shared memory that a CTA may have.
        nvrtc: whether kernels in CUDA C++ can be compiled.
        clusters: number of clusters of each size in ``CLUSTERS`` that fit on the GPU at once; zeros without clusters.
        name: name of the GPU.
    """

    capability: tuple[int, int]
    processors: int
    shared: int
    nvrtc: bool = False
    clusters: tuple[int, ...] = (0,) * len(CLUSTERS)
    name: str = ""


@torch.compiler.assume_constant_result
def hardware_of(device: torch.device) -> Hardware:
    """Return the properties of a GPU; torch.compile can't trace the calls of its driver."""
    return _query(device)


@cache
def _query(device: torch.device) -> Hardware:
    found = torch.cuda.get_device_properties(device)
    plain = Hardware(
        capability=(found.major, found.minor),
        processors=found.multi_processor_count,
        shared=found.shared_memory_per_block_optin,
        name=found.name,
    )
    launches = lazy_import("cuda_launch") if nvrtc_library() is not None else None
    if launches is None or not launches.can_compile_on(device):
        return plain
    able = plain._replace(nvrtc=True)
    if able.capability < _WITH_CLUSTERS:
        return able
    return able._replace(clusters=launches.clusters_on(device, CLUSTERS, able.shared))
