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
from typing import IO, cast

from recurl.core.torch_compat import compile_packed, compiler_cache, compiler_environment, start_compilers

__all__ = ["cache_mark", "compile_ahead", "compiled_later", "is_later"]

_PATIENCE = 60.0  # seconds after which a program is compiled here, in case its process hangs
_GRACE = 10.0  # seconds in which a process ends that has nothing left to do

_later: ContextVar[bool] = ContextVar("recurl compiles later", default=False)
is_later: Callable[[], bool] = _later.get
"""Return whether the call is inside a block of :func:`compiled_later`."""


@contextmanager
def compiled_later(when: bool = True) -> Generator[None]:
    """Only trace what would be compiled inside the block, and run it uncompiled; its next call outside compiles it.

    The first update of a run is such a block: it waits for no compiler, and programs for a GPU are all compiled at the
    same time, in other processes. What is compiled already runs uncompiled, too: results don't depend on it.

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
    with suppress(OSError), _starting:
        wait = _taking[-1].send(program) if _taking else None
        if wait is None:
            _taking[:] = [_Compilers()]
            wait = _taking[-1].send(program)
        return wait or _nothing
    return _nothing


def _nothing() -> None:
    """Wait for no process."""


def cache_mark(program: bytes) -> Path:
    """Return the file that says, once its caller has created it, that the compiler's cache has a program.

    The compiler itself finds programs only after some seconds of work on them.
    """
    return compiler_cache() / "recurl" / hashlib.sha256(program).hexdigest()


class _Compilers:
    """A process that forks one for each program that it is sent, as its imports take as long as most programs.

    It takes programs until one is waited for, and then ends, as the forked ones do when they are done.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; import {__name__} as own; own.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **compiler_environment()},
            pipesize=2**20,  # so that nothing waits for its imports
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._programs = cast(IO[bytes], self._process.stdin)
        self._said = cast(IO[bytes], self._process.stdout)
        self._sent = 0
        self._left = set[int]()
        self._heard = b""

    def send(self, program: bytes) -> Callable[[], None] | None:
        """Send a program; return a function that waits until it is compiled, or None if no more programs are taken."""
        if self._programs.closed:  # another thread may be waiting
            return None
        with self._lock:
            try:
                self._sent += 1
                number = self._sent
                pickle.dump((number, _own_modules(), program), self._programs)
                self._programs.flush()
            except (OSError, ValueError):  # it has died, or takes no more
                self._close()
                return None
            self._left.add(number)
            return lambda: self._wait(number)

    def _wait(self, number: int) -> None:
        with self._lock:
            self._close()
            if number not in self._left:
                return
            with DefaultSelector() as selector:
                selector.register(self._said, EVENT_READ)
                while number in self._left and selector.select(_PATIENCE):
                    found = os.read(self._said.fileno(), 4096)
                    if not found:  # all have ended
                        self._left.clear()
                    *lines, self._heard = (self._heard + found).split(b"\n")
                    self._left.difference_update(map(int, lines))
            self._left.discard(number)
            self._close()

    def _close(self) -> None:
        """Take no more programs. If none is left, end the process."""
        with suppress(OSError):
            self._programs.close()
        if not self._left:
            self._said.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
            self._process.kill()  # unless it has ended
            self._process.wait()


_starting = threading.Lock()
_taking: list[_Compilers] = []  # the process that takes programs, if any


def serve() -> None:
    """Compile the programs that come on standard input, each in a process of its own, and say which ones are done."""
    done = os.dup(1)
    os.dup2(2, 1)  # compilers may print
    with suppress(EOFError):
        while True:
            number, modules, program = pickle.load(sys.stdin.buffer)
            for name in modules:
                with suppress(Exception):
                    importlib.import_module(name)
            if not os.fork():
                try:
                    start_compilers()
                    compile_packed(program)
                finally:
                    with suppress(OSError):  # nobody waits any more
                        os.write(done, b"%d\n" % number)
                    os._exit(0)


def _own_modules() -> list[str]:
    """Return the modules of recurl that were imported, some of which define operators of programs."""
    own = f"{__name__.partition('.')[0]}."
    return [name for name in list(sys.modules) if name.startswith(own)]  # other threads may import
