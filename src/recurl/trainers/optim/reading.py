"""Tensors that are read on the host later, without waiting for their device now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Reading"]


class Reading:
    """Brings tensors to the host.

    From a GPU they are copied to page-locked memory once they are computed, while the host goes on; what is on the CPU
    is not copied, and must not be changed before it is read.

    Args:
        tensors: what is read.

    Example:
        >>> reading = Reading([torch.ones(2), torch.tensor(True)])
        >>> reading()
        [tensor([1., 1.]), tensor(True)]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [_copied(tensor) for tensor in tensors]
        self._copied = [_event(device) for device in {tensor.device for tensor in tensors if tensor.is_cuda}]

    def __call__(self) -> list[Tensor]:
        """Wait for the tensors and return them, on the CPU."""
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
