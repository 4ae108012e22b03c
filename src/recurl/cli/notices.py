"""One-line notices on standard error, warnings that users can't act on, and tracebacks saved to files."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from recurl.core.errors import RecurlWarning

_LIBRARIES = r"(recurl|torch|tensordict|triton)(\.|$)"
_HIDDEN: tuple[tuple[str, type[Warning], str], ...] = (
    ("", FutureWarning, _LIBRARIES),
    (r"Dynamo detected a call to a `functools\.lru_cache`", Warning, ""),
    (r"Logical operators 'and' and 'or' are deprecated for non-scalar tensors", Warning, ""),
    (r"TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled", Warning, ""),
    (r"\s*Online softmax is disabled on the fly", Warning, ""),
    (r"The CUDA Graph is empty", Warning, ""),
    (r"(Warning: )?Profiler clears events at the end of each cycle", Warning, ""),
)
"""Warnings of libraries about themselves: how the message begins, category, and the module that they are issued for.

Python hides a DeprecationWarning itself. recurl hides all that compilers warn of or log while it calls them; these may
also come from elsewhere.
"""


def notify(text: str) -> None:
    """Print a notice to standard error."""
    print(f"Notice: {text}", file=sys.stderr)


@contextmanager
def with_notices() -> Generator[None]:
    """Show warnings of recurl as notices inside the block, and hide those in which libraries speak about themselves.

    Warnings of users' code are shown as usual. ``python -W`` and ``PYTHONWARNINGS`` decide instead, if given.

    Example:
        >>> with with_notices():
        ...     warnings.warn("The CUDA Graph is empty.")
    """
    usual: Any = warnings.formatwarning

    def one_line(message: Any, category: type[Warning], *where: Any, **more: Any) -> str:
        if issubclass(category, RecurlWarning):
            rank = os.environ.get("RANK", "0")  # set by torchrun
            whose = "" if rank == "0" else f" of rank {rank}"
            return f"Notice{whose}: {' '.join(str(message).split())}\n"
        return usual(message, category, *where, **more)

    with warnings.catch_warnings():
        if not sys.warnoptions:
            for begin, category, module in _HIDDEN:
                warnings.filterwarnings("ignore", begin, category, module)
        warnings.formatwarning = one_line
        try:
            yield
        finally:
            warnings.formatwarning = usual


def save_traceback(trace: str) -> str:
    """Write a traceback to a temporary file and return its name."""
    with tempfile.NamedTemporaryFile("w", prefix="recurl-traceback-", suffix=".txt", delete=False) as file:
        file.write(trace)
    return file.name
