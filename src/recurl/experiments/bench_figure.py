"""Figure of ``recurl bench rnn``: one row of points per case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recurl.diagnostics import RNNCase, RNNTime


def figure(cases: Sequence[RNNCase], results: Sequence[RNNTime]) -> Figure:
    """Return a figure with one row per case and one point per backend."""
    drawn = Figure(figsize=(9, 1.8 + 0.8 * len(cases)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    for name in sorted({result.backend for result in results if result.times_ms}):
        measured = [result for result in results if result.backend == name and result.times_ms]
        places = [cases.index(result.case) for result in measured]
        axes.plot([result.median_ms for result in measured], places, "o", markersize=9, label=name)
        for place, result in zip(places, measured, strict=True):
            text = f"{result.median_ms:.3g}"
            axes.annotate(text, (result.median_ms, place), (0, 8), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(cases)), [str(case) for case in cases])
    axes.set(xlabel="milliseconds, forward and backward (median): lower is better", xscale="log")
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.margins(x=0.1)
    _label_times(axes)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        drawn.legend(loc="outside upper center", ncols=6)
    return drawn


def _label_times(axes: Axes) -> None:
    """Label ticks as densely as space permits."""
    low, high = axes.get_xlim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _STEPS:
        ticks = [tick for tick in (step * 10.0**power for power in powers for step in steps) if low <= tick <= high]
        gaps = [math.log10(after / before) for before, after in pairwise(ticks)]
        if min(gaps, default=0.0) >= math.log10(high / low) * _ROOM:
            break
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


_ROOM = 0.1
"""Space for a label, as a fraction of the axis."""
_STEPS: tuple[Sequence[float], ...] = (
    *([step / part for step in range(part, 10 * part)] for part in (100, 50, 20, 10, 5, 2, 1)),
    (1, 1.5, 2, 3, 4, 5, 6, 8),
    (1, 2, 3, 5),
    (1, 2, 5),
    (1, 3),
    (1,),
)
"""Ticks within a decade, densest first."""
