"""``recurl bench``: measurements on this machine, with the user's own sizes."""

from __future__ import annotations

from recurl.cli.arguments import parse_subcommand
from recurl.cli.bench_rnn import BenchRNN, bench_rnn

KINDS = {"rnn": BenchRNN}


def read(arguments: list[str]) -> BenchRNN:
    """Parse the arguments."""
    return parse_subcommand(
        KINDS, arguments, prog="recurl bench", what="benchmark", description="Measure this machine."
    )


def run(wanted: BenchRNN) -> int:
    """Measure."""
    return bench_rnn(wanted)
