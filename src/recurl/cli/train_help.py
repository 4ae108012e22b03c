"""Help of ``recurl train``, which imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from recurl.cli.arguments import parse_subcommand
from recurl.cli.help import HELP, HELP_ALL
from recurl.cli.place import DESCRIPTION, with_place
from recurl.trainers.algorithms.configs import CONFIGS


def show_train_help(arguments: Sequence[str]) -> None:
    """Print what ``recurl train`` prints for these arguments if they ask for help on the built-in algorithms, and exit.

    Returns where options of a file, or an algorithm of the user's, have to be imported to know what to print.

    Raises:
        SystemExit: the help has been printed.
    """
    asked = not {*HELP, HELP_ALL}.isdisjoint(arguments)
    if asked and arguments[0] in (*HELP, HELP_ALL, *CONFIGS) and not any(map(_names_a_file, arguments)):
        kinds = {name: with_place(config) for name, config in CONFIGS.items()}
        parse_subcommand(kinds, arguments, prog="recurl train", what="algorithm", description=DESCRIPTION)


def _names_a_file(argument: str) -> bool:
    return argument.partition("=")[0] in ("--preset", "--config")
