"""Loading, checking and calling the callbacks of a run."""

from __future__ import annotations

from collections.abc import Callable

from recurl.core.errors import ArgumentError, ArgumentTypeError, CallbackError, StorageError
from recurl.core.importing import load_object
from recurl.core.messages import nearest
from recurl.core.seeding import preserved_rng
from recurl.trainers.run.outcome import Outcome

HOOKS = ("on_start", "on_batch", "on_update", "on_evaluation", "on_checkpoint", "on_end")


class Callbacks:
    """List of the callbacks of a run, called in order.

    Attributes:
        error: error of the first callback that failed, or None. A failed callback is not called again until ``on_end``.
    """

    def __init__(self) -> None:
        self._members: list[object] = []
        self._failed: list[object] = []
        self.error: CallbackError | None = None

    def add(self, callback: object) -> None:
        """Add a callback."""
        self._members.append(callback)

    def call(self, hook: str, *arguments: object) -> None:
        """Call a method on all callbacks that have it.

        Raises:
            StorageError: if a file of the run can't be written.
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
                except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - callbacks are user code
                    self._note(member, hook, error)

    def end(self, outcome: Outcome) -> None:
        """Call ``on_end`` on all callbacks, including those that failed.

        Raises:
            StorageError: if a file of the run can't be written.
        """
        self._failed.clear()
        self.call("on_end", outcome)

    def _note(self, member: object, hook: str, error: BaseException) -> None:
        self._failed.append(member)
        if self.error is None:
            reason = " ".join(str(error).split())
            self.error = CallbackError(
                f"The callback {type(member).__name__} raised {type(error).__name__} in {hook}"
                f"{reason and f': {reason}'}. The run was ended."
            )
            self.error.__cause__ = error


def check_callback(callback: object) -> object:
    """Check that an object has at least one callback method, and return it.

    Raises:
        ArgumentTypeError: if it has none, or has a method with a misspelled name, which would never be called.

    Example:
        >>> check_callback(3)
        Traceback (most recent call last):
            ...
        recurl.core.errors.ArgumentTypeError: A callback must have one of the methods on_start, on_batch, ... got int.
    """
    if isinstance(callback, type):
        raise ArgumentTypeError(f"A callback must be an object, got the class {callback.__name__}: call it.")
    others = [name for name in dir(callback) if name.startswith("on") and name not in HOOKS]
    misspelled, near = next(((name, text) for name in others if (text := nearest(name, HOOKS))), ("", ""))
    kind = type(callback).__name__
    if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
        raise ArgumentTypeError(f"A callback must have one of the methods {', '.join(HOOKS)}, got {kind}.{near}")
    if near:
        raise ArgumentTypeError(f"The method {misspelled} of the callback {kind} would never be called.{near}")
    return callback


def load_callback(text: str) -> object:
    """Create a callback from the name of its class, ``module:Class``.

    Raises:
        ArgumentError: if the class doesn't exist, can't be instantiated, or has no callback method.
        MissingDependencyError: if its module is not installed.
    """
    found = load_object("--callback", text, "Class")
    try:
        return check_callback(found() if isinstance(found, type) else found)
    except ArgumentTypeError as error:
        raise ArgumentError(f"--callback {text}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"--callback {text} can't be created, {type(error).__name__}: {error}") from error
