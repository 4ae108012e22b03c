"""Recurrent layers on a GPU vs. cuDNN (torch.nn) and TorchRL: results/rnn_gpu_h200.csv and docs/rnn_gpu.png.

Each row is one layer, forward and backward with all weight gradients, float32 storage: milliseconds of GPU time without
host gaps (busy), wall time, wall time of a captured CUDA graph, and peak memory besides inputs and weights. TorchRL is
timed if it is installed; its Triton kernels only up to H = 128, as their tuning takes minutes above that.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rnn_gpu_layer import DEVICE, Layer, Problem, guarded, options_of

ROOT = Path(__file__).parents[1]
RESULTS, FIGURE = ROOT / "benchmarks/results/rnn_gpu_h200.csv", ROOT / "docs/rnn_gpu.png"
SHAPES = [
    *[(64, 64, 512), (64, 4096, 32), (128, 512, 64), (128, 64, 512), (256, 64, 512), (256, 512, 64)],
    *[(512, 64, 512), (512, 512, 64), (1024, 512, 64)],
]
FLAT = [Problem(cell, 128, 1, 32768, 0.02) for cell in ("gru", "lstm")]
CASES = [*[Problem(cell, *shape, p) for shape in SHAPES for cell in ("gru", "lstm") for p in (0.0, 0.02)], *FLAT]
TUNED_UNITS, SLOWEST = 128, "torchrl-triton"
PRECISIONS = ("tf32", "bf16")
Step = Callable[[], object]


def busy(function: Step, repeat: int = 5) -> tuple[float, dict[str, float]]:
    """Return milliseconds of GPU time per call, and of each pass."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(repeat):
            function()
        torch.cuda.synchronize()
    events = prof.key_averages()
    walks = {
        "forward" if "forward" in event.key else "backward": event.self_device_time_total / repeat / 1e3
        for event in events
        if event.key.endswith(("forward_kernel", "backward_kernel"))
    }
    return sum(event.self_device_time_total for event in events) / repeat / 1e3, walks


def wall(function: Step, repeat: int = 20) -> float:
    """Return the median milliseconds of successive calls."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeat // 2]


def peak(function: Step) -> float:
    """Return the peak memory of a call in MB, minus the memory allocated before it."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def graphed(function: Step) -> float:
    """Return milliseconds of wall time of a captured call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return wall(graph.replay)


def cudnn(layer: Layer, problem: Problem, dtype: torch.dtype) -> Step:
    """Return the step of torch.nn's layer over whole rows, as it does not support resets."""
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[problem.cell]
    module = kind(layer.hidden, layer.hidden, batch_first=True, device=DEVICE, dtype=dtype)
    x = layer.x.detach().view(problem.rows, -1, layer.hidden).to(dtype).requires_grad_()
    grad = layer.grad.view_as(x).to(dtype)
    return lambda: torch.autograd.grad(module(x)[0], [x, *module.parameters()], grad)


def torchrl(layer: Layer, problem: Problem, backend: str) -> Step:
    """Return the step of TorchRL's module with zero states, as it is commonly used."""
    from tensordict import TensorDict  # noqa: PLC0415 - an optional dependency
    from torchrl.modules import GRUModule, LSTMModule  # noqa: PLC0415 - an optional dependency

    kind = {"lstm": LSTMModule, "gru": GRUModule}[problem.cell]
    keys = ["h", "c"] if problem.cell == "lstm" else ["h"]
    module = kind(
        input_size=layer.hidden, hidden_size=layer.hidden, in_keys=["o", *keys], recurrent_backend=backend,
        out_keys=["f", *[("next", key) for key in keys]], default_recurrent_mode=True, device=DEVICE,
        recurrent_matmul_precision="tf32",
    )  # fmt: skip
    shape = (problem.rows, problem.length)
    x, grad = (value.detach().view(*shape, layer.hidden) for value in (layer.x, layer.grad))
    x.requires_grad_()
    zero = torch.zeros(*shape, 1, layer.hidden, device=DEVICE)

    def step() -> object:
        data = TensorDict({"o": x, "is_init": layer.is_init[..., None], **dict.fromkeys(keys, zero)}, shape)
        return torch.autograd.grad(module(data)["f"], [x, *module.parameters()], grad)

    return step


def steps_of(layer: Layer, problem: Problem, names: list[str]) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield the name and a factory of each timed step."""
    for name in names:
        if name in PRECISIONS:
            yield name, partial(partial, layer.step, "triton", options_of(name))
        elif name.startswith("cudnn") and problem.resets == 0.0:
            yield name, partial(cudnn, layer, problem, torch.bfloat16 if name == "cudnn-bf16" else torch.float32)
        elif name.startswith("torchrl") and (name == "torchrl-pad" or problem.hidden <= TUNED_UNITS):
            yield name, partial(torchrl, layer, problem, name.removeprefix("torchrl-"))


def time_one(problem: Problem, name: str, make: Callable[[], Step], own: bool) -> dict[str, Any]:
    """Return one row of the table."""
    step = make()
    total, walks = busy(step, 5 if own else 2)
    row = {"cell": problem.cell, "H": problem.hidden, "B": problem.rows, "T": problem.length}
    row |= {"resets": problem.resets, "what": name, "busy": total, "wall": wall(step, 20 if own else 5)}
    row |= {"graph": graphed(step)} if own else {}
    row |= {"MB": peak(step), **(walks if own else {})}
    print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    return row


def time_all(names: list[str], write: Callable[[list[dict[str, Any]]], None]) -> None:
    """Time ``names`` on every case and write the table after each, sorted by case."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for pass_names in ([name for name in names if name != SLOWEST], [name for name in names if name == SLOWEST]):
        for number, problem in enumerate(CASES):
            layer = Layer(problem)
            for name, make in steps_of(layer, problem, pass_names):
                row = guarded(time_one, problem, name, make, name in PRECISIONS)
                rows += [(number, row)] if isinstance(row, dict) else []
            write([row for _, row in sorted(rows, key=lambda entry: entry[0])])


def compile_part(names: list[str], first: int, step: int) -> None:
    """Run every ``step``-th case once to compile its kernels, for parallel compilation in several processes."""
    for problem in CASES[first::step]:
        layer = Layer(problem)
        for name in names:
            if name in PRECISIONS:
                guarded(layer.step, "triton", options_of(name))


def best_of_peers(table: list[dict[str, str]], row: dict[str, str]) -> tuple[str, float]:
    """Return the fastest other implementation with the same results."""
    same = [other for other in table if all(other[key] == row[key] for key in ("cell", "H", "B", "T", "resets"))]
    peers = [
        (other["what"], float(other["busy"])) for other in same if other["what"] not in ("tf32", "bf16", "cudnn-bf16")
    ]
    return min(peers, key=lambda peer: peer[1])


def summary(table: list[dict[str, str]]) -> Iterator[str]:
    """Yield the rows of tf32 and their best peers, as a Markdown table."""
    yield "| layer, batch | resets | recurl | best peer | ratio |"
    yield "|---|---|---|---|---|"
    for row in table:
        if row["what"] == "tf32":
            name, time = best_of_peers(table, row)
            resets = "1/50" if float(row["resets"]) else "none"
            yield (
                f"| {row['cell'].upper()} {row['H']}, {row['B']}x{row['T']} | {resets} | {float(row['busy']):.2f} "
                f"| {time:.2f} {name} | {time / float(row['busy']):.1f} |"
            )


def draw(table: list[dict[str, str]]) -> None:
    """Draw the GPU time of every implementation, one group of bars per case."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    names = {
        "tf32": "recurl",
        "cudnn": "cuDNN (no resets only)",
        "torchrl-pad": "TorchRL pad",
        "torchrl-triton": "TorchRL Triton",
    }
    colors = ["#3f51b5", "#bdbdbd", "#ef6c00", "#fbc02d"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, cell in zip(figure.subplots(2, 1, sharey=True), ("gru", "lstm"), strict=True):
        rows = [row for row in table if row["cell"] == cell]
        cases = list(dict.fromkeys((row["H"], row["B"], row["T"], row["resets"]) for row in rows))
        for number, (what, label) in enumerate(names.items()):
            times = {
                (row["H"], row["B"], row["T"], row["resets"]): float(row["busy"]) for row in rows if row["what"] == what
            }
            places = [place + 0.2 * number for place, case in enumerate(cases) if case in times]
            heights = [times[case] for case in cases if case in times]
            axes.bar(places, heights, 0.2, label=label, color=colors[number])
        labels = [f"{h}\n{b}x{t}\n{'1/50' if float(p) else 'no'}" for h, b, t, p in cases]
        axes.set_xticks([place + 0.3 for place in range(len(cases))], labels, fontsize=6)
        axes.set_yscale("log")
        axes.set_ylabel(f"{cell.upper()}: ms of GPU time")
        axes.legend(fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    figure.supxlabel("hidden units, batch (rows x steps), resets per step", fontsize=8)
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*PRECISIONS, "cudnn", "cudnn-bf16"]
    names += ["torchrl-pad", SLOWEST] if importlib.util.find_spec("torchrl") else []
    parser.add_argument("--names", nargs="*", default=names, help="what to time")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="what to write into the column 'commit'")
    parser.add_argument("--compile", type=int, nargs=2, help="K N: time nothing, compile for every N-th case from K")
    parser.add_argument("--draw", action="store_true", help="time nothing: table and figure from the CSV")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if arguments.compile:
        compile_part(arguments.names, *arguments.compile)
        return
    if not arguments.draw:
        versions = {"commit": arguments.commit, "device": torch.cuda.get_device_name()}
        for package in ("torch", "triton", "torchrl"):
            versions[package] = importlib.metadata.version(package) if importlib.util.find_spec(package) else ""
        time_all(arguments.names, partial(write_table, arguments.csv, versions))
    with arguments.csv.open(newline="") as file:
        table = list(csv.DictReader(file))
    print(*summary(table), sep="\n")
    if arguments.draw:
        draw(table)


def write_table(path: Path, versions: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """Write the CSV."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *versions])
        writer.writeheader()
        for row in rows:
            rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**rounded, **versions})


if __name__ == "__main__":
    main()
