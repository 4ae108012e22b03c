"""What a backend is, which there are, and the one place that decides who runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recurl.errors import ArgumentError, UnsupportedError
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import Cell, LayerWeights, States


@dataclass(frozen=True)
class Options:
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


@dataclass(frozen=True)
class Support:
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
        weights: its weights.
        x: input ``[N, I]``.
        states: stored states ``[N, P or H]`` (and ``[N, H]``), read at the first token of each segment only: what
            stands at other tokens, NaN included, changes nothing.
        boundaries: the segments.
        options: how to compute.
    """

    cell: Cell
    weights: LayerWeights
    x: Tensor
    states: States
    boundaries: Boundaries
    options: Options = DEFAULT_OPTIONS


class Backend(Protocol):
    """A way to run a recurrent layer over segments."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    def missing(self) -> str | None:
        """Return what must be installed before this backend can run at all, or None."""
        ...

    def unsupported(self, support: Support) -> str | None:
        """Return why this backend can't serve, or None if it can."""
        ...

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Return features ``[N, P or H]`` and the states after every token, each ``[N, ...]``.

        Differentiable in x, every weight and the stored states (whose gradient is zero except at segment starts).
        ``pad`` gives states at segment ends only and zeros elsewhere.
        """
        ...


class Registry:
    """Backends by name, and the rules for ``"auto"`` and ``"fastest"``."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def register(self, backend: Backend) -> None:
        """Add ``backend`` under its name."""
        self._backends[backend.name] = backend

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
        if name not in self.names:
            raise ArgumentError(f"recurrent_backend must be one of {', '.join(self.names)}; got {name!r}.")
        missing = self._backends[name].missing() if name in self._backends else None
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
            name = _automatic(support)
        elif name == "fastest":
            name = self._fastest(support)
        reason = self._backends[name].unsupported(support)
        if reason is not None:
            raise UnsupportedError(f"The recurrent backend {name!r} can't run this call: {reason}.")
        return self._backends[name]

    def _fastest(self, support: Support) -> str:
        for name in ("triton", "cpu"):
            backend = self._backends.get(name)
            if backend is not None and backend.unsupported(support) is None:
                return name
        return "loop"


def _automatic(support: Support) -> str:
    """``pad`` in eager mode, ``scan`` under ``torch.compile``, and for ``torch.export`` the operator of ``loop``."""
    if not support.compiling:
        return "pad"
    return "loop" if torch.compiler.is_exporting() else "scan"


BACKENDS = Registry()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off on ``device``: a recurrence computes in the dtype of its weights."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


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
