"""Training on a GPU with the host ahead of the learner, and with sparse recurrent states.

First the weights after some updates are compared bitwise between hosts that wait for each update and hosts that run
ahead, and between batches with all recurrent states and with those at the starts of sequences. Then whole updates are
timed as ``recurl train`` runs them, including checks of batches, episode statistics and log rows, along with torch's
peak memory. Appends to results/ahead.csv. Usage::

    python benchmarks/bench_ahead.py
    python benchmarks/bench_ahead.py --updates 40 --sequence-length 32
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

from recurl import __version__
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.run import updates as made
from recurl.trainers.run.callbacks import Callbacks
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.faults import FaultWatch
from recurl.trainers.run.outcome import Clock
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "ahead.csv"
CASES = [(4096, 64, 128, 4, 4), (1024, 128, 64, 4, 4), (4096, 32, 256, 4, 4), (16384, 32, 128, 2, 8)]
SIZES = ("num_envs", "rollout_steps", "hidden_size", "epochs", "minibatches")
WARM_UP = 5  # updates in which steps are compiled and graphs are captured


class Rows:
    """Rows of metrics, without times."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_update(self, row: dict[str, Any]) -> None:
        self.rows.append({name: value for name, value in row.items() if name not in ("wall_s", "cpu_s", "steps_per_s")})


class Run:
    """Updates of a small trainer.

    Args:
        learner: the learner.
        ahead: whether the host continues while the GPU learns.
    """

    def __init__(self, learner: PPO, *, ahead: bool) -> None:
        made._AHEAD_ON = ("cuda",) if ahead else ()
        self.learner = learner
        stats, callbacks, self.rows = EpisodeStats(learner.config.num_envs), Callbacks(), Rows()
        callbacks.add(self.rows)
        self._updates = made.Updates(self.learner, stats, FaultWatch(self.learner, stats, skip=False), callbacks)
        self._clock, self._made = Clock(), 0

    def make(self, count: int) -> None:
        """Run updates, and wait for them."""
        for _ in range(count):
            self._made += 1
            self._updates.make(self._clock, self._made)
        self._updates.finish()
        if self.learner.config.device == "cuda":
            torch.cuda.synchronize()


def config_of(sizes: tuple[int, ...], **changes: Any) -> PPOConfig:
    options = {"env": "recurl/MaskedCartPole-v1", "device": "cuda", "cuda_graph": True, "compile": True}
    options["shared_trunk"] = True
    return PPOConfig(**{**options, **dict(zip(SIZES, sizes, strict=True)), "total_steps": 10**12, **changes})


def check() -> None:
    """Compare weights and rows of all four kinds of runs, with and without graphs."""
    for programs in (True, False):
        found = []
        for ahead, stored in itertools.product((False, True), ("all", "starts")):
            changes = {"cuda_graph": programs, "compile": programs, "sequence_length": 8, "store_states": stored}
            run = Run(PPO(config_of((64, 32, 64, 2, 4), **changes)), ahead=ahead)
            run.make(8)
            found.append((f"ahead {ahead}, states {stored}", run.learner.agent.state_dict(), run.rows.rows))
            run.learner.close()
        first, weights, rows = found[0]
        for name, others, other_rows in found[1:]:
            wrong = [key for key, value in weights.items() if not torch.equal(value, others[key])]
            if wrong or repr(other_rows) != repr(rows):
                sys.exit(
                    f"With programs {programs}, a run with {name} differs from one with {first} in {wrong or 'rows'}."
                )
    print("weights and rows are the same, ahead or not, with all states and with those at starts")


def measure(path: Path, sizes: tuple[int, ...], length: int | None, count: int, *, ahead: bool, stored: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    learned = length or sizes[1]
    run = Run(PPO(config_of(sizes, sequence_length=learned, store_states=stored)), ahead=ahead)
    run.make(WARM_UP)
    start = time.perf_counter()
    run.make(count)
    seconds = (time.perf_counter() - start) / count
    run.learner.close()
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "recurl": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        **dict(zip(SIZES, sizes, strict=True)),
        "sequence_length": learned,
        "ahead": ahead,
        "states": stored,
        "update_ms": round(seconds * 1e3, 2),
        "M_steps_per_s": round(sizes[0] * sizes[1] / seconds / 1e6, 3),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 3),
    }
    append(path, row)
    print(
        f"{sizes!s:26s} L {learned:4d} ahead {ahead!s:5s} states {stored:6s} {row['update_ms']:8.2f} ms "
        f"{row['M_steps_per_s']:6.2f} M steps/s {row['peak_GB']:6.2f} GB",
        flush=True,
    )


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases")
    parser.add_argument("--sequence-length", type=int, help="whole rows by default")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # as recurl train does on a GPU
    check()
    for index in options.only:
        for ahead, stored in itertools.product((False, True), ("all", "starts")):
            measure(options.csv, CASES[index], options.sequence_length, options.updates, ahead=ahead, stored=stored)


if __name__ == "__main__":
    main()
