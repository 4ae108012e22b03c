"""Figures of returns over environment steps, in one style."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recurl.trainers.files.durable import write_whole

COLORS = ("#3f51b5", "#ef6c00", "#00897b", "#c2185b", "#5d4037", "#7cb342", "#8e24aa", "#9e9e9e")
FORMATS = ("png", "svg", "pdf")


class Line(NamedTuple):
    """A curve and the band around it."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    points: bool = False
    """Mark every value."""


def draw_returns(
    path: Path, lines: Sequence[Line], *, title: str, ylabel: str, references: Mapping[str, float]
) -> None:
    """Draw curves, their bands and horizontal references.

    Args:
        path: file to write; its suffix decides the format.
        lines: the curves.
        title: heading.
        ylabel: what the curves are.
        references: heights of dashed lines, by name.

    Raises:
        StorageError: the picture can't be written.
    """
    # Imported where it is used: it takes a quarter of the time that torch takes.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as said above
    from matplotlib.figure import Figure  # noqa: PLC0415 - as said above

    figure = Figure(figsize=(7, 4), layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for color, line in zip(COLORS * len(lines), lines, strict=False):
        axes.plot(line.steps, line.values, color=color, label=line.label, marker="o" if line.points else None, ms=4)
        axes.fill_between(line.steps, line.low, line.high, color=color, alpha=0.2, linewidth=0)
    for style, (name, height) in zip(("--", ":"), references.items(), strict=False):
        axes.axhline(height, color="#616161", linestyle=style, linewidth=1, label=name)
    axes.set(xlabel="environment steps", ylabel=ylabel, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.3)
    if lines or references:
        axes.legend(frameon=False)
    drawn = io.BytesIO()
    canvas.print_figure(drawn, dpi=120, format=path.suffix[1:])
    write_whole(path, drawn.getvalue())
