"""Setup time of runs on POPGym in seconds, by phase, on cpu or cuda; appends to results/setup.csv.

The runs are those of ``recurl bench popgym`` (setting fast), one after another in this process, with six updates each.
The first includes the one-time costs of a process; the others show the cost per run of a long-lived benchmark job.
Phases with a dash are parts of the updates. CPU time is that of this process, without compilers in other processes.
``--cold`` uses empty compiler caches; otherwise cached results are used. On the CPU, environments are stepped as on a
GPU, so that their step is compiled too. Usage::

    python benchmarks/bench_setup.py --device cuda --cold --tasks RepeatPreviousEasy HigherLowerEasy CountRecallEasy
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "setup.csv"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
UPDATES = 6


class Phases:
    """Wall and CPU seconds of each phase, by name."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def add(self, name: str, before: tuple[float, float]) -> None:
        """Add the time since ``before``."""
        row = self.rows.setdefault(name, [0.0, 0.0])
        for place, (now, then) in enumerate(zip(self._now(), before, strict=True)):
            row[place] += now - then

    def end(self, name: str) -> None:
        """Add the time since the end of the previous phase."""
        self.add(name, self._last)
        self._last = self._now()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, wrapped to add the time of its calls."""

        def call(*arguments: Any, **named: Any) -> Any:
            before = self._now()
            try:
                return function(*arguments, **named)
            finally:
                self.add(name, before)

        return call

    def on_start(self, trainer: Any) -> None:
        """Begin with the updates."""
        self.end("begin")

    def on_update(self, row: Any) -> None:
        """Add an update."""
        self.end(f"update {row['update']}")


def main() -> None:
    """Measure every requested task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["RepeatPreviousEasy", "HigherLowerEasy"])
    parser.add_argument("--cell", default="gru")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="options of PPO, such as num_envs=16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.cold:
            os.environ.update({name: f"{folder}/{name}" for name in CACHES})
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Train on one task after another."""
    phases = Phases()
    import torch  # noqa: PLC0415 - its import is timed

    phases.end("import torch")
    from rich.console import Console  # noqa: PLC0415 - its import is timed

    from recurl import traced  # noqa: PLC0415 - its import is timed
    from recurl.collectors import captured  # noqa: PLC0415 - its import is timed
    from recurl.experiments.popgym.settings import find_tasks, make_runs, setting  # noqa: PLC0415 - its import is timed
    from recurl.trainers import RunFolder, Trainer  # noqa: PLC0415 - its import is timed
    from recurl.trainers.keyword_arguments import keyword_arguments  # noqa: PLC0415 - its import is timed

    phases.end("import recurl")
    chosen = setting("fast", keyword_arguments("--set", options.set))
    steps = UPDATES * chosen["num_envs"] * chosen["rollout_steps"]
    tasks = [task for name in options.tasks for task in find_tasks([name])]
    traces, compiles, records = traced.traced_graph, traced.inductor_program, captured.record
    for place, run in enumerate(make_runs(tasks, [options.cell], 1, chosen, budget=steps, device=options.device)):
        if place:
            phases = Phases()
        traced.traced_graph = phases.timed("- tracing", traces)
        traced.inductor_program = phases.timed("- compiler", compiles)
        captured.record = phases.timed("- recording of the steps", records)
        config = replace(run.config, compile=True, vectorization="device")
        home = RunFolder(folder / f"run{place}", print)
        with closing(Trainer(config, home, console=Console(quiet=True), callbacks=[phases])) as trainer:
            home.create(config)
            trainer.run()
        phases.end("end")
        gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else None
        about = {"device": gpu or f"CPU, {os.cpu_count()} cores", "torch": torch.__version__, "task": run.task}
        about |= {"cell": run.cell, "place": place + 1, "caches": "empty" if options.cold else "kept"}
        write(about, phases)


def write(about: dict[str, Any], phases: Phases) -> None:
    """Print a table, and append its rows to the results."""
    from results_file import append, commit  # noqa: PLC0415 - it imports recurl

    print(" ".join(str(value) for value in about.values()))
    total = [sum(times) for times in zip(*(t for n, t in phases.rows.items() if not n.startswith("-")), strict=True)]
    for phase, (wall, cpu) in [*phases.rows.items(), ("all", total)]:
        print(f"  {phase:26} {wall:7.2f} s  {cpu:7.2f} s of CPU")
        times = {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}
        append(RESULTS, {**about, "phase": phase, **times, "commit": commit(), "date": time.strftime("%Y-%m-%d")})


if __name__ == "__main__":
    main()
