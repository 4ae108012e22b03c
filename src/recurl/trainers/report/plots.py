"""Learning curve of a run, drawn from its metrics."""

from __future__ import annotations

import io
from pathlib import Path

from recurl.trainers.files.durable import write_whole
from recurl.trainers.report.metrics import read_metrics


def plot_learning_curve(metrics: Path, picture: Path, *, title: str) -> None:
    """Draw mean return of the last 20 episodes over environment steps.

    Args:
        metrics: ``metrics.csv`` of a run.
        picture: file to write; its suffix decides the format.
        title: heading.

    Raises:
        StorageError: the picture can't be written.
    """
    # Imported where it is used: it takes a quarter of the time that torch takes.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as said above
    from matplotlib.figure import Figure  # noqa: PLC0415 - as said above

    _, rows = read_metrics(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([int(row["env_steps"]) for row in rows], [float(row["return_mean_20"]) for row in rows])
    axes.set(xlabel="environment steps", ylabel="return (mean of last 20 episodes)", title=title)
    axes.grid(visible=True, alpha=0.3)
    drawn = io.BytesIO()
    canvas.print_figure(drawn, dpi=120, format=picture.suffix[1:])
    write_whole(picture, drawn.getvalue())
