"""``recurl bench``: measurements on this machine, with the user's own sizes."""

from __future__ import annotations

from recurl.cli.arguments import parse_subcommand
from recurl.cli.bench_popgym import BenchPopgym, bench_popgym
from recurl.cli.bench_rnn import BenchRNN, bench_rnn

KINDS: dict[str, type[BenchRNN | BenchPopgym]] = {"rnn": BenchRNN, "popgym": BenchPopgym}


def read(arguments: list[str]) -> BenchRNN | BenchPopgym:
    """Parse the arguments."""
    return parse_subcommand(
        KINDS, arguments, prog="recurl bench", what="benchmark", description="Measure this machine."
    )


def run(wanted: BenchRNN | BenchPopgym) -> int:
    """Measure."""
    return bench_popgym(wanted) if isinstance(wanted, BenchPopgym) else bench_rnn(wanted)
