"""Compilation of CUDA C++ at run time with NVRTC, which comes with torch's CUDA builds."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

from recurl.recurrence.cuda.triton_compat import nvrtc_library

_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


def identity(name: str, constants: dict[str, Any], architecture: str) -> str:
    """Return a hash of everything that the machine code of a kernel depends on."""
    major, minor, nvrtc = ctypes.c_int(), ctypes.c_int(), nvrtc_library()
    assert nvrtc is not None
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    parts = (major.value, minor.value, architecture, _OPTIONS, sorted(constants.items()), _source(name))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _source(name: str) -> bytes:
    before = ("instructions.cu",) if name == "nothing.cu" else ("instructions.cu", "gates.cu")
    return b"".join((Path(__file__).parent / part).read_bytes() for part in (*before, name))


def compiled(name: str, constants: dict[str, Any], architecture: str, *options: str) -> tuple[bytes, str]:
    """Compile a source file; return its machine code and the compiler's log.

    Args:
        name: a CUDA C++ source file, relative to this package.
        constants: macros.
        architecture: the GPU's, such as ``"sm_90"``.
        options: further compiler options.

    Raises:
        RuntimeError: the source doesn't compile.
    """
    nvrtc = nvrtc_library()
    assert nvrtc is not None
    defined = (f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in constants.items())
    words = [word.encode() for word in (f"--gpu-architecture={architecture}", *_OPTIONS, *options, *defined)]
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), _source(name), name.encode(), 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").rstrip("\0")
    if failed:
        raise RuntimeError(f"NVRTC doesn't compile {name} for {architecture} with {constants}: {log}")
    code = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log


def _text(size_of: Any, write: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    write(program, found)
    return found.raw
