"""Private names of CPython used by recurl, each with its purpose and a fallback if it disappears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FrameType

from recurl.core.private_names import find

__all__ = ["is_import_statement", "running_loop"]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


running_loop: Callable[[], asyncio.AbstractEventLoop | None] = find("asyncio:_get_running_loop", _running_loop)
"""Return the event loop of this thread, or None.

Fallback: ``asyncio.get_running_loop``, which is slower as it raises an error outside of a loop.
"""

_IMPORT_FROM: int | None = find("opcode:opmap", {}).get("IMPORT_FROM")


def is_import_statement(frame: FrameType | None) -> bool:
    """Return whether a frame is executing a ``from ... import ...``, from its bytecode.

    Fallback: False.
    """
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
