"""Backend protocol, registries, and selection of an implementation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from recurl.core.devices import is_autocast_on
from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.torch_compat import is_exporting, is_known
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Cell
from recurl.sequences.index import Boundaries

T = TypeVar("T")
S = TypeVar("S", bound="Support | OperatorSupport")


class Options(NamedTuple):
    """Computation options of a backend.

    Attributes:
        recompute: recompute the gates in the backward pass instead of saving them.
        precision: precision of recurrent matrix products in float32: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.
        compute_dtype: dtype of the operands of the recurrent matrix products.
        after: whether the states after the steps of sequences are wanted.
    """

    recompute: bool = False
    precision: str = "ieee"
    compute_dtype: torch.dtype = torch.float32
    after: bool = True


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


class OperatorSupport(NamedTuple):
    """Requirements of a call of an operator over a stream, like those of a layer in :class:`Support`.

    Attributes:
        device: device of the tensors.
        dtype: dtype of the tensors.
        compiling: whether ``torch.compile`` or ``torch.export`` is tracing the call.
        keys: numbers of a key of one head.
        values: numbers of its value in a matrix recurrence, or of an input that attention stores.
    """

    device: torch.device
    dtype: torch.dtype
    compiling: bool = False
    keys: int = 1
    values: int = 0


@dataclass(frozen=True)
class LayerCall:
    """Call of one layer in one direction over a flat stream of N > 0 tokens.

    Attributes:
        cell: the cell.
        weights: its weights, as returned by :meth:`Cell.pack`.
        x: input ``[N, I]``.
        states: stored states, each ``[N, *shape]``, read only at the first token of each segment. Values at other
            tokens, including NaN, have no effect. Those in the cell's ``read_at_starts`` may be ``[N / S, *shape]``, of
            every S-th token, if the backend reads sparse states.
        boundaries: the segments.
        options: computation options.
    """

    cell: Cell
    weights: Any
    x: Tensor
    states: States
    boundaries: Boundaries
    options: Options = DEFAULT_OPTIONS

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The differentiable inputs, ``(x, *weights, *states)``."""
        return (self.x, *self.weights, *self.states)

    @property
    def known_rows(self) -> int:
        """Number of rows in the batch, used to select kernels; 1 if it is symbolic under ``torch.compile``."""
        rows = self.boundaries.rows
        return rows if is_known(rows) else 1


class Backend(Protocol):
    """Implementation of a recurrent layer over segments.

    It may have the attribute ``reads_sparse_states``, true if :meth:`run` takes such states; see :class:`LayerCall`.
    """

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


class _Entry(Generic[T]):
    """A registered implementation, loaded on first use, and the only type of device that it serves, or None."""

    def __init__(self, load: Callable[[], T], device: str | None = None) -> None:
        self._load, self.device = load, device
        self._loaded: list[T] = []

    def get(self) -> T:
        self._prepare()
        return self._loaded[0]

    @torch.compiler.assume_constant_result  # torch.compile can't trace an import
    def _prepare(self) -> bool:
        if not self._loaded:
            self._loaded.append(self._load())
        return True


class Registry(Generic[T, S]):
    """Implementations of one operation by name, with the rules for ``"auto"`` and ``"fastest"``.

    Args:
        argument: what the name is, for error messages.
        subject: what an implementation is called.
        work: what it is asked to run.
        traced: what ``"auto"`` selects under ``torch.compile``.
    """

    def __init__(self, argument: str, subject: str, work: str, traced: str = "scan") -> None:
        self._argument, self._subject, self._work, self._traced = argument, subject, work, traced
        self._backends: dict[str, _Entry[T]] = {}
        self._fast: list[str] = []
        self.version = 0  # incremented whenever the selection may change

    def add(self, name: str, load: Callable[[], T], device: str | None = None, fast: bool = False) -> None:
        """Register the implementation that ``load`` returns on first use, for one type of device if it is given.

        If ``fast``, ``"fastest"`` may select it; the latest registered one that serves the call wins.
        """
        self.version += 1
        self._backends[name] = _Entry(load, device)
        self._fast = [other for other in self._fast if other != name]
        if fast:
            self._fast.insert(0, name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names accepted by :meth:`choose`."""
        return ("auto", "fastest", *self._backends)

    def named(self, name: str) -> T:
        """Return the implementation called ``name``, whether or not it can run."""
        return self._backends[name].get()

    def check_name(self, name: str) -> None:
        """Raise an :class:`ArgumentError` if ``name`` is not one of :attr:`names`."""
        if name not in self.names:
            raise ArgumentError(f"{self._argument} must be one of {', '.join(self.names)}; got {name!r}.")

    def choose(self, name: str, support: S) -> T:
        """Select the implementation for ``name``. One requested by name never falls back to another.

        Raises:
            ArgumentError: there is no such name.
            UnsupportedError: the implementation isn't installed or can't serve this call; the message states the reason
                and an alternative.
        """
        self.check_name(name)
        if name == "auto":
            name = ("loop" if is_exporting() else self._traced) if support.compiling else self._eager(support)
        elif name == "fastest":
            name = next((one for one in self._fast if self._is_fit(one, support)), "loop")
        reason = self._refusal(name, support)
        if reason is not None:
            raise self._refused(name, self._work, reason)
        return self._implementation(name, support)

    def _is_fit(self, name: str, support: S) -> bool:
        serves_device = self._backends[name].device in (None, support.device.type)
        return serves_device and self._refusal(name, support) is None

    def _refused(self, name: str, work: str, reason: str) -> UnsupportedError:
        return UnsupportedError(f"{self._subject} {name!r} can't run this {work}: {reason}.")

    def _eager(self, support: S) -> str:
        """Return the name that ``"auto"`` selects in eager mode."""
        return "loop"

    def _implementation(self, name: str, support: S) -> T:
        return self.named(name)

    def _refusal(self, name: str, support: S) -> str | None:
        kernels: Any = self.named(name)
        return kernels.missing() or kernels.unsupported(support)


class LayerRegistry(Registry[Backend, Support]):
    """Registry of the backends of layers."""

    def __init__(self) -> None:
        super().__init__("recurrent_backend", "The recurrent backend", "call")
        self._linear: dict[str, _Entry[Backend]] = {}

    def register(self, backend: Backend, fast: bool = False) -> None:
        """Register ``backend`` under its name; see :func:`register_backend`."""
        missing = [part for part in _REQUIRED if not hasattr(backend, part)]
        if missing:
            raise ArgumentTypeError(
                f"A backend must have {', '.join(_REQUIRED)}; {type(backend).__name__} lacks {', '.join(missing)}."
            )
        self.add(backend.name, lambda: backend, fast=fast)

    def add_linear(self, name: str, load: Callable[[], Backend]) -> None:
        """Register the implementation of the backend ``name`` for cells whose step takes ``time``."""
        self._linear[name] = _Entry(load)

    def check_name(self, name: str) -> None:
        """Check that a name refers to an installed backend.

        Raises:
            ArgumentError: ``name`` is not one of :attr:`names`.
            UnsupportedError: the backend can't run on this machine.
        """
        super().check_name(name)
        missing = self.named(name).missing() if name in self._backends else None
        if missing is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} is not installed: {missing}.")

    def check_cell(self, name: str, cell: Cell) -> None:
        """Check that the backend ``name`` supports ``cell``; ``"auto"`` and ``"fastest"`` always find one that does.

        Raises:
            UnsupportedError: the backend has no kernels for the cell.
        """
        reason = self._unsupported_cell(name, cell) if name in self._backends else None
        if reason is not None:
            raise self._refused(name, "module", reason)

    def device_of(self, name: str) -> str | None:
        """Return the only type of device that the backend ``name`` serves, such as ``"cuda"``; None for any."""
        return self._backends[name].device if name in self._backends else None

    def implementation_for(self, name: str, cell: Cell) -> Backend:
        """Return the backend of this name for ``cell``, or its linear-recurrence implementation, without checks."""
        backend = self.named(name)
        linear = self._linear.get(name) if cell.takes_time and not _lists_cell(backend, cell) else None
        return backend if linear is None else linear.get()

    def _eager(self, support: Support) -> str:
        return "loop" if self._unsupported_cell("pad", support.cell) else "pad"

    def _implementation(self, name: str, support: Support) -> Backend:
        return self.implementation_for(name, support.cell)

    def _refusal(self, name: str, support: Support) -> str | None:
        backend = self.implementation_for(name, support.cell)
        return self._unsupported_cell(name, support.cell) or backend.unsupported(support)

    def _unsupported_cell(self, name: str, cell: Cell) -> str | None:
        backend = self.implementation_for(name, cell)
        if backend.cells is None or _lists_cell(backend, cell):
            return None
        others = ["cells with takes_time (s5, gtrxl, ...)"] if name in self._linear else []
        *most, last = (*backend.cells, *others)
        known = f"{', '.join(most)} and {last}" if most else last
        return f"it has kernels for {known} only, not for the cell {cell.name}; use 'auto' or 'loop'"


_REQUIRED = ("name", "cells", "missing", "unsupported", "run")


def _lists_cell(backend: Backend, cell: Cell) -> bool:
    return backend.cells is not None and cell.name in backend.cells


BACKENDS = LayerRegistry()


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
    if is_autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return _NO_CONTEXT


_runs: ContextVar[list[str] | None] = ContextVar("recurl_backend_runs", default=None)


def record_run(name: str) -> None:
    """Record that the backend ``name`` has run a layer, for :func:`record_backends`."""
    runs = _runs.get()
    if runs is not None:
        runs.append(name)


@contextmanager
def recorded_as(name: str) -> Generator[None]:
    """Context manager that records one run of the backend ``name``, whatever runs inside."""
    record_run(name)
    token = _runs.set(None)
    try:
        yield
    finally:
        _runs.reset(token)


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
