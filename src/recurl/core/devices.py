"""Canonical device names."""

from __future__ import annotations

from typing import overload

import torch

__all__ = ["numbered"]


@overload
def numbered(device: torch.device | str) -> torch.device: ...
@overload
def numbered(device: torch.device | str | None) -> torch.device | None: ...
def numbered(device: torch.device | str | None) -> torch.device | None:
    """Return the device with an explicit index, as tensors report it: ``cuda`` becomes the current GPU, ``cuda:0``.

    Example:
        >>> numbered("cpu"), numbered(None)
        (device(type='cpu'), None)
    """
    if device is None:
        return None
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found == _GPU and torch.cuda.is_available() else found


_GPU = torch.device("cuda")  # without an index
