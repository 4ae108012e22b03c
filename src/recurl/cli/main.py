"""Entry point: loads the command and reports expected failures as one line with exit code 2."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Container, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from recurl._version import __version__
from recurl.cli.notices import save_traceback, with_notices
from recurl.cli.output import with_output
from recurl.core.cache import use_compiled_folder
from recurl.core.errors import (
    AlreadyReported,
    ArgumentError,
    CallbackError,
    EnvError,
    ExitError,
    MissingDependencyError,
    RecurlError,
    RemoteTraceback,
    WorkerError,
)
from recurl.core.messages import nearest

_MAX_MESSAGE = 600  # characters
_EXTRA = ("rich", "matplotlib")
COMMANDS = {
    "train": {
        "ALGORITHM --env ID ...": "train a policy; `recurl train --help` lists the algorithms",
        "--resume RUN": "continue a run that was stopped; --total-steps N extends it",
    },
    "distill": {
        "RUN": "train a student that imitates the policy of a run and may see less",
        "--episodes DIR ...": "train a student that imitates recorded episodes (behavioral cloning)",
    },
    "sweep": {"ALGORITHM --seeds N ...": "train with several seeds and every combination of options"},
    "compare": {"RUN...": "compare learning curves and scores of runs, with intervals"},
    "evaluate": {"RUN": "play episodes with a trained policy and print statistics of their returns"},
    "play": {"RUN": "show episodes of a trained policy on screen, or record a video: --video out.mp4"},
    "export": {"RUN": "write a trained policy as a torch or ONNX file that runs without recurl"},
    "bench": {
        "rnn": "time every recurrent backend on this machine for your shapes",
        "popgym": "compare memory cells on the POPGym tasks",
        "memory": "compare memory cells with equal numbers of parameters, in pieces: --resume",
    },
    "cache": {
        "show": "show what was compiled and measured once, and where it is kept",
        "clear": "delete what was compiled",
        "warm ALGORITHM ...": "compile what a run needs, without training",
    },
    "conformance": {"LIBRARY": "check by experiment how a library with recurrent PPO handles hidden states"},
    "doctor": {"": "show what this machine supports; with a policy or a run: check its memory wiring"},
}
"""Arguments and summary of each command, which is a module of this package with the interface :class:`Command`."""


class Command(Protocol):
    """Interface of the module of a command."""

    def read(self, arguments: list[str], /) -> Any:
        """Parse the arguments.

        Raises:
            ArgumentError: the arguments are invalid.
            SystemExit: help was requested and has been printed.
        """
        ...

    def run(self, args: Any, /) -> int:
        """Run the command and return the exit code."""
        ...


def usage() -> str:
    """Return the help text of ``recurl``."""
    rows = [(f"recurl {name} {more}", text) for name, forms in COMMANDS.items() for more, text in forms.items()]
    lines = "".join(f"  {form:<38}{text}\n" for form, text in rows)
    about = f"recurl {__version__}: recurrent reinforcement learning for PyTorch"
    return f"{about}\n\n{lines}\nEach command has --help.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        The exit code: 0 on success; 2 for an invalid request; 128 plus the signal number after Ctrl-C, SIGTERM or
        SIGHUP; 141 if the reader of the output closed the pipe.

    Example:
        >>> main(["train", "--resume", "no/such/run"])
        2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return with_output(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    try:
        with with_notices():
            command, args = _read(arguments)
            return _call(command, args)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("recurl: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        error = _error_of_environment(error) or error
        text = error_line(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        trace = _trace(error)
        if trace is not None:
            print(f"recurl: the traceback is in {save_traceback(trace)}", file=sys.stderr)
        return 2


def _call(command: Command, args: Any) -> int:
    """Run a command, converting ``SystemExit`` raised by third-party code into an error."""
    try:
        return command.run(args)
    except AlreadyReported:
        raise
    except (SystemExit, GeneratorExit) as error:
        raise ExitError.of(error) from error


def _read(arguments: list[str]) -> tuple[Command, Any]:
    """Load a command and parse its arguments; of several torchrun processes only rank 0 reports an error."""
    try:
        check_text(arguments)
        use_compiled_folder()  # before torch is imported, which chooses a folder itself
        if arguments[0] == "train":
            from recurl.cli.train_help import show_train_help  # noqa: PLC0415 - keep tyro out of recurl.cli's imports

            show_train_help(arguments[1:])
        with _imports_are_no_garbage():
            command = load(arguments)
            return command, command.read(arguments[1:])
    except RecurlError:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # set by torchrun
            raise
        raise AlreadyReported(2) from None


@contextmanager
def _imports_are_no_garbage() -> Generator[None]:
    """Don't search what is imported for garbage, in this block or later; that takes a sixth of the time of imports.

    Only in a new process: one that has imported torch before may hold objects that are to be collected.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _trace(error: BaseException) -> str | None:
    """Return the traceback of third-party code that failed in a worker, an environment, or a callback."""
    cause = error.__cause__
    if isinstance(error, CallbackError | EnvError) and cause is not None:
        return _trace(cause) or "".join(traceback.format_exception(cause))
    if isinstance(cause, WorkerError):
        return _trace(cause)
    return str(cause).lstrip() if isinstance(cause, RemoteTraceback) else None


def _error_of_environment(error: Exception) -> EnvError | None:
    if "recurl.envs" not in sys.modules:
        return None
    # Lazy import: the module imports torch.
    from recurl.cli.faults import error_of_environment  # noqa: PLC0415 - see above

    return error_of_environment(error)


def error_line(error: Exception) -> str | None:
    """Return the one-line message of an expected failure, None for any other."""
    if isinstance(error, RecurlError | OSError):
        text = str(error)
    elif _lacks_memory(error):
        text = f"There is not enough memory, reduce the sizes: {error}"
    else:
        return None
    line = " ".join(text.split())
    return "recurl: " + (line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}...")


def _lacks_memory(error: Exception) -> bool:
    """Return whether an allocation failed, including torch's on a GPU or on the CPU (a plain RuntimeError)."""
    named = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return named or isinstance(error, MemoryError)


def check_text(arguments: Sequence[str]) -> None:
    """Check that arguments are valid text.

    Raises:
        ArgumentError: an argument is not UTF-8 or contains a null character.
    """
    for argument in arguments:
        try:
            encoded = argument.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"Arguments must be UTF-8, got {argument!r}: rename the file or object.") from error
        if b"\0" in encoded:
            raise ArgumentError(f"Arguments must not contain null characters, got {argument!r}.")


def _names_modules(command: str, options: Container[str]) -> bool:
    """Return whether a command line may name user modules, or trusts those named by a run."""
    if (command in ("train", "distill", "sweep", "bench") or "warm" in options) and "--resume" not in options:
        return True
    return "--env" in options or ("--trust-run" in options and command != "compare")


def load(arguments: Sequence[str]) -> Command:
    """Import the command named by the first argument.

    The working directory, which may contain the module of an environment, a cell or an algorithm, is appended to
    ``sys.path`` if the other arguments may name modules, or if those named by a run are trusted.

    Raises:
        ArgumentError: the command is unknown.
        MissingDependencyError: a package of the extra ``train`` is not installed.
    """
    name, *words = arguments
    if name not in COMMANDS:
        raise ArgumentError(
            f"There is no command {name!r}: use {', '.join(COMMANDS)} (recurl --help).{nearest(name, COMMANDS)}"
        )
    if "" not in sys.path and _names_modules(name, {word.partition("=")[0] for word in words}):
        sys.path.append("")  # as python -m recurl does
    try:
        room = "experiments" if name == "bench" else "cli"
        return cast(Command, importlib.import_module(f"recurl.{room}.{name}"))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in _EXTRA:
            raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[train]'") from error
        raise
