"""Copies between shared memory and the device of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.core.spans import TRANSFERS, span
from recurl.envs.workers_memory import SharedTensors

__all__ = ["Download", "Upload"]


class Upload:
    """Copies results written by workers from shared memory to a device.

    To a GPU, everything is transferred in one asynchronous copy from page-locked memory. Call :meth:`wait` before the
    memory is written again.

    Args:
        shared: the shared memory.
        shapes: shapes of the copies, by key.
        device: device of the copies; None for the CPU.
    """

    def __init__(
        self, shared: SharedTensors, shapes: Mapping[NestedKey, torch.Size], device: torch.device | None
    ) -> None:
        self._block = shared.block
        self._device = device if device is not None and device.type == "cuda" else None
        self._copy_event: torch.cuda.Event | None = None
        tensors = {key: tensor.view(shapes[key]) for key, tensor in shared.tensors.items()}
        self._copies = {key: _copy_of(tensor) for key, tensor in tensors.items()}
        self._views = {key: (t.dtype, t.shape, t.stride(), t.storage_offset()) for key, t in tensors.items()}
        if self._device is not None:
            _pin_memory(self._block, self._device)

    def __call__(self, keys: Iterable[NestedKey]) -> dict[NestedKey, Tensor]:
        """Return copies of the entries ``keys``."""
        if self._device is None:
            return {key: self._copies[key]() for key in keys}
        with span(TRANSFERS):
            block = torch.empty_like(self._block, device=self._device)
            block.copy_(self._block, non_blocking=True)
            self._copy_event = torch.cuda.Event()
            self._copy_event.record(torch.cuda.current_stream(self._device))
        return self._tensors_in(block, keys)

    def _tensors_in(self, block: Tensor, keys: Iterable[NestedKey]) -> dict[NestedKey, Tensor]:
        """Return views of the entries in a copy of the memory, with one operation per entry and per dtype."""
        found: dict[NestedKey, Tensor] = {}
        of_dtype: dict[torch.dtype, Tensor] = {}
        for key in keys:
            dtype, shape, stride, offset = self._views[key]
            if dtype not in of_dtype:
                of_dtype[dtype] = block.view(dtype)
            found[key] = of_dtype[dtype].as_strided(shape, stride, offset)
        return found

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
            self._copy_event = None


def _copy_of(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that copies a tensor, with NumPy if it supports the dtype, which takes half the time."""
    try:
        values = tensor.numpy()
    except TypeError:  # bfloat16
        return tensor.clone
    return lambda: torch.from_numpy(values.copy())


class Download:
    """Copies tensors to the CPU, through page-locked memory if they are on a GPU.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._from_gpu = device is not None and device.type == "cuda"
        self._memory: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the CPU, in memory that the next call may overwrite."""
        if not (self._from_gpu and tensor.is_cuda):
            return tensor
        with span(TRANSFERS):
            kind = (tensor.shape, tensor.dtype)
            memory = self._memory.get(kind)
            if memory is None:
                memory = self._memory[kind] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            memory.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        return memory


def _pin_memory(block: Tensor, device: torch.device) -> None:
    """Page-lock the memory of a tensor for its lifetime, so that a GPU can copy it asynchronously."""
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)))
    finalizer = weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
    finalizer.atexit = False  # the end of the process releases the pages
