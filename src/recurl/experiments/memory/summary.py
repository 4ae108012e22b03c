"""Table of the memory benchmark: scores by task and cell, and means over tasks with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from recurl.experiments.memory.suites import SUITES, TUNED_ON, MemoryRun, MemoryTask, Suite
from recurl.experiments.memory.training import MemoryResult
from recurl.experiments.popgym.summary import PUBLISHED
from recurl.trainers.report.references import MEMORYLESS, OPTIMUM, reference_returns
from recurl.trainers.study.statistics import (
    AGGREGATES,
    Array,
    aggregates,
    hierarchical_interval,
    stratified_intervals,
)

SCORES: dict[Suite, str] = {"core": "greedy", "popgym": "best"}
"""Column that is the score of a suite."""
_TITLES: dict[Suite, str] = {
    "core": "Return of 100 greedy episodes, mean over seeds",
    "popgym": "MMER, the maximum mean return of a window of 65,536 training steps, mean over seeds",
}
_MOST_NAMED = 12  # runs without a score


class MemorySummary:
    """Scores of the runs of a grid of tasks, cells and seeds.

    Args:
        suite: the suite, which determines the score.
        tasks: the tasks.
        runs: all runs of the grid.
        rows: results, those of other runs among them.

    Attributes:
        cells: cells of the grid.
        scores: scores of the seeds by task and cell.
        common: scored tasks with results of every cell, over which means are taken.
        missing: names of the runs without a result.
        unscored: names of the runs without a score, as no episode ended in training.
        others: number of results that belong to no run of the grid.
    """

    def __init__(
        self, suite: Suite, tasks: Sequence[MemoryTask], runs: Sequence[MemoryRun], rows: Sequence[MemoryResult]
    ) -> None:
        self._suite: Suite = suite
        self._tasks = {task.name: task for task in tasks}
        self._runs = {run.key: run for run in runs}
        self._rows = [row for row in rows if row.key in self._runs]
        self.others = len(rows) - len(self._rows)
        found = {row.key for row in self._rows}
        self.missing = [run.name for key, run in self._runs.items() if key not in found]
        self.cells = list(dict.fromkeys(run.cell for run in runs))
        self.scores: dict[tuple[str, str], list[float]] = {}
        self.unscored: list[str] = []
        for row in self._rows:
            score = getattr(row, SCORES[suite])
            if math.isnan(score):
                self.unscored.append(row.name)
            else:
                self.scores.setdefault((row.task, row.cell), []).append(score)
        self.common = [
            name
            for name, task in self._tasks.items()
            if task.is_scored and all((name, cell) in self.scores for cell in self.cells)
        ]
        self._references = {
            run.task: reference_returns(run.config.env_name, run.config.env_arguments) for run in runs if not run.seed
        }

    def normalized(self, task: str, cell: str) -> Array:
        """Return scores by which tasks are comparable: 0 for the best memoryless policy and 1 for the optimum.

        Lower and higher ones are clipped, as a policy that runs into a wall for a thousand steps would outweigh all
        other tasks. POPGym's returns are in [-1, 1] by definition and stay as they are.
        """
        values = np.asarray(self.scores[task, cell])
        if self._suite == "popgym":
            return values
        low, high = (self._references[task][name] for name in (MEMORYLESS, OPTIMUM))
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def table(self) -> str:
        """Return the scores as text: one line per task, aggregates over tasks, and what they leave out."""
        core = self._suite == "core"
        rows = [("", *(("no memory", "optimum") if core else ()), *self.cells)]
        for name in self._tasks:
            known = [f"{self._references[name][key]:.4g}" for key in (MEMORYLESS, OPTIMUM)] if core else []
            rows.append((name, *known, *(self._score(name, cell) for cell in self.cells)))
        empty = ("", "") if core else ()
        for title, texts in self._aggregates().items():
            rows.append((title, *empty, *texts))
        rows.append(("parameters, compared with GRU", *empty, *map(self._parameters, self.cells)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([f"{_TITLES[self._suite]}:", *lines, *self._notes()])

    def _score(self, task: str, cell: str) -> str:
        values = self.scores.get((task, cell))
        return "-" if values is None else f"{fmean(values):.3f} ({len(values)})"

    def _aggregates(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        if not self.common:
            return found
        what = f"{len(self.common)} {'task' if len(self.common) == 1 else 'tasks'}" + (
            ", normalized from 0 to 1" if self._suite == "core" else ""
        )
        for cell in self.cells:
            scores = [self.normalized(task, cell) for task in self.common]
            values, (low, high) = aggregates(scores), stratified_intervals(scores)
            for name in ("mean", "IQM"):
                place = AGGREGATES.index(name)
                found.setdefault(f"{name} of {what}", []).append(f"{values[place]:.3f}")
                several = any(len(one) > 1 for one in scores)
                text = f"{low[place]:.3f} to {high[place]:.3f}" if several else "one seed"
                found.setdefault(f"  95% interval of the {name}, over seeds", []).append(text)
                if name == "mean":
                    low_and_high = hierarchical_interval(scores)
                    text = "{:.3f} to {:.3f}".format(*low_and_high) if several or len(scores) > 1 else "one run"
                    found.setdefault("  95% interval of the mean, over tasks and seeds", []).append(text)
        if self._suite == "popgym":
            found |= self._all_tasks()
        return found

    def _all_tasks(self) -> dict[str, list[str]]:
        """Return the means over all tasks, those on which options were tuned among them, and those of the paper."""
        own: list[str] = []
        for cell in self.cells:
            means = [fmean(self.scores[task, cell]) for task in self._tasks if (task, cell) in self.scores]
            own.append(f"{fmean(means):.3f}" if len(means) == len(self._tasks) else "-")
        paper = [f"{PUBLISHED[cell]:.3f}" if cell in PUBLISHED else "-" for cell in self.cells]
        count = f"{len(self._tasks)} of {len(SUITES[self._suite])}"
        title = f"mean of {count} tasks, not comparable with other lines"
        return {title: own, "the paper, its tasks with mazes (unverified)": paper}

    def _parameters(self, cell: str) -> str:
        found = [row.difference for row in self._rows if row.cell == cell]
        if not found:
            return "-"
        low, high = min(found), max(found)
        return f"{low:+.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:+.1%} to {high:+.1%}"

    def _notes(self) -> list[str]:
        notes: list[str] = []
        tuned = [name for name in self._tasks if name in TUNED_ON]
        if tuned:
            notes.append(f"Not scored, as options were tuned on them: {', '.join(tuned)}.")
        left = [name for name, task in self._tasks.items() if task.is_scored and name not in self.common]
        if left and len(left) < len(self._tasks):
            notes.append(f"Not in the means, as a cell has no score: {', '.join(left)}.")
        for what, names in (("Missing", self.missing), ("No episode ended in training", self.unscored)):
            if names:
                more = len(names) - _MOST_NAMED
                shown = ", ".join(names[:_MOST_NAMED]) + (f", and {more:,} more" if more > 0 else "")
                notes.append(f"{what}: {len(names):,} of {len(self._runs):,} runs: {shown}.")
        versions = dict.fromkeys(row.versions for row in self._rows)
        if len(versions) > 1:
            notes.append(f"Of several versions, whose scores may differ: {', '.join(versions)}.")
        if self.others:
            notes.append(f"Left out: {self.others:,} results of other tasks, cells, seeds or settings.")
        return notes
