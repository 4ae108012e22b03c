"""Entry point: picks the command, and turns every foreseeable failure into one line and exit code 2."""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence

from recurl import __version__
from recurl.errors import ArgumentError, MissingDependencyError, RecurlError, RemoteTraceback

_LONGEST = 600  # characters of a message
_EXTRA = ("tyro", "rich")
_ALGORITHMS = ("ppo", "dqn", "r2d2")
_SIMPLE = ("evaluate", "export", "doctor")
_USAGE = f"""\
recurl {__version__}: recurrent reinforcement learning for PyTorch

  recurl train ppo --env ID ...    train a policy; `recurl train ppo --help` lists the options
  recurl train dqn --env ID ...    the same by Q-learning from a replay buffer
  recurl train r2d2 --env ID ...   the same with prioritised slices, burn-in and rescaled values
  recurl train --resume RUN        go on with a run that was stopped
  recurl evaluate RUN              play greedy episodes with a trained policy
  recurl export RUN                write a trained policy as a torch or ONNX file that runs without recurl
  recurl bench rnn                 time every recurrent backend on this machine, on your own shapes
  recurl doctor                    what runs on this machine; with a policy or a run: is its memory wired right?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0, 2 for a mistake in the request, 130 or 143 after Ctrl-C or SIGTERM.

    Example:
        >>> main(["train", "--resume", "no/such/run"])
        2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    try:
        check_text(arguments)
        command, rest = _choose(arguments)
        return command(rest)
    except KeyboardInterrupt:
        print("recurl: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except (RecurlError, OSError, MemoryError, RuntimeError) as error:
        text = complaint(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        if isinstance(error.__cause__, RemoteTraceback):
            print(f"recurl: its traceback is in {_kept(error.__cause__)}", file=sys.stderr)
        return 2


def _kept(trace: RemoteTraceback) -> str:
    """Write a traceback to a file, and return its name."""
    with tempfile.NamedTemporaryFile("w", prefix="recurl-worker-", suffix=".txt", delete=False) as file:
        file.write(str(trace).lstrip())
    return file.name


def complaint(error: Exception) -> str | None:
    """Return the line to say about a failure that was to be expected, or None for any other."""
    if isinstance(error, RecurlError | OSError):
        text = str(error)
    elif _lacks_memory(error):
        text = f"There is not enough memory, ask for less: {error}"
    else:
        return None
    line = " ".join(text.split())
    return "recurl: " + (line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


def _lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed: of torch on a GPU, on the CPU (where it has no class for that), or another's."""
    named = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return named or isinstance(error, MemoryError)


def check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that can't be written anywhere.

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


def _choose(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    name, rest = arguments[0], arguments[1:]
    if name in _SIMPLE:
        return _load(name, f"{name}_command"), rest
    if name == "bench":
        if rest[:1] != ["rnn"]:
            raise ArgumentError(f"There is no benchmark {' '.join(rest[:1])!r}: use recurl bench rnn.")
        return _load("bench", "bench_rnn_command"), rest[1:]
    if name != "train":
        raise ArgumentError(
            f"There is no command {name!r}: use train, evaluate, export, bench or doctor (recurl --help)."
        )
    if rest and rest[0] in _ALGORITHMS:
        return _load("train", f"train_{rest[0]}_command"), rest[1:]
    if rest and not rest[0].startswith("-"):
        raise ArgumentError(f"There is no algorithm {rest[0]!r}: use recurl train {', '.join(_ALGORITHMS)}.")
    return _load("train", "resume_command"), rest


def _load(module: str, command: str) -> Callable[[list[str]], int]:
    """Import a command only when it is asked for: it needs the packages of the extra ``train``."""
    try:
        return getattr(importlib.import_module(f"recurl.cli.{module}"), command)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in _EXTRA:
            raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[train]'") from error
        raise
