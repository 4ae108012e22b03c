"""Precision of float32 recurrent matrix products: process-wide setting, per-device presets, resolution.

The value is resolved at each use: the module's own value, else the process-wide one, else
``torch.get_float32_matmul_precision()``. Only :func:`torch_matmul_precision` changes torch's flags.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch

from recurl.core.errors import ArgumentError, RecurlWarning

ENVIRONMENT_VARIABLE = "RECURL_RNN_PRECISION"
_IN_ENVIRONMENT = f"The recurrent matmul precision in the environment variable {ENVIRONMENT_VARIABLE}"
CONCRETE = ("ieee", "tf32", "tf32x3")
PRESETS = ("fast", "high-prec")
MODES = ("auto", *PRESETS, *CONCRETE)
_FROM_TORCH = {"highest": "ieee", "high": "fast", "medium": "fast"}
_ON_TENSOR_CORES = {"fast": "tf32", "high-prec": "tf32x3"}


class _Process:
    """Process-wide value, set in code or by the environment variable."""

    def __init__(self) -> None:
        self.value = "auto"
        self.read_environment()

    def read_environment(self) -> None:
        self.value = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() or "auto"


_process = _Process()
if _process.value not in MODES:  # warn here and raise at the first use: an import must not fail
    warnings.warn(
        f"The environment variable {ENVIRONMENT_VARIABLE}={_process.value!r} is not one of {', '.join(MODES)}; "
        "the first use of a recurrent module's precision will raise.",
        RecurlWarning,
        stacklevel=2,
    )


def set_recurrent_matmul_precision(mode: str | None) -> None:
    """Set the default precision of recurrent matrix products, for all modules without their own value, in all threads.

    Args:
        mode: ``"ieee"`` (accurate to float32), ``"tf32"``, ``"tf32x3"`` (another name of ieee), ``"fast"`` or
            ``"high-prec"`` (presets by device: tf32 or tf32x3 on GPUs with tf32 tensor cores, else ieee);
            ``"auto"`` or None: reread the environment variable ``RECURL_RNN_PRECISION``, or follow
            ``torch.get_float32_matmul_precision()`` if it is not set.

    Raises:
        ArgumentError: ``mode``, or the value of the environment variable, is not one of these.

    Example:
        >>> from recurl.modules import get_recurrent_matmul_precision
        >>> set_recurrent_matmul_precision("tf32x3")
        >>> get_recurrent_matmul_precision()
        'tf32x3'
        >>> set_recurrent_matmul_precision("auto")
    """
    if mode is None or mode == "auto":
        _process.read_environment()
        check_precision(_process.value, _IN_ENVIRONMENT)
        return
    check_precision(mode)
    _process.value = mode


def get_recurrent_matmul_precision(device: torch.device | str | None = None) -> str:
    """Return the concrete mode (``"ieee"``, ``"tf32"`` or ``"tf32x3"``) of modules without their own value.

    Args:
        device: device to resolve presets for; when None, the current CUDA device, or the CPU if there is none.

    Raises:
        ArgumentError: the value of the environment variable ``RECURL_RNN_PRECISION`` is not one of the modes.
    """
    return resolve_precision("auto", _current_device() if device is None else torch.device(device))


def resolve_precision(mode: str, device: torch.device) -> str:
    """Resolve the value ``mode`` of a module on ``device`` to a concrete mode."""
    if mode == "auto":
        check_precision(_process.value, _IN_ENVIRONMENT)
        mode = _process.value
    if mode == "auto":
        mode = _FROM_TORCH[_precision_of_torch()]
    if mode in PRESETS:
        return _ON_TENSOR_CORES[mode] if _has_tf32(device) else "ieee"
    return mode


# torch.compile can't trace this setting, but recompiles if it has changed.
@torch.compiler.assume_constant_result
def _precision_of_torch() -> str:
    return torch.get_float32_matmul_precision()


@contextmanager
def torch_matmul_precision(precision: str) -> Generator[None]:
    """Set torch's precision of all float32 matrix products inside a ``with`` block.

    Example:
        >>> with torch_matmul_precision("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
        >>> torch.get_float32_matmul_precision()
        'highest'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_precision(mode: object, name: str = "The recurrent matmul precision") -> None:
    """Raise ArgumentError unless ``mode`` is one of :data:`MODES`."""
    if mode not in MODES:
        raise ArgumentError(f"{name} must be one of {', '.join(MODES)}; got {mode!r}.")


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@torch.compiler.assume_constant_result
def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
