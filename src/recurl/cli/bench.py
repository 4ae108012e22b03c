"""``recurl bench``: measurements on this machine, with the user's own sizes."""

from __future__ import annotations

from recurl.cli.arguments import parse_subcommand
from recurl.cli.bench_popgym import BenchPopgym, bench_popgym
from recurl.cli.bench_rnn import BenchRNN, bench_rnn
from recurl.cli.bench_train import BenchTrain, bench_train, read_bench_train

Wanted = BenchRNN | BenchPopgym | BenchTrain
KINDS: dict[str, type[Wanted]] = {"rnn": BenchRNN, "popgym": BenchPopgym, "train": BenchTrain}


def read(arguments: list[str]) -> Wanted:
    """Parse the arguments."""
    if arguments[:1] == ["train"]:
        return read_bench_train(arguments[1:])
    return parse_subcommand(
        KINDS, arguments, prog="recurl bench", what="benchmark", description="Measure this machine."
    )


def run(wanted: Wanted) -> int:
    """Measure."""
    if isinstance(wanted, BenchTrain):
        return bench_train(wanted)
    return bench_popgym(wanted) if isinstance(wanted, BenchPopgym) else bench_rnn(wanted)
