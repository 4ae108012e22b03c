"""Entry point: loads the command, and turns every foreseeable failure into one line and exit code 2."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Container, Sequence
from typing import Any, Protocol, cast

from recurl._version import __version__
from recurl.cli.notices import keep_trace
from recurl.cli.output import with_output
from recurl.errors import (
    ArgumentError,
    CallbackError,
    EnvError,
    ExitError,
    MissingDependencyError,
    RecurlError,
    RemoteTraceback,
    SaidElsewhere,
    WorkerError,
)
from recurl.nearest import nearest

_LONGEST = 600  # characters of a message
_EXTRA = ("rich", "matplotlib")
COMMANDS = {
    "train": {
        "ALGORITHM --env ID ...": "train a policy; `recurl train --help` lists the algorithms",
        "--resume RUN": "continue a run that was stopped; --total-steps N extends it",
    },
    "sweep": {"ALGORITHM --seeds N ...": "train with several seeds and every combination of options"},
    "compare": {"RUN...": "learning curves and scores of runs, with intervals"},
    "evaluate": {"RUN": "play episodes with a trained policy, and print statistics of their returns"},
    "play": {"RUN": "show episodes of a trained policy on the screen, or in a video: --video out.mp4"},
    "export": {"RUN": "write a trained policy as a torch or ONNX file that runs without recurl"},
    "bench": {
        "rnn": "time every recurrent backend on this machine, on your own shapes",
        "popgym": "train memory cells on the tasks of POPGym, all in one table",
    },
    "doctor": {"": "what runs on this machine; with a policy or a run: is its memory wired right?"},
}
"""Arguments and summary of each command, a module of this package that is a :class:`Command`."""


class Command(Protocol):
    """A module that reads the arguments of a command, and runs it."""

    def read(self, arguments: list[str], /) -> Any:
        """Parse the arguments.

        Raises:
            ArgumentError: they don't fit.
            SystemExit: help was asked for and has been printed.
        """
        ...

    def run(self, wanted: Any, /) -> int:
        """Run the command, and return the exit code."""
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
        argv: arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0; 2 for a mistake in the request; 128 plus the signal's number after Ctrl-C, SIGTERM or SIGHUP,
        and when nobody reads the output any more (141).

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
        command, wanted = _read(arguments)
        return _call(command, wanted)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("recurl: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        error = _error_of_environment(error) or error
        text = complaint(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        trace = _trace(error)
        if trace is not None:
            print(f"recurl: its traceback is in {keep_trace(trace)}", file=sys.stderr)
        return 2


def _call(command: Command, wanted: Any) -> int:
    """Run a command; code of others that it calls doesn't end the program."""
    try:
        return command.run(wanted)
    except SaidElsewhere:
        raise
    except (SystemExit, GeneratorExit) as error:
        raise ExitError.of(error) from error


def _read(arguments: list[str]) -> tuple[Command, Any]:
    """Load a command and read its arguments; of several processes with the same mistake in them, one says so."""
    try:
        check_text(arguments)
        if arguments[0] == "train":
            from recurl.cli.train_help import show_train_help  # noqa: PLC0415 - recurl.cli itself imports no tyro

            show_train_help(arguments[1:])
        command = load(arguments)
        return command, command.read(arguments[1:])
    except RecurlError:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes that torchrun starts
            raise
        raise SaidElsewhere(2) from None


def _trace(error: BaseException) -> str | None:
    """Return the traceback of somebody else's code that failed: in a worker, in an environment, or in a callback."""
    cause = error.__cause__
    if isinstance(error, CallbackError | EnvError) and cause is not None:
        return _trace(cause) or "".join(traceback.format_exception(cause))
    if isinstance(cause, WorkerError):
        return _trace(cause)
    return str(cause).lstrip() if isinstance(cause, RemoteTraceback) else None


def _error_of_environment(error: Exception) -> EnvError | None:
    if "recurl.envs" not in sys.modules:
        return None
    # Imported where it is used: it imports torch.
    from recurl.cli.faults import error_of_environment  # noqa: PLC0415 - as said above

    return error_of_environment(error)


def complaint(error: Exception) -> str | None:
    """Return the message of a foreseeable failure, None for any other."""
    if isinstance(error, RecurlError | OSError):
        text = str(error)
    elif _lacks_memory(error):
        text = f"There is not enough memory, ask for less: {error}"
    else:
        return None
    line = " ".join(text.split())
    return "recurl: " + (line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


def _lacks_memory(error: Exception) -> bool:
    """Return whether an allocation failed: torch's on a GPU or on the CPU (a plain RuntimeError), or another."""
    named = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return named or isinstance(error, MemoryError)


def check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that are no text.

    Raises:
        ArgumentError: one is not UTF-8, or has a null character.
    """
    for argument in arguments:
        try:
            encoded = argument.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"Arguments must be UTF-8, got {argument!r}: rename what it stands for.") from error
        if b"\0" in encoded:
            raise ArgumentError(f"Arguments must not have null characters, got {argument!r}.")


def _names_modules(command: str, options: Container[str]) -> bool:
    """Return whether a command line may name modules of the user, or trusts those that a run names."""
    if command in ("train", "sweep", "bench") and "--resume" not in options:
        return True
    return "--env" in options or ("--trust-run" in options and command != "compare")


def load(arguments: Sequence[str]) -> Command:
    """Import the command that the first argument names.

    The working directory is put on the path where the other arguments may name modules, or where those that a run
    names are trusted: an environment, a cell, an algorithm may lie there.

    Raises:
        ArgumentError: there is no such command.
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
        return cast(Command, importlib.import_module(f"recurl.cli.{name}"))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in _EXTRA:
            raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[train]'") from error
        raise
