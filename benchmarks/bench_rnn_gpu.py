"""Recurrent layers on a GPU: accuracy first, then time beside cuDNN.

Each row is one layer, forward and backward with all weight gradients, float32 storage: milliseconds of GPU time without
host gaps (busy), wall time, and wall time of a captured CUDA graph. Errors are relative (Frobenius), against float64.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recurl.recurrence import BACKENDS, CELLS, Boundaries, LayerCall, LayerWeights, Options, Support

DEVICE = torch.device("cuda")
GATES = {"ieee": 2e-6, "tf32x3": 5e-6, "tf32": 2e-3, "bf16": 1.5e-2}
CASES = [
    *[(cell, 64, 64, 512, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[(cell, 64, 4096, 32, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[(cell, 128, 512, 64, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[(cell, 128, 64, 512, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[("gru", 128, 1, 32768, p) for p in (0.02,)],
    *[(cell, 256, 64, 512, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[(cell, 256, 512, 64, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[(cell, 512, 512, 64, p) for cell in ("gru", "lstm") for p in (0.0, 0.02)],
    *[("lstm", 1024, 512, 64, p) for p in (0.0, 0.02)],
]


def options_of(precision: str, recompute: bool = False) -> Options:
    if precision == "bf16":
        return Options(recompute, "ieee", torch.bfloat16)
    return Options(recompute, precision)


class Layer:
    """One layer on random data: H inputs, H units."""

    def __init__(self, cell: str, hidden: int, rows: int, length: int, reset_rate: float, projection: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.cell, self.hidden = CELLS[cell], hidden
        tokens, width = rows * length, projection or hidden

        def uniform(*shape: int) -> Tensor:
            value = torch.rand(shape, generator=generator, device=DEVICE) * 2 - 1
            return (value / hidden**0.5).requires_grad_()

        gates = self.cell.num_gates * hidden
        projected = uniform(projection, hidden) if projection else None
        self.weights = LayerWeights(
            uniform(gates, hidden), uniform(gates, width), uniform(gates), uniform(gates), projected
        )
        self.x = torch.randn(tokens, hidden, generator=generator, device=DEVICE).requires_grad_()
        sizes = self.weights.state_sizes(self.cell)
        self.states = tuple(torch.randn(tokens, size, generator=generator, device=DEVICE) * 0.5 for size in sizes)
        is_init = torch.rand(rows, length, generator=generator, device=DEVICE) < reset_rate
        self.boundaries = Boundaries.from_is_init(is_init)
        self.grad = torch.randn(tokens, width, generator=generator, device=DEVICE)

    def step(self, backend: str, options: Options, dtype: torch.dtype = torch.float32, stored: bool = False) -> dict:
        """Features and all gradients; with ``stored`` also those of the stored states, in a loss on h and c."""

        def convert(value: Tensor | None) -> Tensor | None:
            return value if value is None or dtype == torch.float32 else value.detach().to(dtype).requires_grad_()

        weights = LayerWeights(*(convert(value) for value in vars(self.weights).values()))
        x, states = convert(self.x), tuple(convert(state) for state in self.states)
        if stored:
            states = tuple(state.detach().requires_grad_() for state in states)
        support = Support(self.cell, DEVICE, dtype, self.hidden, 0, options)
        call = LayerCall(self.cell, weights, x, states, self.boundaries, options)
        features, after = BACKENDS.choose(backend, support).run(call)
        names = {"x": x, **{name: value for name, value in vars(weights).items() if value is not None}}
        names.update({f"state{k}": state for k, state in enumerate(states) if stored})
        outputs, grads = [features], [self.grad.to(dtype)]
        if stored:
            outputs, grads = [features, *after[1:]], [self.grad.to(dtype), *(state.detach() for state in after[1:])]
        found = torch.autograd.grad(outputs, list(names.values()), grads)
        return {"y": features, **dict(zip(names, found, strict=True))}


def check(cell: str, hidden: int, shape: tuple[int, int], precision: str, **more: object) -> bool:
    """Compare with float64; print one line."""
    recompute = bool(more.pop("recompute", False))
    layer = Layer(cell, hidden, *shape, 0.05, **more)
    with torch.no_grad():  # what is stored inside a segment must not be read
        for state in layer.states:
            state[~layer.boundaries.starts] = float("nan")
    exact = layer.step("loop", Options(), torch.float64, stored=True)
    options = options_of(precision, recompute)
    found, again = (layer.step("triton", options, stored=True) for _ in range(2))
    errors = {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    same = all(torch.equal(found[name], again[name]) for name in found)
    bias = ((found["y"].abs().mean() - exact["y"].abs().mean()).abs() / exact["y"].abs().mean()).item()
    passed = errors[worst] <= GATES[precision] and same
    what = f"{cell} {hidden} {shape} {precision} {'recompute ' if recompute else ''}{more or ''}"
    print(f"{'ok  ' if passed else 'FAIL'} {what}: y {errors['y']:.1e}, worst {worst} {errors[worst]:.1e}, "
          f"bias {bias:.0e}, same twice {same}", flush=True)  # fmt: skip
    return passed


def check_all() -> bool:
    results = []
    for cell in ("lstm", "gru"):
        for precision in ("tf32", "bf16", "ieee", "tf32x3"):
            sizes = (64, 128, 256, 512) if precision in ("tf32x3", "bf16") else (20, 64, 100, 128, 200, 256, 512)
            results += [guarded(check, cell, hidden, (37, 29), precision) for hidden in sizes]
        results.append(guarded(check, cell, 64, (7, 301), "tf32", recompute=True))
        results.append(guarded(check, cell, 100, (7, 31), "tf32", recompute=True))
        results.append(guarded(check, cell, 128, (1, 1), "tf32"))
        results.append(guarded(check, cell, 1024, (64, 12), "tf32"))
    for hidden in (64, 300):
        results.append(guarded(check, "lstm", hidden, (9, 31), "tf32", projection=24))
    print(f"{sum(results)} of {len(results)} checks passed", flush=True)
    return all(results)


def guarded(function: Callable[..., bool], *arguments: object, **more: object) -> bool:
    try:
        return function(*arguments, **more)
    except Exception as error:  # noqa: BLE001 - the rest of a short lease must still run
        print("FAIL", *arguments, more, type(error).__name__, str(error)[:300].replace("\n", " "), flush=True)
        return False


def busy(function: Callable[[], object], repeat: int = 5) -> tuple[float, dict[str, float]]:
    """Milliseconds of GPU time per call, and of each recurrence kernel."""
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
        if event.key.endswith("ward_kernel")
    }
    return sum(event.self_device_time_total for event in events) / repeat / 1e3, walks


def wall(function: Callable[[], object], repeat: int = 20) -> float:
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


def graphed(function: Callable[[], object]) -> float:
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


def cudnn(layer: Layer, rows: int) -> Callable[[], object]:
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[layer.cell.name]
    module = kind(layer.hidden, layer.hidden, batch_first=True, device=DEVICE)
    x = layer.x.detach().view(rows, -1, layer.hidden).requires_grad_()
    grad = layer.grad.view_as(x)
    return lambda: torch.autograd.grad(module(x)[0], [x, *module.parameters()], grad)


def time_case(cell: str, hidden: int, rows: int, length: int, rate: float, precisions: list[str]) -> list[dict]:
    layer = Layer(cell, hidden, rows, length, rate)
    problem = {"cell": cell, "H": hidden, "B": rows, "T": length, "resets": rate}
    table = []
    if rate == 0.0:
        total, _ = busy(cudnn(layer, rows))
        table.append({**problem, "what": "cudnn", "busy": total, "wall": wall(cudnn(layer, rows))})
    for precision in precisions:
        step = partial(layer.step, "triton", options_of(precision))
        total, walks = busy(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        row = {**problem, "what": precision, "busy": total, "wall": wall(step), "graph": graphed(step), "MB": peak}
        table.append({**row, "forward": walks.get("forward", 0.0), "backward": walks.get("backward", 0.0)})
    for row in table:
        print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="check,time", help="check, time or both")
    parser.add_argument("--hidden", type=int, nargs="*", help="time these hidden sizes only")
    parser.add_argument("--precision", nargs="*", default=["tf32", "bf16"])
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    passed = check_all() if "check" in arguments.only else True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    table: list[dict] = []
    for case in CASES if "time" in arguments.only else []:
        if not arguments.hidden or case[1] in arguments.hidden:
            table += guarded(time_case, *case, arguments.precision) or []
    if arguments.csv and table:
        names = list(dict.fromkeys(name for row in table for name in row))
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(table)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
