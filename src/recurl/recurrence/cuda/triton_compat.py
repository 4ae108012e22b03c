"""Names of Triton without a promise of stability, and of torch's CUDA wheels, each with its purpose and fallback.

The kernels in Gluon (``triton.experimental``) are imported when a GPU needs them, and aren't wrapped here.
Triton itself is imported at the first use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from recurl.core.private_names import Absent, find

__all__ = ["current_stream", "from_disk_cache", "launch_of", "nvrtc_library"]


def launch_of(compiled: Any, programs: tuple[int, ...]) -> Callable[..., None] | None:
    """Return the launch of a compiled kernel on a grid: a function of the GPU and all arguments, pointers as integers.

    It omits what Triton prepares for hooks at every launch, unless a hook is registered, as a profiler does.
    Fallback: None, as for an interpreted kernel, so that each launch looks the kernel up.

    Args:
        compiled: what a launch through Triton returned.
        programs: the grid.
    """
    settings: Any = find("triton.knobs:runtime")
    if isinstance(settings, Absent) or not isinstance(compiled, _compiled_kernel()):
        return None
    grid = (*programs, 1, 1)[:3]
    hooked, run, function, options = compiled[grid], compiled.run, compiled.function, compiled.packed_metadata

    def launch(device: int, *arguments: Any) -> None:
        enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a chain of hooks
            hooked(*arguments)
        else:
            run(*grid, current_stream(device), function, options, None, None, None, *arguments)

    return launch


@cache
def _compiled_kernel() -> type[Any] | tuple[()]:
    return find("triton.compiler:CompiledKernel", ())


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream on a GPU, without creating a Python object for the stream.

    Fallback: ``torch.cuda.current_stream``.
    """
    driver = _driver()
    return torch.cuda.current_stream(device).cuda_stream if driver is None else driver.active.get_current_stream(device)


@cache
def _driver() -> Any:
    return find("triton.runtime:driver", None)


def from_disk_cache(key: str, name: str, compute: Callable[[], bytes]) -> bytes:
    """Return a file of Triton's disk cache, which is computed if it is missing. Fallback: every process computes it."""
    manager = find("triton.runtime.cache:get_cache_manager")
    if isinstance(manager, Absent):
        return compute()
    files: Any = manager(key)
    found = files.get_file(name)
    if found is not None:
        return Path(found).read_bytes()
    code = compute()
    files.put(code, name)
    return code


@cache
def nvrtc_library() -> ctypes.CDLL | None:
    """Return the NVRTC library of torch's CUDA version (without CUDA: any installed next to torch), or None.

    Its folder next to torch is not documented. Fallback: the search path of the system.
    """
    version = torch.version.cuda.split(".")[0] if torch.version.cuda else "*"
    for folder in sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib")):
        for path in folder.glob(f"libnvrtc.so.{version}"):
            for needed in folder.glob("libnvrtc-builtins.so.*"):  # NVRTC looks for it by name, not in this folder
                ctypes.CDLL(str(needed))
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL(f"libnvrtc.so.{version}")
    except OSError:
        return None
