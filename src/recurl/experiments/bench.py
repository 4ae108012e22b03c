"""``recurl bench``: benchmarks on this machine with custom sizes."""

from __future__ import annotations

from recurl.cli.arguments import parse_subcommand
from recurl.experiments.bench_memory import BenchMemory, bench_memory
from recurl.experiments.bench_popgym import BenchPopgym, bench_popgym
from recurl.experiments.bench_rnn import BenchRNN, bench_rnn
from recurl.experiments.bench_train import BenchTrain, bench_train, read_bench_train

Benchmark = BenchRNN | BenchPopgym | BenchMemory | BenchTrain
KINDS: dict[str, type[Benchmark]] = {
    "rnn": BenchRNN,
    "popgym": BenchPopgym,
    "memory": BenchMemory,
    "train": BenchTrain,
}


def read(arguments: list[str]) -> Benchmark:
    """Parse the arguments."""
    if arguments[:1] == ["train"]:
        return read_bench_train(arguments[1:])
    return parse_subcommand(
        KINDS, arguments, prog="recurl bench", what="benchmark", description="Measure this machine."
    )


def run(args: Benchmark) -> int:
    """Run the benchmark."""
    if isinstance(args, BenchTrain):
        return bench_train(args)
    if isinstance(args, BenchMemory):
        return bench_memory(args)
    return bench_popgym(args) if isinstance(args, BenchPopgym) else bench_rnn(args)
