"""Train PPO with Ray actors, with and without kills; appends to results/soak_learning.csv.

Actors are killed at random times, between two updates. Usage::

    python benchmarks/soak_learning.py                       # two seeds, a quarter of an hour
    python benchmarks/soak_learning.py --kills 2 --seeds 0 --dry
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import ray
import torch
from rich.console import Console

from recurl.collectors import RayCollector
from recurl.trainers import PPOConfig, RunFolder, Trainer
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "soak_learning.csv"
ACTORS, ENVS, STEPS, UPDATES = 2, 16, 32, 120


class Killer:
    """Kills a random actor after some of the updates."""

    def __init__(self, kills: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._when = set(self._draw.sample(range(5, UPDATES - 5), kills))

    def on_start(self, trainer: Trainer) -> None:
        self._collector = cast(RayCollector, trainer.algorithm.collector)

    def on_update(self, row: Any) -> None:
        if row["update"] in self._when:
            os.kill(self._draw.choice([process for process in self._collector.processes if process]), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Collector actor")
    for seed in options.seeds:
        for kills in (0, options.kills):
            row = {
                "date": datetime.now(UTC).date().isoformat(),
                "commit": commit(),
                "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "ray": ray.__version__,
                "kills": kills,
                "seed": seed,
                **learned(kills, seed),
            }
            print(row, flush=True)
            if not options.dry:
                append(RESULTS, row)


def learned(kills: int, seed: int) -> dict[str, Any]:
    """Train, and return the results."""
    config = PPOConfig(
        env="recurl/RepeatPrevious-v0",
        env_kwargs=("k=1",),
        hidden_size=32,
        num_envs=ENVS,
        rollout_steps=STEPS,
        collectors=f"ray:{ACTORS}",
        total_steps=ENVS * STEPS * UPDATES,
        learning_rate=1e-3,
        seed=seed,
        logger="none",
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.create(config)
        trainer = Trainer(config, folder, console=Console(quiet=True), callbacks=[Killer(kills, seed)])
        outcome = trainer.run()
        collector = cast(RayCollector, trainer.algorithm.collector)
        found = {"replaced": len(collector.replacements), "frames_lost": collector.lost_frames}
        trainer.close()
    steps = {"env_steps": outcome.env_steps, "return_mean": round(cast(float, outcome.return_mean), 3)}
    return {**found, **steps, "seconds": round(time.monotonic() - begin)}


if __name__ == "__main__":
    main()
