"""Context managers for the mode of recurrent modules and the exploration of stochastic policies.

The recurrent mode is local to the thread, and to the task inside asyncio. Threads keep it in a ``threading.local``:
``torch.compile`` can read and guard on an attribute of such an object, even if it compiles only a part of the code
inside a ``with set_recurrent_mode(...)`` block. The tasks of one thread keep it in a ``ContextVar``, which
``torch.compile`` can't trace: a compiled module that is called from several concurrent tasks sees the thread's mode.

TorchRL has a context manager of the same name, which its losses use. If the two disagreed in a program that uses both
libraries, a recurrent module would silently read a batch of sequences as single steps. Therefore, once the program has
imported TorchRL, the blocks of either library apply to the modules of both, and the innermost block takes effect
(TorchRL's ``set_recurrent_mode(None)`` leaves recurl's mode unchanged). recurl itself never imports TorchRL. In
compiled code recurl's blocks take precedence over TorchRL's, whose mode is shared by all threads there.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type  # in tensordict.nn only since 0.15

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.python_compat import running_loop
from recurl.core.torch_compat import is_compiling

__all__ = [
    "ExplorationType",
    "exploration_type",
    "recurrent_mode",
    "set_exploration_type",
    "set_recurrent_mode",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_NAMES = {"recurrent": True, "sequential": False}
_TORCHRL = "torchrl.modules"


class _Block(NamedTuple):
    mode: bool | None
    torchrl: Any = None  # TorchRL's block, entered together with this one


_Stack = tuple[_Block, ...]
_OUTSIDE: _Stack = (_Block(None),)
_task_stack: ContextVar[_Stack] = ContextVar("recurl_recurrent_modes", default=_OUTSIDE)


class _Modes:
    def __init__(self) -> None:
        self.stack = [*_OUTSIDE]


class _Thread(threading.local):
    # torch.compile drops assignments to attributes of a threading.local, hence the extra level of nesting; after a scan
    # (torch 2.13) also those to attributes of other objects, hence a list that is changed in place.
    def __init__(self) -> None:
        self.modes = _Modes()


_thread = _Thread()


def recurrent_mode() -> bool | None:
    """Return the active override: True (recurrent), False (sequential) or None (modules use their default)."""
    mode = _current()[-1].mode
    if mode is not None and is_compiling():
        return mode
    torchrl = sys.modules.get(_TORCHRL)
    theirs = None if torchrl is None else torchrl.recurrent_mode()
    return mode if theirs is None else theirs


def _enter_torchrl(mode: bool | None) -> Any:
    """Enter and return a TorchRL block if TorchRL's mode would otherwise differ."""
    torchrl = None if is_compiling() else sys.modules.get(_TORCHRL)
    if torchrl is None:
        return None
    theirs = torchrl.recurrent_mode()
    if theirs == mode or (theirs is None and mode is False):
        return None
    block = torchrl.set_recurrent_mode(mode)
    block.__enter__()
    return block


def _current() -> _Stack:
    if is_compiling() or running_loop() is None:
        return tuple(_thread.modes.stack)
    return _task_stack.get()


def _store(stack: _Stack) -> None:
    _thread.modes.stack[:] = stack
    if not is_compiling():
        _task_stack.set(stack)


class set_recurrent_mode:
    """Set the mode of every recurrent module inside a ``with`` block or a decorated function.

    In sequential mode a recurrent module runs one step; in recurrent mode it runs whole sequences along the last
    batch dimension. The mode is local to the thread (and to the asyncio task). Nested blocks restore the previous mode,
    even after an exception, and one instance may be entered repeatedly.

    Args:
        mode: ``True`` or ``"recurrent"``, ``False`` or ``"sequential"`` (case-insensitive), or ``None`` for
            "no override": modules use their ``default_recurrent_mode``.

    Raises:
        ArgumentError: ``mode`` is a string other than the two names.
        ArgumentTypeError: ``mode`` is neither a bool, a string nor None.

    Example:
        >>> from recurl.modules import recurrent_mode
        >>> with set_recurrent_mode("recurrent"):
        ...     print(recurrent_mode())
        True
        >>> print(recurrent_mode())
        None
    """

    def __init__(self, mode: bool | str | None = True) -> None:
        self.mode = _parse(mode)

    def __enter__(self) -> None:
        _store((*_current(), _Block(self.mode, _enter_torchrl(self.mode))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = _current()
        if stack[-1].torchrl is not None:
            stack[-1].torchrl.__exit__(kind, error, trace)
        _store(stack[:-1])

    def __call__(self, function: _F) -> _F:
        """Decorate a function, or a generator function, so that its body runs in this mode."""
        if inspect.isgeneratorfunction(function):
            return cast(_F, self._wrap_generator(function))

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with set_recurrent_mode(self.mode):
                return function(*args, **kwargs)

        return cast(_F, wrapped)

    def _wrap_generator(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            generator = function(*args, **kwargs)
            resume: Callable[[], Any] = functools.partial(next, generator)
            try:
                while True:
                    try:
                        with set_recurrent_mode(self.mode):
                            value = resume()
                    except StopIteration as stop:
                        return stop.value
                    try:
                        resume = functools.partial(generator.send, (yield value))
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - forwarded to the generator, as in PEP 380
                        resume = functools.partial(generator.throw, error)
            finally:
                generator.close()

        return wrapped


def _parse(mode: object) -> bool | None:
    if mode is None or isinstance(mode, bool):
        return mode
    if isinstance(mode, str):
        if mode.lower() in _NAMES:
            return _NAMES[mode.lower()]
        raise ArgumentError(f"The recurrent mode must be True, False, None, 'recurrent' or 'sequential', got {mode!r}.")
    raise ArgumentTypeError(
        f"The recurrent mode must be a bool, a string or None, got {type(mode).__name__}: {mode!r}."
    )
