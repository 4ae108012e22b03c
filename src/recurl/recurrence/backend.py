"""Backend protocol, registry, and backend selection."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.torch_compat import is_exporting
from recurl.recurrence.cells import Cell, States
from recurl.sequences.boundaries import Boundaries


class Options(NamedTuple):
    """Computation options of a backend.

    Attributes:
        recompute: recompute the gates in the backward pass instead of saving them.
        precision: precision of recurrent matrix products in float32: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.
        compute_dtype: dtype of the operands of the recurrent matrix products.
    """

    recompute: bool = False
    precision: str = "ieee"
    compute_dtype: torch.dtype = torch.float32


DEFAULT_OPTIONS = Options()


class Support(NamedTuple):
    """Requirements of a call, used to select a backend before running it.

    Attributes:
        cell: the cell.
        device: device of the tensors.
        dtype: dtype of the tensors.
        hidden_size: H.
        proj_size: P, or 0 without projection.
        options: computation options.
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
    """Call of one layer in one direction over a flat stream of N > 0 tokens.

    Attributes:
        cell: the cell.
        weights: its weights, as returned by :meth:`Cell.pack`.
        x: input ``[N, I]``.
        states: stored states, each ``[N, *shape]``, read only at the first token of each segment. Values at other
            tokens, including NaN, have no effect.
        boundaries: the segments.
        options: computation options.
    """

    cell: Cell
    weights: Any
    x: Tensor
    states: States
    boundaries: Boundaries
    options: Options = DEFAULT_OPTIONS


class Backend(Protocol):
    """Implementation of a recurrent layer over segments."""

    @property
    def cells(self) -> Collection[str] | None:
        """Names of the supported cells; None if every cell is supported."""
        ...

    @property
    def name(self) -> str:
        """Name for ``recurrent_backend``."""
        ...

    def missing(self) -> str | None:
        """Return what must be installed before this backend can run, or None."""
        ...

    def unsupported(self, support: Support) -> str | None:
        """Return why this backend can't serve a call of a cell in ``cells``, or None if it can."""
        ...

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Return features ``[N, P or H]`` and the states after every token, each ``[N, *shape]``.

        Differentiable in x, every weight and the stored states (whose gradient is zero except at segment starts).
        ``pad`` returns states only at segment ends and zeros elsewhere.
        """
        ...


class Registry:
    """Registry of backends by name, with the rules for ``"auto"`` and ``"fastest"``."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._linear: dict[str, Backend] = {}
        self._fast: list[str] = []
        self.version = 0  # incremented whenever the selection may change

    def register(self, backend: Backend, fast: bool = False) -> None:
        """Register ``backend`` under its name.

        Args:
            backend: the backend.
            fast: whether ``"fastest"`` may select it; the latest registered backend that serves the call wins.

        Raises:
            ArgumentTypeError: it lacks an attribute of :class:`Backend`.
        """
        missing = [part for part in _REQUIRED if not hasattr(backend, part)]
        if missing:
            raise ArgumentTypeError(
                f"A backend must have {', '.join(_REQUIRED)}; {type(backend).__name__} lacks {', '.join(missing)}."
            )
        self.version += 1
        self._backends[backend.name] = backend
        self._fast = [name for name in self._fast if name != backend.name]
        if fast:
            self._fast.insert(0, backend.name)

    def register_linear(self, backend: Backend) -> None:
        """Register the implementation of ``backend.name`` for cells whose step takes ``time``."""
        self.version += 1
        self._linear[backend.name] = backend

    @property
    def names(self) -> tuple[str, ...]:
        """All names accepted by :meth:`choose`."""
        return ("auto", "fastest", *self._backends)

    def check_name(self, name: str) -> None:
        """Check that a name refers to an installed backend.

        Raises:
            ArgumentError: ``name`` is not one of :attr:`names`.
            UnsupportedError: the backend can't run on this machine.
        """
        backend = self._backends.get(name)
        if backend is None and name not in self.names:
            raise ArgumentError(f"recurrent_backend must be one of {', '.join(self.names)}; got {name!r}.")
        missing = None if backend is None else backend.missing()
        if missing is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} is not installed: {missing}.")

    def choose(self, name: str, support: Support) -> Backend:
        """Select the backend for ``name``. A backend requested by name never falls back to another one.

        Raises:
            ArgumentError: there is no such backend.
            UnsupportedError: the backend isn't installed or can't serve this call; the message states the reason and
                an alternative.
        """
        self.check_name(name)
        if name == "auto":
            name = self._automatic(support)
        elif name == "fastest":
            name = self._fastest(support)
        backend = self.implementation_for(name, support.cell)
        reason = _refusal(backend, support)
        if reason is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} can't run this call: {reason}.")
        return backend

    def check_cell(self, name: str, cell: Cell) -> None:
        """Check that the backend ``name`` supports ``cell``; ``"auto"`` and ``"fastest"`` always find one that does.

        Raises:
            UnsupportedError: the backend has no kernels for the cell.
        """
        reason = _unsupported_cell(self.implementation_for(name, cell), cell) if name in self._backends else None
        if reason is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} can't run this module: {reason}.")

    def _fastest(self, support: Support) -> str:
        for name in self._fast:
            if _refusal(self.implementation_for(name, support.cell), support) is None:
                return name
        return "loop"

    def implementation_for(self, name: str, cell: Cell) -> Backend:
        """Return the backend of this name for ``cell``, or its linear-recurrence implementation, without checks."""
        backend = self._backends[name]
        return self._linear.get(name, backend) if cell.takes_time and not _lists_cell(backend, cell) else backend

    def _automatic(self, support: Support) -> str:
        """Return ``pad``, else ``loop``, in eager mode; ``scan`` under ``torch.compile``; ``loop`` for export."""
        if not support.compiling:
            return "loop" if _unsupported_cell(self._backends["pad"], support.cell) else "pad"
        return "loop" if is_exporting() else "scan"


_REQUIRED = ("name", "cells", "missing", "unsupported", "run")


def _refusal(backend: Backend, support: Support) -> str | None:
    return _unsupported_cell(backend, support.cell) or backend.unsupported(support)


def _lists_cell(backend: Backend, cell: Cell) -> bool:
    return backend.cells is not None and cell.name in backend.cells


def _unsupported_cell(backend: Backend, cell: Cell) -> str | None:
    if backend.cells is None or _lists_cell(backend, cell):
        return None
    return f"it has kernels for {' and '.join(backend.cells)} only, not for the cell {cell.name}; use 'auto' or 'loop'"


BACKENDS = Registry()


def register_backend(backend: Backend, fast: bool = False) -> None:
    """Register a backend for use as ``recurrent_backend``.

    Args:
        backend: any object with the attributes of :class:`Backend`.
        fast: whether ``"fastest"`` may select it, in preference to the built-in backends.

    Raises:
        ArgumentTypeError: it lacks an attribute of :class:`Backend`.
    """
    BACKENDS.register(backend, fast)


_NO_CONTEXT = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on ``device``: a recurrence computes in the dtype of its weights."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NO_CONTEXT


_runs: ContextVar[list[str] | None] = ContextVar("recurl_backend_runs", default=None)


def record_run(name: str) -> None:
    """Record that the backend ``name`` has run a layer, for :func:`record_backends`."""
    runs = _runs.get()
    if runs is not None:
        runs.append(name)


@contextmanager
def record_backends() -> Generator[list[str]]:
    """Context manager that collects the names of the backends that run, one entry per layer and direction.

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
