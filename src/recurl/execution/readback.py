"""Refusal of operations that read tensor values back to the host, which would have to wait for the device."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recurl.core import torch_compat
from recurl.core.errors import UnsupportedError
from recurl.core.torch_compat import running_by
from recurl.execution.source_lines import line_of

__all__ = ["refuse_read_back"]

_READS = {
    "_local_scalar_dense": "a tensor is converted to a number or a truth value, as by if, float, int, bool or item",
    "_unique2": "the number of results depends on the values",
    "equal": "all values are compared",
    "masked_select": "a mask selects, so the number of results depends on its values; torch.where keeps the shape",
    "nonzero": "the number of results depends on the values; torch.where(mask, a, b) keeps the shape",
    "repeat_interleave": "the number of results depends on the values",
    "unique_dim": "the number of results depends on the values",
}
_MASKED = "a mask is used as an index, so the number of results depends on its values; torch.where keeps the shape"
_CONVERSIONS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
_CONVERTED = "a tensor is converted to NumPy or Python numbers; use functions of torch (in a task, of xp)"
_OWN = (torch_compat.__file__, __file__)


@contextmanager
def refuse_read_back() -> Generator[None]:
    """Refuse operations on tensors that would make the host wait for a GPU, on any device.

    This includes functions of other libraries, such as ``np.sin(tensor)``, which work on the CPU only. On a GPU,
    ``torch.cuda.set_sync_debug_mode("error")`` detects every synchronization.

    Raises:
        UnsupportedError: (inside the block) an operation reads from the device; the message names the line.

    Example:
        >>> with refuse_read_back():
        ...     half = torch.where(torch.ones(3) > 0, 0.5, 0.0)
    """
    with running_by(_run_checked), _RefuseConversions():
        yield


class _RefuseConversions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CONVERSIONS:
            raise _refusal(_CONVERTED)
        return func(*args, **(kwargs or {}))


def _run_checked(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    name = operation.overloadpacket.__name__
    reason = _READS.get(name)
    if name == "repeat_interleave" and operation is not torch.ops.aten.repeat_interleave.Tensor:
        reason = None
    if name in ("index", "index_put", "index_put_"):
        indices: Any = arguments[1]
        masked = (index for index in indices if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8))
        reason = _MASKED if any(True for _ in masked) else None
    if reason is not None:
        raise _refusal(reason)
    return operation(*arguments, **named)


def _refusal(reason: str) -> UnsupportedError:
    line = line_of(traceback.extract_stack(), *_OWN) or "an operation does so"
    return UnsupportedError(f"Values on a device must not be read back to the host, but {line}: {reason}.")
