"""Checks and timings of windowed attention, forward and backward, and of one step; appends to results/attention.csv.

Checks compare results and gradients with the reference, token by token in float64, at sizes that don't divide tiles,
and test determinism, NaN in one segment and a replayed CUDA graph. Then milliseconds of a replayed graph, beside
torch's compiled flex_attention with a mask of documents and a sliding window, in the same run: without scores of
distances, and with them, which computes the same function and gradients. The time to create its mask is separate.
Nothing is timed if a check fails. Usage::

    python benchmarks/bench_attention.py                   # a GPU
    python benchmarks/bench_attention.py --only checks     # or stream, stored, step
    python benchmarks/bench_attention.py --only sweep      # times of many tiles
    python benchmarks/bench_attention.py --device cpu      # operations of torch
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_linear_recurrence import captured, graphed, milliseconds, outcomes
from recurl.core.relative_error import relative_error
from recurl.recurrence import ONE_STEP, Boundaries
from recurl.recurrence.attention.kernels import AttentionInputs, AttentionKernels
from recurl.recurrence.built_in import ATTENTION
from recurl.recurrence.cells.attention import Attention
from recurl.recurrence.cuda.attention.backend import TritonAttention
from recurl.recurrence.cuda.attention.config import Tiles
from recurl.recurrence.cuda.kernel_step import KERNEL_STEP
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "attention.csv"
HEADS, SIZE, PAST, HIDDEN = 4, 64, 128, 256
SHAPES, EVERY = [(256, 128), (1, 32_768), (8, 4096)], [0, 50]
FORMS = {"bf16": (torch.bfloat16, "ieee"), "tf32": (torch.float32, "tf32"), "ieee": (torch.float32, "ieee")}
LIMITS = {"bf16": 2e-2, "tf32": 5e-3, "ieee": 1e-5}
ROWS = [1, 16, 256, 1024, 4096, 16_384]
STREAMS = [
    (16, 32, 1),
    (16, 64, 1),
    (16, 64, 2),
    (32, 32, 1),
    (32, 32, 2),
    (32, 64, 2),
    (32, 32, 4),
    (32, 64, 4),
    (32, 128, 4),
    (64, 32, 2),
]  # tokens held and walked, and warps
SECONDS = 240  # after which a sweep stops compiling
PARTS = ("checks", "stream", "stored", "step", "sweep")


@dataclass(frozen=True)
class Case:
    """Inputs of attention, and a gradient of its result."""

    inputs: AttentionInputs
    grad: Tensor

    @property
    def needs(self) -> tuple[bool, ...]:
        """All gradients but those of stored windows, which are data."""
        return tuple(one is not None and k != 4 for k, one in enumerate(self.inputs.tensors))

    def forward(self, kernels: AttentionKernels) -> Tensor:
        return kernels.forward(self.inputs, keep=True)[0][0]

    def run(self, kernels: AttentionKernels) -> list[Tensor]:
        after, saved = kernels.forward(self.inputs, keep=True)
        found = kernels.backward(self.inputs, after, saved, (self.grad,), self.needs)
        return [*after, *(one for one in found if one is not None)]

    def exact(self) -> list[Tensor]:
        """Return what :meth:`run` returns, by the reference on the CPU."""
        leaves = [None if one is None else one.double().cpu().requires_grad_() for one in self.inputs.tensors]
        boundaries = Boundaries(self.inputs.boundaries.starts.cpu(), self.inputs.boundaries.batch_shape)
        inputs = replace_boundaries(self.inputs.with_tensors(leaves), boundaries)
        result = ATTENTION.named("reference").forward(inputs, keep=False)[0][0]
        wanted = [one for one, need in zip(leaves, self.needs, strict=True) if need and one is not None]
        return [result.detach(), *torch.autograd.grad(result, wanted, self.grad.double().cpu())]


def replace_boundaries(inputs: AttentionInputs, boundaries: Boundaries) -> AttentionInputs:
    return inputs._replace(boundaries=boundaries)


def case_of(
    form: str,
    shape: tuple[int, int],
    every: int,
    device: str,
    sizes: tuple[int, int, int] = (HEADS, SIZE, PAST),
    hidden: int = 0,
) -> Case:
    """Return a case with a reset every so many steps (0 for none), and stored windows of so many numbers if any."""
    (heads, size, past), (dtype, precision) = sizes, FORMS[form]
    generator, tokens = torch.Generator(device).manual_seed(0), shape[0] * shape[1]

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator).to(dtype)

    step = torch.arange(shape[1], device=device).expand(shape)
    is_init = (step % every == 0) if every else step < 0
    query, key, value, grad = (random(tokens, heads, size) for _ in range(4))
    width = hidden + 1 if hidden else 0
    windows = random(shape[0], past, width)  # where rows start, as in a batch of sequences that continue episodes
    windows[..., -1:] = 1
    maps = tuple(random(heads, size, width) / width**0.5 if hidden else None for _ in range(2))
    boundaries = Boundaries.from_is_init(is_init, batch_shape=shape)
    query, position = query / size**0.5, random(tokens, heads, past + 1) / 4
    return Case(AttentionInputs(query, key, value, position, windows, *maps, boundaries, precision), grad)


def checks(kernels: AttentionKernels, device: str, forms: list[str]) -> Iterator[tuple[str, bool, str]]:
    """Yield the name, the outcome and the numbers of each check."""
    every = [(4, 64, 128), (1, 16, 5), (3, 32, 37), (8, 20, 100), (2, 128, 70)]
    for form, sizes, (shape, reset) in itertools.product(forms, every, [((3, 150), 0), ((1, 333), 50), ((7, 9), 4)]):
        for hidden in (0, {4: 256, 2: 512}.get(sizes[0], 33)):
            case = case_of(form, shape, reset, device, sizes, hidden)
            found, again = case.run(kernels), case.run(kernels)
            worst = max(relative_error(one, other) for one, other in zip(found, case.exact(), strict=True))
            same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
            name = f"{form} {shape} every {reset}, heads, size, window {sizes}, stored {hidden}"
            yield name, worst <= LIMITS[form] and same, f"{worst:.1e}, same bits {same}"
    case = case_of(forms[0], (1, 600), 200, device, hidden=64)
    case = replace(case, inputs=case.inputs._replace(windows=case.inputs.windows.repeat(3, 1, 1)))
    clean, outside = case.run(kernels), torch.ones(600, dtype=torch.bool, device=device)
    outside[200:400] = False
    sick = replace(case, grad=case.grad.clone())
    sick.grad[250] = torch.nan
    case.inputs.value[300] = torch.nan
    for name, one in (("a value", case), ("a gradient", sick)):
        if one is sick:
            case.inputs.value[300] = 1.0
        found = one.run(kernels)
        kept = [torch.allclose(a[outside], b[outside]) for a, b in zip(found[:5], clean[:5], strict=True)]
        yield f"NaN in {name} stays in its segment", all(kept) and not found[3][200:400].isfinite().all(), str(kept)
    if device == "cuda":
        yield "graph", replays(kernels, forms[0]), "a captured call, replayed on other data"
        yield from step_checks(forms)


def replays(kernels: AttentionKernels, form: str) -> bool:
    case, other = (case_of(form, (8, 300), every, "cuda", hidden=64) for every in (50, 70))
    starts = case.inputs.boundaries.starts

    def run() -> list[Tensor]:
        return replace(case, inputs=replace_boundaries(case.inputs, Boundaries(starts, (8, 300)))).run(kernels)

    graph, results = captured(run)
    expected = other.run(kernels)
    for to, value in zip((*case.inputs.tensors, case.grad), (*other.inputs.tensors, other.grad), strict=True):
        assert to is not None
        assert value is not None
        to.copy_(value)
    starts.copy_(other.inputs.boundaries.starts)
    graph.replay()
    return all(torch.equal(one, two) for one, two in zip(results, expected, strict=True))


def step_of(rows: int, form: str, hidden: int = HIDDEN) -> tuple[Attention, Tensor, Tensor]:
    inputs = case_of(form, (rows, 1), 0, "cuda", hidden=hidden).inputs
    query, key, value, position, windows, to_key, to_value = inputs.tensors
    return Attention(query, key, value, position, to_key, to_value), windows[:, 0].clone(), windows


def step_checks(forms: list[str]) -> Iterator[tuple[str, bool, str]]:
    for form, rows in itertools.product([one for one in forms if one != "tf32"], (1, 100)):
        attention, inputs, before = step_of(rows, form)
        found, wanted = (time.attend(attention, inputs, before) for time in (KERNEL_STEP, ONE_STEP))
        error = relative_error(found[0], wanted[0])
        yield f"{form} step of {rows}", error <= LIMITS[form] and torch.equal(found[1], wanted[1]), f"{error:.1e}"


def timed(function: Callable[[], Any], device: str) -> float:
    return graphed(function) if device == "cuda" else milliseconds(function, device, 3)


def stream(kernels: AttentionKernels, device: str, forms: list[str], hidden: int = 0) -> None:
    """Time attention to the stream, and with stored windows if they have a width."""
    name = kernels.name
    print(f"{'form':6}{'rows x length':>14}{'every':>7}{'stored':>8}{'forward':>9}{'both':>9}   ms, {name}")
    for form, shape, every in itertools.product(forms, SHAPES, EVERY):
        case = case_of(form, shape, every, device, hidden=hidden)
        forward, both = timed(lambda c=case: c.forward(kernels), device), timed(lambda c=case: c.run(kernels), device)
        sizes = f"{shape[0]} x {shape[1]}"
        print(f"{form:6}{sizes:>14}{every:7}{hidden:8}{forward:9.4f}{both:9.4f}", flush=True)
        write(name, form, shape, every, hidden, forward, both)
        if not hidden and device == "cuda" and form != "ieee":
            for scores in (False, True):
                flex(form, shape, every, case, (forward, both), scores)


def flex(form: str, shape: tuple[int, int], every: int, case: Case, ours: tuple[float, float], scores: bool) -> None:
    """Time torch's flex_attention on the same stream, as one row of documents, with or without scores of distances."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: PLC0415 - slow to import

    torch.backends.cuda.matmul.allow_tf32 = form == "tf32"
    document, tokens = case.inputs.boundaries.segment_ids, shape[0] * shape[1]
    position = case.inputs.position.detach().clone().requires_grad_()
    name = "flex_attention with scores" if scores else "flex_attention"

    def scored(score: Tensor, _: Any, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + position[query, head, (query - key).clamp(0, PAST)]

    def allowed(_: Any, __: Any, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key) & (query - key <= PAST)

    try:
        create = torch.compile(create_block_mask)
        mask = create(allowed, None, None, tokens, tokens, device="cuda")
        making = milliseconds(lambda: create(allowed, None, None, tokens, tokens, device="cuda"), "cuda")
        compiled = torch.compile(flex_attention)
        leaves = [one.transpose(0, 1)[None].contiguous().requires_grad_() for one in case.inputs[:3]]
        grad = case.grad.transpose(0, 1)[None].contiguous()

        def run() -> Tensor:
            return compiled(*leaves, score_mod=scored if scores else None, block_mask=mask, scale=1.0)

        def forward() -> Tensor:
            with torch.no_grad():
                return run()

        def both() -> Any:
            return torch.autograd.grad(run(), [*leaves, position] if scores else leaves, grad)

        took = timed(forward, "cuda"), timed(both, "cuda")
    except Exception as error:  # noqa: BLE001 - any error of a peer is printed
        print(f"      {name}: {type(error).__name__} {str(error)[:300]!r}", flush=True)
        return
    ratios = ", ".join(f"{one / other:.2f}" for one, other in zip(ours, took, strict=True))
    print(f"      {name} {took[0]:.4f} {took[1]:.4f}   mask {making:.3f}; we take {ratios} of it", flush=True)
    write(name, form, shape, every, 0, *took, making)


def steps(forms: list[str]) -> None:
    """Time one step of many rows, with its windows: by the kernel, and by operations of torch."""
    print(f"{'form':6}{'rows':>8}{'kernel':>10}{'torch':>10}   ms of a step")
    for form, rows in itertools.product([one for one in forms if one != "tf32"], ROWS):
        with torch.no_grad():
            arguments = step_of(rows, form)
            took = [timed(lambda a=arguments, t=t: t.attend(*a), "cuda") for t in (KERNEL_STEP, ONE_STEP)]
        print(f"{form:6}{rows:8}{took[0]:10.4f}{took[1]:10.4f}", flush=True)
        for name, one in zip(("step kernel", "step torch"), took, strict=True):
            write(name, form, (rows, 1), 0, HIDDEN, one, None)


Way = tuple[str, int, Tiles]


def kernels_with(tiles: Tiles) -> TritonAttention:
    kernels = TritonAttention("triton")
    kernels.tiles = tiles
    return kernels


def tried(form: str, hidden: int, tiles: Tiles) -> str:
    """Compile the kernels of tiles, in a separate process; return what is wrong, if anything."""
    try:
        case = case_of(form, (4, 128), 50, "cuda", hidden=hidden)  # as many tokens divide by 16 as in what is timed
        found, wanted = case.run(kernels_with(tiles)), case.exact()
    except Exception as error:  # noqa: BLE001 - the tiles are too large
        return f"{type(error).__name__} {str(error)[:80]!r}"
    worst = max(relative_error(one, other) for one, other in zip(found, wanted, strict=True))
    return "" if worst <= LIMITS[form] else f"{worst:.1e}"


def sweep(forms: list[str]) -> None:
    """Compile and check tiles in parallel, of the stream and of stored windows, then time both passes apart."""
    streams = itertools.product(STREAMS, (1, 2, 3))
    readings = list(itertools.product((16, 32), (16, 32), (4, 8)))
    ways: list[Way] = [(form, 0, Tiles(*one, stages, 32, 32, 8)) for one, stages in streams for form in forms]
    ways += [(form, HIDDEN, Tiles(32, 32, 4, 2, *one)) for form in forms for one in readings]
    wrong = outcomes(tried, ways, SECONDS)
    for way, problem in wrong.items():
        if problem:
            print("wrong:", *way, problem)
    for form, hidden, every in itertools.product(forms, (0, HIDDEN), EVERY):
        case = case_of(form, (256, 128) if hidden else (8, 4096), every, "cuda", hidden=hidden)
        mine = [way[2] for way, problem in wrong.items() if way[:2] == (form, hidden) and not problem]
        rows = [(*split_times(case, kernels_with(tiles)), tiles) for tiles in mine]
        for index, name in enumerate(("forward", "queries", "keys", "backward")):
            for row in sorted(rows, key=lambda one: one[index])[:6]:
                print(f"{form} {name} stored {hidden} every {every}: {row[index]:.4f} ms  {row[-1]}", flush=True)


def split_times(case: Case, kernels: AttentionKernels) -> tuple[float, ...]:
    """Return milliseconds of the forward pass, the gradients of queries, those of keys, and the backward pass."""
    after, saved = kernels.forward(case.inputs, keep=True)
    only = (True, *(False,) * (len(case.needs) - 1))
    queries, backward = (
        timed(lambda n=needs: kernels.backward(case.inputs, after, saved, (case.grad,), n), "cuda")
        for needs in (only, case.needs)
    )
    return timed(lambda: case.forward(kernels), "cuda"), queries, backward - queries, backward


def write(
    name: str, form: str, shape: tuple[int, int], every: int, hidden: int, forward: float, both: Any, mask: Any = None
) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    append(RESULTS, {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "device": device, "torch": torch.__version__,
        "implementation": name, "form": form, "rows": shape[0], "length": shape[1], "heads": HEADS, "head_size": SIZE,
        "window": PAST, "reset_every": every, "stored": hidden, "forward_ms": f"{forward:.4f}",
        "both_ms": "" if both is None else f"{both:.4f}", "mask_ms": "" if mask is None else f"{mask:.4f}",
    })  # fmt: skip


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    args = parser.parse_args()
    forms = args.forms or (["bf16", "tf32", "ieee"] if args.device == "cuda" else ["ieee"])
    kernels = ATTENTION.named("triton" if args.device == "cuda" else "chunked")
    failed = 0
    for name, passed, numbers in checks(kernels, args.device, forms) if "checks" in args.only else ():
        print("ok  " if passed else "FAIL", name, numbers, flush=True)
        failed += not passed
    if failed:
        sys.exit(f"{failed} checks failed: nothing is timed")
    if "stream" in args.only:
        stream(kernels, args.device, forms)
    if "stored" in args.only:
        stream(kernels, args.device, forms, HIDDEN)
    if "step" in args.only and args.device == "cuda":
        steps(forms)
    if "sweep" in args.only:
        sweep(forms)


if __name__ == "__main__":
    main()
