"""The errors recurl raises: each also derives from the builtin that a user would catch.

A message says what must hold, what came (names, shapes, dtypes), and what to do.
"""


class RecurlError(Exception):
    """Base of every error that recurl raises on purpose."""


class ArgumentError(RecurlError, ValueError):
    """An argument has the right type but a value that can't be used."""


class ArgumentTypeError(RecurlError, TypeError):
    """An argument has a type that can't be used, or is missing."""


class MissingArgumentError(ArgumentError, ArgumentTypeError):
    """An argument that is needed was not given."""


class MissingKeyError(RecurlError, KeyError):
    """A TensorDict or spec lacks an entry that is needed."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which hides line breaks and quotes.
        return str(self.args[0]) if self.args else ""


class MissingNameError(RecurlError, ImportError):
    """A package lacks a name that another library has."""


class UsageError(RecurlError, RuntimeError):
    """A call is not possible in the present state of an object."""


class WiringError(UsageError):
    """Environment and policy don't fit together: a hidden state would be lost or leak."""


class WorkerError(RecurlError, RuntimeError):
    """A worker process raised an error, died, or hangs."""


class RemoteTraceback(RecurlError):
    """The traceback, as text, of an error in another process: the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n\n{super().__str__().strip()}\n"


class UnsupportedError(RecurlError, NotImplementedError):
    """What was asked for is not offered, here or by this backend."""


class MissingDependencyError(RecurlError, ImportError):
    """An optional dependency is not installed."""


class StorageError(RecurlError, OSError):
    """A file or folder can't be written: no space, no permission, no such place."""


class LockedError(UsageError):
    """Another process works in the same place."""


class NonFiniteError(RecurlError, ArithmeticError):
    """A number that must be finite is NaN or infinite."""
