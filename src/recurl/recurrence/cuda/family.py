"""Families of kernels: what a family declares about one configuration of its kernels."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.precision import Precision

__all__ = ["CudaFamily", "Direction", "Family", "GluonFamily", "lazy_import"]

Direction: TypeAlias = Literal["forward", "backward"]
_FLAGS = {"forward": "KEEP", "backward": "TO_STORED"}


@cache
def lazy_import(name: str) -> Any:
    """Import a module of this package lazily, by name: static imports would load Triton for users without a GPU."""
    return importlib.import_module(f"recurl.recurrence.cuda.{name}")


class Family(ABC):
    """Configuration of the kernels of a family, for the forward or the backward pass of a layer.

    A *group* of programs processes several *slots* of the stream of tokens at once and holds all hidden units.

    Attributes:
        rows: slots of a group.
        programs: groups per multiprocessor.
        walks: groups that a program serves.
    """

    rows: int
    programs: int
    walks: int

    def members_for(self, width: int) -> int:
        """Return the number of programs of a group, for W = ``width``."""
        return 1

    def groups_on(self, processors: int, width: int) -> int:
        """Return the number of groups that run at once on a GPU with ``processors`` multiprocessors."""
        return processors // self.members_for(width)

    @abstractmethod
    def constants(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the compile-time arguments of a kernel, except the flag of its pass."""

    @abstractmethod
    def launch(
        self, direction: Direction, layout: GateLayout, precision: Precision, programs: int, flag: bool
    ) -> Callable[..., None]:
        """Return a kernel with its grid and constants.

        ``flag``: whether it also returns gates (forward) or the gradients of stored states (backward).
        """

    def weights(self, direction: Direction, w_hh: Tensor, layout: GateLayout, precision: Precision) -> Tensor:
        """Return the recurrent weights ``[G * H, H]`` as the kernel reads them."""
        return w_hh

    def mail(
        self, direction: Direction, layout: GateLayout, precision: Precision, groups: int, like: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the buffers through which the programs of a group exchange values, and their arrival counters."""
        return ()


class GluonFamily(Family):
    """Family with kernels in Gluon, in modules ``forward`` and ``backward`` of its folder.

    Attributes:
        folder: the folder.
    """

    folder: ClassVar[str]

    def kernel(self, direction: Direction) -> Any:
        """Return the kernel of a pass."""
        return getattr(lazy_import(f"{self.folder}.{direction}"), f"{self.folder}_{direction}_kernel")

    def operands(self, direction: Direction, layout: GateLayout, precision: Precision) -> torch.dtype:
        """Return the dtype of the operands of the recurrent product."""
        return precision.operands

    @abstractmethod
    def numbers(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the compile-time arguments that only this family has, and WARPS, the warps per program."""

    def constants(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the compile-time arguments of a kernel, and the launch options."""
        found = {"HIDDEN": layout.hidden, "WIDTH": layout.width, "LSTM": layout.lstm, "EXACT": precision.exact}
        found |= self.numbers(direction, layout, precision)
        # Programs of a group wait for each other: all of them must be on the chip at once.
        together = {"launch_cooperative_grid": True} if self.members_for(layout.width) > 1 else {}
        return {**found, "num_warps": found["WARPS"], **together}

    def launch(
        self, direction: Direction, layout: GateLayout, precision: Precision, programs: int, flag: bool
    ) -> Callable[..., None]:
        """Return a kernel with its grid and constants; see :meth:`Family.launch`."""
        constants = self.constants(direction, layout, precision)
        return lazy_import("prepared").prepared(
            self.kernel(direction), programs, **constants, **{_FLAGS[direction]: flag}
        )


class CudaFamily(Family):
    """Family with kernels in CUDA C++, compiled by NVRTC when they first run.

    Attributes:
        source: the file, relative to this package.
    """

    source: ClassVar[str]

    @abstractmethod
    def threads_for(self, width: int) -> int:
        """Return the threads of a CTA."""

    def shared_for(self, width: int, exact: bool) -> int:
        """Return the bytes of dynamic shared memory."""
        return 0

    @abstractmethod
    def numbers(self) -> dict[str, int]:
        """Return the macros that depend on this configuration."""

    def constants(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the macros of a kernel, except the flag of its pass."""
        found = {"HIDDEN": layout.hidden, "WIDTH": layout.width, "LSTM": layout.lstm, "BITS": precision.bits}
        return {**found, "EXACT": precision.exact, "FORWARD": direction == "forward", **self.numbers()}

    def launch(
        self, direction: Direction, layout: GateLayout, precision: Precision, programs: int, flag: bool
    ) -> Callable[..., None]:
        """Return a kernel with its grid and macros; see :meth:`Family.launch`."""
        folder, constants = self.source.partition("/")[0], self.constants(direction, layout, precision)
        threads, shared = self.threads_for(layout.width), self.shared_for(layout.width, precision.exact)
        return lazy_import("cuda_launch").CudaLaunch(
            *(self.source, f"{folder}_{direction}_kernel", programs, threads, shared),
            {**constants, _FLAGS[direction]: flag},
        )
