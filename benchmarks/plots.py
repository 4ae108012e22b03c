"""Draw the figures of the documentation from results/*.csv into docs/figures: ``python benchmarks/plots.py``."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
COLORS = {"lstm": "#3f51b5", "gru": "#00897b", "none": "#9e9e9e"}
NAMES = {"lstm": "LSTM", "gru": "GRU", "none": "no memory"}
IMPLEMENTATIONS = {
    "cpu": ("recurl, cpu", "#3f51b5"),
    "loop": ("recurl, loop", "#9fa8da"),
    "torchrl-pad": ("torchrl 0.14.1, pad", "#ef6c00"),
    "torch.nn": ("torch.nn (no resets only)", "#bdbdbd"),
}


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a results table."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def learning_curve() -> Figure:
    """Draw masked CartPole with and without memory: mean and range over seeds."""
    curves: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read("learning_curve.csv"):
        curves[row["cell"]][int(row["env_steps"])].append(float(row["return_mean_20"]))
    figure, axes = new_figure()
    for cell, curve in curves.items():
        mean_and_range(axes, curve, 1000, COLORS[cell], NAMES[cell])
    seeds = len(next(iter(curves["lstm"].values())))
    axes.set(
        xlabel="environment steps, thousands",
        ylabel="return, mean of 20 episodes",
        title=f"PPO on masked CartPole (velocities hidden), {seeds} seeds: mean and range",
        ylim=(0, 520),
    )
    axes.legend(frameon=False)
    return figure


def recurrence_on_cpu(cell: str = "lstm", hidden: str = "128", tokens: str = "4096") -> Figure:
    """Draw times of forward and backward of one layer over a batch with resets, and of its peers."""
    times = {
        (row["mean_segment"], row["implementation"]): float(row["median_ms"])
        for row in read("rnn_cpu.csv")
        if (row["cell"], row["H"], row["N"]) == (cell, hidden, tokens) and row["mean_segment"].isdecimal()
    }
    segments = sorted({segment for segment, _ in times}, key=int)
    figure, axes = new_figure()
    width = 0.8 / len(IMPLEMENTATIONS)
    for place, (key, (label, color)) in enumerate(IMPLEMENTATIONS.items()):
        at = [(index, times[segment, key]) for index, segment in enumerate(segments) if (segment, key) in times]
        where = [index + (place - 1.5) * width for index, _ in at]
        bars = axes.bar(where, [time for _, time in at], width, label=label, color=color)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(segments)))
    axes.set_xticklabels(
        ["no resets" if segment == segments[-1] else f"a reset every {segment} steps" for segment in segments]
    )
    axes.set(
        ylabel="milliseconds of CPU time",
        title=f"{cell.upper()}, {hidden} units, {tokens} steps, forward and backward, one thread",
    )
    axes.legend(frameon=False)
    return figure


def training_on_a_gpu() -> Figure:
    """Whole updates of recurrent PPO compared with an all-JAX program, in the newest run of all cases."""
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read("gpu_training.csv"):
        if row["device"] == "NVIDIA H200" and row["precision"] == "high":
            runs[row["commit"]].append(row)
    most = max(map(len, runs.values()))
    rates: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in [run for run in runs.values() if len(run) == most][-1]:
        case = rates[f"{int(row['envs']):,} x {row['steps']}", row["hidden"]]
        case[row["cell"]] = float(row["M_steps_per_s"])
        case["jax"] = float(row["jax_M_steps_per_s"] or case["jax"])
    figure, axes = new_figure()
    for place, key in enumerate(("jax", "lstm", "gru")):
        label, color = {"jax": ("all-JAX, LSTM", "#bdbdbd")}.get(key) or (f"recurl, {NAMES[key]}", COLORS[key])
        at = [(index, case[key]) for index, case in enumerate(rates.values()) if key in case]
        bars = axes.bar([x + (place - 1) * 0.27 for x, _ in at], [y for _, y in at], 0.27, label=label, color=color)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(rates)))
    axes.set_xticklabels([f"{layout}\n{hidden} units" for layout, hidden in rates])
    axes.set(
        xlabel="environments x steps of an update",
        ylabel="million steps per second",
        title="Recurrent PPO on masked CartPole, one H200: whole updates",
    )
    axes.legend(frameon=False)
    return figure


def weak_scaling() -> Figure:
    """Draw the rate relative to one actor or rank over their number, from the newest rows of each."""
    lines: dict[str, dict[int, float]] = defaultdict(lambda: {1: 1.0})
    for row in read("scale_ray.csv"):
        if row["efficiency"]:
            count = int(row["actors"])
            lines[f"actors, {row['what']}"][count] = count * float(row["efficiency"])
    for name, what in (("scale_cpu.csv", "ranks on CPUs"), ("scale_gpu.csv", "ranks on GPUs")):
        for row in read(name) if (RESULTS / name).exists() else ():
            lines[what][int(row["ranks"])] = float(row["ratio"])
    figure, axes = new_figure()
    most = max(max(line) for line in lines.values())
    axes.plot([1, most], [1, most], color="#bdbdbd", linestyle="--", label="ideal")
    for what, line in lines.items():
        counts = sorted(line)
        axes.plot(counts, [line[count] for count in counts], marker="o", markersize=4, label=what)
    axes.set(xlabel="actors or ranks", ylabel="speedup over one", title="Weak scaling: the same work for each")
    axes.legend(frameon=False)
    return figure


def precision() -> Figure:
    """Draw learning curves with products in float32 and in tf32: mean and range over seeds."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in read("precision.csv"):
        curves[row["task"]][row["precision"]][int(row["env_steps"])].append(float(row["return_mean_20"]))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (task, of_task) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for name, color in (("highest", "#3f51b5"), ("high", "#ef6c00")):
            mean_and_range(axes, of_task[name], 1e6, color, name)
        axes.set(title=task, xlabel="million steps")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("return, mean of 20 episodes")
    figure.axes[0].legend(frameon=False)
    return figure


def multi_agent() -> Figure:
    """Draw two tasks of VMAS with critics that see what an agent sees, or the state: mean and range over seeds."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in read("multi_agent.csv"):
        curves[row["task"]][row["critic"]][int(row["env_steps"])].append(float(row["return_mean_20"]))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (task, of_task) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for critic, color in (("IPPO", "#3f51b5"), ("MAPPO", "#ef6c00")):
            mean_and_range(axes, of_task[critic], 1000, color, critic)
        axes.set(title=task, xlabel="steps of single agents, thousands")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("return, mean of 20 episodes")
    figure.axes[0].legend(frameon=False)
    return figure


def learning_at_scale(case: str = "cartpole-32") -> Figure:
    """Draw masked CartPole with 4,096 environments, every seed, with separate trunks and with a shared one."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in read("learning_scale_curves.csv"):
        if row["case"] in (case, f"{case}-shared"):
            point = float(row["env_steps"]) / 1e6, float(row["return_mean_20"])
            curves[row["shared_trunk"], row["seed"]].append(point)
    figure, axes = new_figure()
    styles = {"True": ("#ef6c00", "shared trunk"), "False": ("#3f51b5", "separate trunks (default)")}
    for (shared, seed), points in sorted(curves.items(), reverse=True):
        color, label = styles[shared]
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, label=label if seed == "0" else None)
    axes.set_xlabel("million environment steps")
    axes.set_ylabel("return of 20 training episodes")
    axes.legend(frameon=False, loc="lower right")
    return figure


def chosen_environments() -> Figure:
    """Draw three tasks, every seed, with the number of environments that a run has by default on a GPU, and with 8."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in read("learning_scale_curves.csv"):
        point = float(row["env_steps"]) / 1e6, float(row["return_mean_20"])
        curves[f"{row['case']} {row['seed']}"].append(point)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    tasks = {"cartpole": "masked CartPole", "repeat-previous": "RepeatPrevious", "pendulum": "masked Pendulum"}
    for axes, (task, title) in zip(figure.subplots(1, len(tasks)), tasks.items(), strict=True):
        for ending, color, label in (("", "#3f51b5", "128 (default)"), ("-8", "#ef6c00", "8")):
            of_case = [points for name, points in curves.items() if name.startswith(f"{task}-3M{ending} ")]
            for number, points in enumerate(of_case):
                axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, label=None if number else label)
        axes.set(title=title, xlabel="million steps")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("return of 20 training episodes")
    figure.axes[0].legend(frameon=False, title="environments")
    return figure


def mean_and_range(axes: Any, curve: dict[int, list[float]], unit: float, color: str, label: str) -> None:
    """Draw the returns of several seeds by step: their mean as a line, and a band from the lowest to the highest."""
    steps = sorted(curve)
    shown = [step / unit for step in steps]
    axes.plot(shown, [sum(curve[step]) / len(curve[step]) for step in steps], color=color, label=label)
    low, high = ([choose(curve[step]) for step in steps] for choose in (min, max))
    axes.fill_between(shown, low, high, color=color, alpha=0.2, linewidth=0)


def new_figure() -> tuple[Figure, Any]:
    """Return a figure and its axes, in the shared style."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def main() -> None:
    """Draw all figures, deterministically."""
    rcParams.update({"svg.hashsalt": "recurl", "svg.fonttype": "none", "font.family": "sans-serif"})
    FIGURES.mkdir(exist_ok=True)
    draws = [
        learning_curve,
        recurrence_on_cpu,
        training_on_a_gpu,
        precision,
        multi_agent,
        learning_at_scale,
        chosen_environments,
        *([weak_scaling] if (RESULTS / "scale_ray.csv").exists() else []),
    ]
    for draw in draws:
        FigureCanvasSVG(draw()).print_svg(FIGURES / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
