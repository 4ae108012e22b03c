"""The callbacks of a run: named, checked, and called in order."""

from __future__ import annotations

from collections.abc import Callable

from recurl.errors import ArgumentError, ArgumentTypeError, CallbackError, StorageError
from recurl.importing import load_object
from recurl.nearest import nearest
from recurl.seeding import preserved_rng
from recurl.trainers.run.outcome import Outcome

HOOKS = ("on_start", "on_batch", "on_update", "on_evaluation", "on_checkpoint", "on_end")


class Callbacks:
    """Calls the callbacks of a run in order.

    Attributes:
        error: of the first callback that failed, or None. Until the end this one is not called any more.
    """

    def __init__(self) -> None:
        self._members: list[object] = []
        self._failed: list[object] = []
        self.error: CallbackError | None = None

    def add(self, callback: object) -> None:
        """Add a callback."""
        self._members.append(callback)

    def call(self, hook: str, *arguments: object) -> None:
        """Call a method of all callbacks that have it.

        Raises:
            StorageError: a file of the run can't be written.
        """
        found = [(member, getattr(member, hook, None)) for member in self._members if member not in self._failed]
        hooks: list[tuple[object, Callable[..., object]]] = [(member, method) for member, method in found if method]
        if not hooks:
            return
        with preserved_rng():
            for member, method in hooks:
                try:
                    method(*arguments)
                except StorageError:
                    raise
                except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - a callback is somebody else's code
                    self._note(member, hook, error)

    def end(self, outcome: Outcome) -> None:
        """Call ``on_end`` of all callbacks, those that failed too.

        Raises:
            StorageError: a file of the run can't be written.
        """
        self._failed.clear()
        self.call("on_end", outcome)

    def _note(self, member: object, hook: str, error: BaseException) -> None:
        self._failed.append(member)
        if self.error is None:
            said = " ".join(str(error).split())
            self.error = CallbackError(
                f"The callback {type(member).__name__} raised {type(error).__name__} in {hook}{said and f': {said}'}. "
                "The run was ended."
            )
            self.error.__cause__ = error


def check_callback(callback: object) -> object:
    """Return an object that has at least one of the methods of a callback.

    Raises:
        ArgumentTypeError: it has none, or one with nearly such a name, which would never be called.

    Example:
        >>> check_callback(3)
        Traceback (most recent call last):
            ...
        recurl.errors.ArgumentTypeError: A callback must have one of the methods on_start, on_batch, ... got int.
    """
    if isinstance(callback, type):
        raise ArgumentTypeError(f"A callback must be an object, got the class {callback.__name__}: call it.")
    others = [name for name in dir(callback) if name.startswith("on") and name not in HOOKS]
    misspelt, near = next(((name, text) for name in others if (text := nearest(name, HOOKS))), ("", ""))
    kind = type(callback).__name__
    if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
        raise ArgumentTypeError(f"A callback must have one of the methods {', '.join(HOOKS)}, got {kind}.{near}")
    if near:
        raise ArgumentTypeError(f"The method {misspelt} of the callback {kind} would never be called.{near}")
    return callback


def load_callback(text: str) -> object:
    """Return a callback of a class that ``module:Class`` names.

    Raises:
        ArgumentError: there is none, it can't be made, or it has no method of a callback.
        MissingDependencyError: its module is not installed.
    """
    found = load_object("--callback", text, "Class")
    try:
        return check_callback(found() if isinstance(found, type) else found)
    except ArgumentTypeError as error:
        raise ArgumentError(f"--callback {text}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"--callback {text} can't be made, {type(error).__name__}: {error}") from error
