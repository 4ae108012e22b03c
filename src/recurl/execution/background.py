"""Compilation in the background: a process that compiles programs while this one runs without them."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

from recurl.core.torch_compat import compile_packed, compiler_cache, start_compilers

__all__ = ["cache_mark", "compile_ahead", "compiled_later", "is_later"]

_PATIENCE = 60.0  # seconds after which a program is compiled here, in case its process hangs

_later: ContextVar[bool] = ContextVar("recurl compiles later", default=False)
is_later: Callable[[], bool] = _later.get
"""Return whether the call is inside a block of :func:`compiled_later`."""


@contextmanager
def compiled_later(when: bool = True) -> Generator[None]:
    """Only trace what would be compiled inside the block, and run it uncompiled; its next call outside compiles it.

    The first update of a run is such a block: it waits for no compiler, and programs for a GPU are all compiled at the
    same time, in other processes. Results don't depend on how long that takes.

    Args:
        when: False to compile at once.

    Example:
        >>> with compiled_later():
        ...     is_later()
        True
    """
    token = _later.set(when)
    try:
        yield
    finally:
        _later.reset(token)


def compile_ahead(program: bytes) -> Callable[[], None]:
    """Begin to compile a program into the cache of the compiler, in another process.

    Args:
        program: result of :func:`recurl.core.torch_compat.pack_program`.

    Returns:
        a function that waits for the process. Whether it succeeded, only compiling the program shows.
    """
    with suppress(OSError):
        return _compilers.send(program)
    return lambda: None


def cache_mark(program: bytes) -> Path:
    """Return the file that says, once its caller has created it, that the compiler's cache has a program.

    The compiler itself finds programs only after some seconds of work on them.
    """
    return compiler_cache() / "recurl" / hashlib.sha256(program).hexdigest()


class _Compilers:
    """A process that forks one for each program that it is sent, as its imports take as long as most programs.

    It ends when all programs have been waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sent = 0
        self._left = set[int]()
        self._heard = b""

    def send(self, program: bytes) -> Callable[[], None]:
        """Send a program; return a function that waits until it is compiled."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None
            self._sent += 1
            number = self._sent
            pickle.dump((number, _own_modules(), program), self._process.stdin)
            self._process.stdin.flush()
            self._left.add(number)
            return lambda: self._wait(number)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; import {__name__} as own; own.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=2**20,  # so that nothing waits for its imports
            start_new_session=True,  # Ctrl-C is for this process
        )
        assert process.stdin is not None
        pickle.dump(_own_modules(), process.stdin)
        return process

    def _wait(self, number: int) -> None:
        with self._lock:
            process = self._process
            if process is None or number not in self._left:
                return
            assert process.stdout is not None
            assert process.stdin is not None
            with DefaultSelector() as selector:
                selector.register(process.stdout, EVENT_READ)
                while number in self._left and selector.select(_PATIENCE):
                    found = os.read(process.stdout.fileno(), 4096)
                    if not found:  # it has died
                        self._left.clear()
                    *lines, self._heard = (self._heard + found).split(b"\n")
                    self._left.difference_update(map(int, lines))
            self._left.discard(number)
            if not self._left:
                with suppress(OSError):
                    process.stdin.close()
                process.stdout.close()
                process.wait()
                self._process, self._heard = None, b""


_compilers = _Compilers()


def serve() -> None:
    """Compile the programs that come on standard input, each in a process of its own, and say which ones are done."""
    done = os.dup(1)
    os.dup2(2, 1)  # compilers may print
    _import(pickle.load(sys.stdin.buffer))
    with suppress(EOFError):
        while True:
            number, modules, program = pickle.load(sys.stdin.buffer)
            if not os.fork():
                try:
                    start_compilers()
                    _import(modules)
                    compile_packed(program)
                finally:
                    os.write(done, b"%d\n" % number)
                    os._exit(0)


def _own_modules() -> list[str]:
    """Return the modules of recurl that were imported, some of which define operators of programs."""
    own = f"{__name__.partition('.')[0]}."
    return [name for name in sys.modules if name.startswith(own)]


def _import(modules: list[str]) -> None:
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
