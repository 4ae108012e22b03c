"""Exceptions of recurl; each also derives from the builtin exception that a user would expect.

A message states what must hold, what was given (names, shapes, dtypes), and what to do.
"""

from __future__ import annotations

from typing import Self


class RecurlError(Exception):
    """Base class of all errors that recurl raises deliberately."""


class RecurlWarning(UserWarning):
    """A warning of recurl, in one line, which its commands print as a notice."""


class ArgumentError(RecurlError, ValueError):
    """An argument has the right type but an invalid value."""


class ArgumentTypeError(RecurlError, TypeError):
    """An argument has an invalid type, or is missing."""


class MissingArgumentError(ArgumentError, ArgumentTypeError):
    """A required argument was not given."""


class MissingKeyError(RecurlError, KeyError):
    """A TensorDict or spec lacks a required entry."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which hides line breaks and quotes.
        return str(self.args[0]) if self.args else ""


class MissingNameError(RecurlError, ImportError):
    """A TorchRL name that recurl does not provide was imported."""


class MissingAttributeError(RecurlError, AttributeError):
    """A TorchRL name that recurl does not provide was accessed as an attribute of a module."""


class UsageError(RecurlError, RuntimeError):
    """A call is not allowed in the current state of an object."""


class WiringError(UsageError):
    """Environment and policy are incompatible: a hidden state would be lost, or would leak across episodes."""


class WorkerError(RecurlError, RuntimeError):
    """A worker process raised an error, died or hung."""


class EnvError(RecurlError, RuntimeError):
    """An environment raised an exception, set as the cause, while a command was running."""


class ExitError(EnvError):
    """Code called by a run, such as its environment, called ``sys.exit``, which must not end the run."""

    @classmethod
    def of(cls, raised: BaseException) -> Self:
        """Return the error for a ``SystemExit`` or ``GeneratorExit``."""
        call = f"{type(raised).__name__}({', '.join(map(repr, raised.args))})"
        return cls(
            f"The environment, or other code that the run calls, raised {call}, as sys.exit does: it must return, or "
            "raise an Exception."
        )


class UnfitStateError(ArgumentError):
    """The saved state of an environment is incompatible with the environment being restored."""


class RankError(RecurlError, RuntimeError):
    """Another rank of a distributed run failed or is unreachable."""


class RemoteTraceback(RecurlError):
    """Traceback of an error in another process, as text; set as the cause of the error raised in this process."""

    def __str__(self) -> str:
        return f"\n\n{super().__str__().strip()}\n"


class UnsupportedError(RecurlError, NotImplementedError):
    """A feature is not supported by recurl or by the backend in use."""


class MissingDependencyError(RecurlError, ImportError):
    """An optional dependency is not installed."""


class StorageError(RecurlError, OSError):
    """A file or folder can't be written: no space, no permission, or a missing folder."""


class LockedError(UsageError):
    """Another process is using the same folder."""


class CallbackError(RecurlError, RuntimeError):
    """A callback raised an exception, set as the cause; the run was saved and stopped."""


class AlreadyReported(SystemExit):
    """Exit of a process whose error is reported by another process."""


class NonFiniteError(RecurlError, ArithmeticError):
    """A number that must be finite is NaN or infinite."""
