"""Fixes for Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def allow_bounds() -> None:
    """Allow loop bounds that are arrays of one value, which NumPy 2.4 and newer doesn't convert to integers."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index


def patch_once() -> None:
    """Patch the language once for each module, instead of at each call of a function in a kernel.

    The patches are never undone, which is fine in a process that only runs interpreted kernels.
    """
    patch_lang, patched = interpreter._patch_lang, set[int]()

    def patch(function: Any) -> SimpleNamespace:
        module = id(function.__globals__)
        if module not in patched:
            patch_lang(function)
            patched.add(module)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


def allow_bfloat16() -> None:
    """Multiply bfloat16 numbers instead of the integers that hold their bits, and round to them as GPUs do.

    The interpreter drops the bits that bfloat16 hasn't: all errors have the same sign, and add up.
    """
    builder = interpreter.InterpreterBuilder
    create_dot, cast = builder.create_dot, builder.cast_impl

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self: Any, value: Any, dtype: Any) -> Any:
        if (value.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, value, dtype)
        bits = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(bits.numpy(), tl.bfloat16)

    builder.create_dot = lambda self, a, b, *others: create_dot(self, widened(a), widened(b), *others)
    builder.cast_impl = rounded
