"""Configuration of the kernels in cluster.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.recurrence.cuda.family import CudaFamily

__all__ = ["CLUSTERS", "Cluster"]

CLUSTERS = 2, 4, 8  # supported cluster sizes


@dataclass(frozen=True)
class Cluster(CudaFamily):
    """CUDA C++ kernels with a cluster of CTAs: a warp for eight hidden units.

    Attributes:
        members: CTAs of a cluster.
        groups: clusters that fit on the GPU at once.
        held: blocks of 16 x 16 weights that a warp has in registers. Above 30, other values are spilled.
    """

    members: int
    groups: int
    rows: int = 8
    held: int = 30
    programs: int = 1
    walks: int = 1
    source: ClassVar[str] = "cluster/cluster.cu"

    def members_for(self, width: int) -> int:
        """Return the number of CTAs of a cluster."""
        return self.members

    def groups_on(self, processors: int, width: int) -> int:
        """Return the number of clusters that run at once."""
        return self.groups

    def threads_for(self, width: int) -> int:
        """Return the threads of a CTA."""
        return 4 * width // self.members

    def shared_for(self, width: int, exact: bool) -> int:
        """Return the bytes of dynamic shared memory, for the weights that don't fit in registers."""
        blocks = width // 8 * (2 if exact else 1)
        return 16 * self.threads_for(width) * max(blocks - self.held, 0)

    def numbers(self) -> dict[str, int]:
        """Return the macros that depend on this configuration."""
        return {"MEMBERS": self.members, "HELD": self.held}

    def fits(self, width: int, exact: bool, shared: int) -> bool:
        """Return whether these weights and the exchange buffers of the backward pass fit in ``shared`` bytes."""
        exchanged = 64 * width + self.threads_for(width) * (32 if exact else 16) + 1024
        return self.shared_for(width, exact) + exchanged <= shared
