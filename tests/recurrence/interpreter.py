"""Triton's interpreter, mended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def allow_bounds() -> None:
    """Let bounds of loops be arrays of one value, of which NumPy from 2.4 on makes no integer."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index


def patch_once() -> None:
    """Patch the language once for each module: the interpreter does so at each call of a function of a kernel.

    What it patches stays patched, which is right in a process that runs interpreted kernels alone.
    """
    patch_lang, patched = interpreter._patch_lang, set[int]()

    def patch(function: Any) -> SimpleNamespace:
        module = id(function.__globals__)
        if module not in patched:
            patch_lang(function)
            patched.add(module)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


def allow_bfloat16_products() -> None:
    """Multiply bfloat16 as the numbers that they are, not as the integers that hold their bits."""
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    builder.create_dot = lambda self, a, b, *others: create_dot(self, widened(a), widened(b), *others)
