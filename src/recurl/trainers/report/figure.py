"""Figures of returns over environment steps in a uniform style."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recurl.trainers.files.durable import write_atomic

COLORS = ("#3f51b5", "#ef6c00", "#00897b", "#c2185b", "#5d4037", "#7cb342", "#8e24aa", "#9e9e9e")
FORMATS = ("png", "svg", "pdf")
_MAX_TEXT = 200  # characters of a text


class Line(NamedTuple):
    """A curve and the band around it."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    points: bool = False
    """Whether to mark every value."""
    color: int | None = None
    """Index of the color; by default the index of the line in its panel."""


class Panel(NamedTuple):
    """Curves of one task."""

    title: str
    lines: Sequence[Line]
    references: Mapping[str, float]
    """Heights of dashed lines, by name."""


class Bars(NamedTuple):
    """Values of several groups, with intervals."""

    title: str
    labels: Sequence[str]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw_returns(
    path: Path, lines: Sequence[Line], *, title: str, ylabel: str, references: Mapping[str, float]
) -> None:
    """Draw the curves of one task; see :func:`draw_panels`.

    Raises:
        StorageError: the picture can't be written.
    """
    draw_panels(path, [Panel(title, lines, references)], ylabel=ylabel)


def draw_panels(path: Path, panels: Sequence[Panel], *, ylabel: str) -> None:
    """Draw curves with bands and horizontal reference lines, one panel per task.

    Args:
        path: file to write; its suffix determines the format.
        panels: the panels, drawn two per row.
        ylabel: label of the y axis.

    Raises:
        StorageError: the picture can't be written.
    """

    def draw(axes: Any, panel: Panel) -> None:
        lines, references = panel.lines, panel.references
        for place, line in enumerate(lines):
            color = COLORS[(place if line.color is None else line.color) % len(COLORS)]
            marker = "o" if line.points else None
            axes.plot(line.steps, line.values, color=color, label=_short(line.label), marker=marker, ms=4)
            axes.fill_between(line.steps, line.low, line.high, color=color, alpha=0.2, linewidth=0)
        for style, (name, height) in zip(("--", ":"), references.items(), strict=False):
            axes.axhline(height, color="#616161", linestyle=style, linewidth=1, label=name)
        axes.set(xlabel="environment steps", ylabel=ylabel, title=_short(panel.title))
        if lines or references:
            axes.legend(frameon=False)

    _draw(path, panels, draw, height=4)


def draw_intervals(path: Path, panels: Sequence[Bars]) -> None:
    """Draw values of several groups as interval bars, one panel per metric.

    Args:
        path: file to write; its suffix determines the format.
        panels: the panels, drawn two per row, all with the same groups.

    Raises:
        StorageError: the picture can't be written.
    """

    def draw(axes: Any, panel: Bars) -> None:
        for place, (low, value, high) in enumerate(zip(panel.low, panel.values, panel.high, strict=True)):
            axes.barh(place, high - low, left=low, height=0.6, color=COLORS[place % len(COLORS)], alpha=0.5)
            axes.vlines(value, place - 0.3, place + 0.3, color="#212121", linewidth=1.5)
        axes.use_sticky_edges = False
        axes.set(title=_short(panel.title), yticks=range(len(panel.labels)))
        axes.set_yticklabels([_short(label) for label in panel.labels])
        axes.invert_yaxis()

    _draw(path, panels, draw, height=1 + 0.35 * max(len(panel.labels) for panel in panels))


def _draw(path: Path, panels: Sequence[Any], draw: Callable[[Any, Any], None], *, height: float) -> None:
    # Lazy import: matplotlib takes a quarter of the import time of torch.
    from matplotlib import rc_context  # noqa: PLC0415 - see above
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - see above
    from matplotlib.figure import Figure  # noqa: PLC0415 - see above

    drawn, columns = io.BytesIO(), min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with rc_context({"text.parse_math": False}):  # option values may contain dollar signs
        figure = Figure(figsize=(7 * columns, height * rows), layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        for place, panel in enumerate(panels, 1):
            axes: Any = figure.add_subplot(rows, columns, place)
            draw(axes, panel)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(visible=True, alpha=0.3)
        canvas.print_figure(drawn, dpi=120, format=path.suffix[1:])
    write_atomic(path, drawn.getvalue())


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
