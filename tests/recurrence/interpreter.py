"""Triton's interpreter, mended."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def allow_bounds() -> None:
    """Let bounds of loops be arrays of one value, of which NumPy from 2.4 on makes no integer."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index
