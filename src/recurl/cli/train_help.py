"""Help of ``recurl train`` without importing torch."""

from __future__ import annotations

from collections.abc import Sequence

from recurl.cli.arguments import parse_subcommand
from recurl.cli.help import HELP, HELP_ALL
from recurl.cli.place import DESCRIPTION, with_run_options
from recurl.trainers.algorithms.configs import CONFIGS


def show_train_help(arguments: Sequence[str]) -> None:
    """Print the help of ``recurl train`` and exit if the arguments request help on the built-in algorithms.

    Returns without printing if the help depends on an options file or a user-defined algorithm, which must be imported.

    Raises:
        SystemExit: the help has been printed.
    """
    requested = not {*HELP, HELP_ALL}.isdisjoint(arguments)
    if requested and arguments[0] in (*HELP, HELP_ALL, *CONFIGS) and not any(map(_names_a_file, arguments)):
        kinds = {name: with_run_options(config) for name, config in CONFIGS.items()}
        parse_subcommand(kinds, arguments, prog="recurl train", what="algorithm", description=DESCRIPTION)


def _names_a_file(argument: str) -> bool:
    return argument.partition("=")[0] in ("--preset", "--config")
