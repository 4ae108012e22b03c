"""What a backend is, which there are, and the one place that decides who runs."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recurl._torch import is_exporting
from recurl.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import Cell, States


class Options(NamedTuple):
    """How a backend computes, where it has a choice.

    Attributes:
        recompute: keep no gates for the backward pass, compute them again there.
        precision: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``: of the recurrent matrix products in float32.
        compute_dtype: dtype of the operands of the recurrent matrix products.
    """

    recompute: bool = False
    precision: str = "ieee"
    compute_dtype: torch.dtype = torch.float32


DEFAULT_OPTIONS = Options()


class Support(NamedTuple):
    """What a caller needs of a backend, known before any work.

    Attributes:
        cell: the cell.
        device: where the tensors are.
        dtype: their dtype.
        hidden_size: H.
        proj_size: P, or 0 without projection.
        options: how to compute.
        compiling: whether ``torch.compile`` or ``torch.export`` is tracing the call.
    """

    cell: Cell
    device: torch.device
    dtype: torch.dtype = torch.float32
    hidden_size: int = 1
    proj_size: int = 0
    options: Options = DEFAULT_OPTIONS
    compiling: bool = False


@dataclass(frozen=True)
class LayerCall:
    """One layer in one direction over a flat stream of N > 0 tokens.

    Attributes:
        cell: the cell.
        weights: its weights, as :meth:`Cell.pack` gives them.
        x: input ``[N, I]``.
        states: stored states, each ``[N, *shape]``, read at the first token of each segment only: what stands at other
            tokens, NaN included, changes nothing.
        boundaries: the segments.
        options: how to compute.
    """

    cell: Cell
    weights: Any
    x: Tensor
    states: States
    boundaries: Boundaries
    options: Options = DEFAULT_OPTIONS


class Backend(Protocol):
    """A way to run a recurrent layer over segments."""

    @property
    def cells(self) -> Collection[str] | None:
        """Names of the cells that it serves; None if it serves every cell."""
        ...

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    def missing(self) -> str | None:
        """Return what must be installed before this backend can run at all, or None."""
        ...

    def unsupported(self, support: Support) -> str | None:
        """Return why this backend can't serve a cell that is among its ``cells``, or None if it can."""
        ...

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Return features ``[N, P or H]`` and the states after every token, each ``[N, *shape]``.

        Differentiable in x, every weight and the stored states (whose gradient is zero except at segment starts).
        ``pad`` gives states at segment ends only and zeros elsewhere.
        """
        ...


class Registry:
    """Backends by name, and the rules for ``"auto"`` and ``"fastest"``."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._linear: dict[str, Backend] = {}
        self._fast: list[str] = []
        self.version = 0  # raised where another backend may serve

    def register(self, backend: Backend, fast: bool = False) -> None:
        """Add ``backend`` under its name.

        Args:
            backend: the backend.
            fast: whether ``"fastest"`` takes it where it serves; of several the one that was registered last.

        Raises:
            ArgumentTypeError: it lacks a part of :class:`Backend`.
        """
        missing = [part for part in _PARTS if not hasattr(backend, part)]
        if missing:
            raise ArgumentTypeError(
                f"A backend must have {', '.join(_PARTS)}; {type(backend).__name__} lacks {', '.join(missing)}."
            )
        self.version += 1
        self._backends[backend.name] = backend
        self._fast = [name for name in self._fast if name != backend.name]
        if fast:
            self._fast.insert(0, backend.name)

    def register_linear(self, backend: Backend) -> None:
        """Add who runs cells whose step takes ``time``, in the place of the backend of the same name."""
        self.version += 1
        self._linear[backend.name] = backend

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that :meth:`choose` accepts."""
        return ("auto", "fastest", *self._backends)

    def check_name(self, name: str) -> None:
        """Refuse a name that stands for no backend, or for one that isn't installed.

        Raises:
            ArgumentError: ``name`` is not one of :attr:`names`.
            UnsupportedError: the backend can't run at all on this machine.
        """
        backend = self._backends.get(name)
        if backend is None and name not in self.names:
            raise ArgumentError(f"recurrent_backend must be one of {', '.join(self.names)}; got {name!r}.")
        missing = None if backend is None else backend.missing()
        if missing is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} is not installed: {missing}.")

    def choose(self, name: str, support: Support) -> Backend:
        """Return the backend that serves ``name``; there is no silent fallback from a backend asked for by name.

        Raises:
            ArgumentError: no such backend.
            UnsupportedError: the backend isn't installed or can't serve this call; the message says why and what can.
        """
        self.check_name(name)
        if name == "auto":
            name = self._automatic(support)
        elif name == "fastest":
            name = self._fastest(support)
        backend = self.serving(name, support.cell)
        reason = _refusal(backend, support)
        if reason is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} can't run this call: {reason}.")
        return backend

    def check_cell(self, name: str, cell: Cell) -> None:
        """Refuse a backend, by name, that doesn't serve ``cell``; ``"auto"`` and ``"fastest"`` always find one.

        Raises:
            UnsupportedError: the backend has no kernels for the cell.
        """
        reason = _refused_cell(self.serving(name, cell), cell) if name in self._backends else None
        if reason is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} can't run this module: {reason}.")

    def _fastest(self, support: Support) -> str:
        for name in self._fast:
            if _refusal(self.serving(name, support.cell), support) is None:
                return name
        return "loop"

    def serving(self, name: str, cell: Cell) -> Backend:
        """Return the backend of this name, or who runs a linear recurrence under it; unchecked."""
        backend = self._backends[name]
        return self._linear.get(name, backend) if cell.takes_time and not _names(backend, cell) else backend

    def _automatic(self, support: Support) -> str:
        """``pad`` or else ``loop`` in eager mode, ``scan`` under ``torch.compile``, ``loop`` for ``torch.export``."""
        if not support.compiling:
            return "loop" if _refused_cell(self._backends["pad"], support.cell) else "pad"
        return "loop" if is_exporting() else "scan"


_PARTS = ("name", "cells", "missing", "unsupported", "run")


def _refusal(backend: Backend, support: Support) -> str | None:
    return _refused_cell(backend, support.cell) or backend.unsupported(support)


def _names(backend: Backend, cell: Cell) -> bool:
    return backend.cells is not None and cell.name in backend.cells


def _refused_cell(backend: Backend, cell: Cell) -> str | None:
    if backend.cells is None or _names(backend, cell):
        return None
    return f"it has kernels for {' and '.join(backend.cells)} only, not for the cell {cell.name}; use 'auto' or 'loop'"


BACKENDS = Registry()


def register_backend(backend: Backend, fast: bool = False) -> None:
    """Add a backend to those that ``recurrent_backend`` names.

    Args:
        backend: any object with the parts of :class:`Backend`.
        fast: whether ``"fastest"`` takes it where it serves, before the built-in ones.

    Raises:
        ArgumentTypeError: it lacks a part of :class:`Backend`.
    """
    BACKENDS.register(backend, fast)


_UNCHANGED = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off on ``device``: a recurrence computes in the dtype of its weights."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _UNCHANGED


_runs: ContextVar[list[str] | None] = ContextVar("recurl_backend_runs", default=None)


def record_run(name: str) -> None:
    """Called by each backend when it has run a layer; see :func:`record_backends`."""
    runs = _runs.get()
    if runs is not None:
        runs.append(name)


@contextmanager
def record_backends() -> Generator[list[str]]:
    """Collect the names of the backends that run inside the block, one entry per layer and direction.

    Example:
        >>> with record_backends() as ran:
        ...     pass
        >>> ran
        []
    """
    runs: list[str] = []
    token = _runs.set(runs)
    try:
        yield runs
    finally:
        _runs.reset(token)
