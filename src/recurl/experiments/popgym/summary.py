"""Table and figure of POPGym results."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from recurl.envs.tasks.popgym import POPGYM_TASKS
from recurl.experiments.popgym.results import Result
from recurl.experiments.popgym.settings import family_of
from recurl.trainers.config import NO_CELL
from recurl.trainers.files.durable import write_atomic
from recurl.trainers.report.figure import COLORS
from recurl.trainers.run.evaluate import bootstrap_interval

PUBLISHED = {"gru": 0.349, "lstm": 0.255, NO_CELL: 0.067}
"""Mean scores of the paper over all its tasks, including mazes; quoted, not verified against the paper.

If at all, compare them with means over all of :data:`~recurl.envs.tasks.popgym.POPGYM_TASKS`.
"""


class Summary:
    """Scores per task and cell, averaged over seeds.

    Args:
        rows: the results.

    Attributes:
        tasks: tasks with a result, in table order.
        cells: cells with a result, in order of appearance.
        common: tasks with a score for every cell; means are over these.
    """

    def __init__(self, rows: Sequence[Result]) -> None:
        self._scores: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            self._scores.setdefault((row.task, row.cell), []).append(row.mmer)
        self.cells = list(dict.fromkeys(row.cell for row in rows))
        self.tasks = [task for task in POPGYM_TASKS if any((task, cell) in self._scores for cell in self.cells)]
        self.common = [t for t in self.tasks if not any(math.isnan(self.score(t, cell)) for cell in self.cells)]

    def score(self, task: str, cell: str) -> float:
        """Return the mean score over seeds; NaN without a result, or if no episode of a run has ended."""
        return fmean(self._scores.get((task, cell), [math.nan]))

    def mean(self, cell: str) -> tuple[float, float, float]:
        """Return a cell's mean over the common tasks and its 95% bootstrap interval; NaN if there are none."""
        scores = [self.score(task, cell) for task in self.common]
        if not scores:
            return math.nan, math.nan, math.nan
        return (fmean(scores), *bootstrap_interval(scores))

    @property
    def title(self) -> str:
        """Which tasks the mean is over, as text."""
        return f"mean of {len(self.common)} of {len(POPGYM_TASKS)} tasks"

    @property
    def left_out(self) -> list[str]:
        """Tasks over which the mean isn't, or their family if it is over none of it."""
        names = {name: family_of(name) for name in POPGYM_TASKS if name not in self.common}
        partly = {family_of(name) for name in self.common}
        return list(dict.fromkeys(name if family in partly else family for name, family in names.items()))

    @property
    def unbeaten(self) -> list[str]:
        """Common tasks on which no cell scores higher than the network without memory."""
        others = [cell for cell in self.cells if cell != NO_CELL]
        if NO_CELL not in self.cells or not others:
            return []
        return [t for t in self.common if max(self.score(t, cell) for cell in others) <= self.score(t, NO_CELL)]

    def table(self) -> str:
        """Return the scores as text: one line per task, then means, intervals and the means of the paper."""
        means = [self.mean(cell) for cell in self.cells]
        rows = [
            ("MMER", *self.cells),
            *((task, *(_number(self.score(task, cell)) for cell in self.cells)) for task in self.tasks),
            (self.title, *(_number(mean) for mean, _, _ in means)),
            ("95% interval", *(f"{_number(low)} to {_number(high)}" for _, low, high in means)),
            (
                "the paper, its tasks with mazes (unverified)",
                *(_number(PUBLISHED.get(cell, math.nan)) for cell in self.cells),
            ),
            ("runs", *(str(sum(len(v) for (_, c), v in self._scores.items() if c == cell)) for cell in self.cells)),
        ]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        if self.left_out:
            lines.append(f"Not in the mean, as a cell has no score: {', '.join(self.left_out)}")
        if self.unbeaten:
            lines.append(f"No cell beats no memory: {', '.join(self.unbeaten)}")
        return "\n".join(lines)

    def offsets(self) -> list[float]:
        """Return the vertical offset of each cell's points from the center of a task's row, in rows."""
        count = len(self.cells)
        return [0.8 * ((place + 0.5) / count - 0.5) for place in range(count)]

    def draw(self, path: Path) -> None:
        """Write the figure: one row per task with one point per cell, offset vertically.

        Raises:
            StorageError: the picture can't be written.
        """
        # Lazy import: matplotlib takes a quarter of the import time of torch.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - see above
        from matplotlib.figure import Figure  # noqa: PLC0415 - see above

        names = [*self.tasks, self.title]
        height = max(0.22, 0.064 * len(self.cells))  # row height in inches
        figure = Figure(figsize=(8, 1.5 + height * len(names)), layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        axes: Any = figure.add_subplot()
        for row in range(0, len(names), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="0.95", zorder=0)
        for color, cell, offset in zip(COLORS * len(self.cells), self.cells, self.offsets(), strict=False):
            mean, low, high = self.mean(cell)
            places = [row + offset for row in range(len(names))]
            scores = [*(self.score(task, cell) for task in self.tasks), mean]
            axes.plot(scores, places, "o", color=color, label=cell, ms=3.5)
            axes.plot([low, high], places[-1:] * 2, color=color, lw=1)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set(xlabel="MMER: maximum mean return over 65,536 training steps; mean over seeds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="x", alpha=0.3)
        if self.cells:
            figure.legend(loc="outside upper center", ncols=6, frameon=False)
        drawn = io.BytesIO()
        canvas.print_png(drawn, pil_kwargs={"optimize": True})
        write_atomic(path, drawn.getvalue())


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
