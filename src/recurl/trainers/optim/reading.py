"""Asynchronous reads of device tensors on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Reading"]


class Reading:
    """Asynchronous copy of tensors to the host.

    GPU tensors are copied to pinned memory once they are computed, while the host continues. CPU tensors are not copied
    and must not be changed before they are read.

    Args:
        tensors: the tensors to read.

    Example:
        >>> reading = Reading([torch.ones(2), torch.tensor(True)])
        >>> reading()
        [tensor([1., 1.]), tensor(True)]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [_copied(tensor) for tensor in tensors]
        self._copied = [_event(device) for device in {tensor.device for tensor in tensors if tensor.is_cuda}]

    def __call__(self) -> list[Tensor]:
        """Wait for the copies and return the tensors on the CPU."""
        for event in self._copied:
            event.synchronize()
        return self._copies


def _copied(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return memory.copy_(tensor, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
