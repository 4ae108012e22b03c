"""The learning curve of a run, drawn from its metrics."""

from __future__ import annotations

import csv
from pathlib import Path


def plot_learning_curve(metrics: Path, picture: Path, *, title: str) -> None:
    """Draw mean return of the last 20 episodes over environment steps.

    Args:
        metrics: ``metrics.csv`` of a run.
        picture: file to write; its suffix decides the format.
        title: heading.
    """
    # Imported where it is used: it takes a quarter of the time that torch takes.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as said above
    from matplotlib.figure import Figure  # noqa: PLC0415 - as said above

    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([int(row["env_steps"]) for row in rows], [float(row["return_mean_20"]) for row in rows])
    axes.set(xlabel="environment steps", ylabel="return (mean of last 20 episodes)", title=title)
    axes.grid(visible=True, alpha=0.3)
    canvas.print_figure(picture, dpi=120)
