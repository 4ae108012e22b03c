"""Check cells other than LSTM and GRU on a GPU: against float64 steps on the CPU, captured and compiled.

    python benchmarks/check_cells_gpu.py [CELL ...]

Prints a line for each cell and case, and exits with 1 if one is wrong.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl.core.keys import TRAJ_STEPS
from recurl.execution.traced import InductorFunction
from recurl.modules import CellModule, set_recurrent_mode
from recurl.recurrence import CELLS, Cell, load_cell, record_backends
from recurl.sequences.start_states import allocate

SHAPES = [(64, 33), (3, 4, 40), (700,), (5, 1)]
OPTIONS = {"gtrxl": "gtrxl(window=8)", "mamba2": "mamba2(state_size=16)"}


def batch_of(module: CellModule, shape: tuple[int, ...], stored: bool) -> TensorDict:
    """Return random inputs, resets and, if ``stored``, states that a policy has reached."""
    generator = torch.Generator().manual_seed(0)
    net = module.net
    batch = TensorDict(
        {
            "x": torch.randn(*shape, net.input_size, generator=generator),
            "is_init": torch.rand(*shape, 1, generator=generator) < 0.1,
        },
        shape,
    )
    if stored:
        step = TensorDict({"x": torch.randn(batch.numel(), net.input_size, generator=generator)}, [batch.numel()])
        step["is_init"] = torch.ones(batch.numel(), 1, dtype=torch.bool)
        step = module(step)
        for key in module.state_keys:
            batch[key] = step["next", key].detach().reshape(*shape, *step["next", key].shape[1:])
    return batch


def results(module: CellModule, batch: TensorDict) -> list[Tensor]:
    """Return outputs, and the gradients of the parameters and inputs."""
    batch = batch.clone()
    batch["x"].requires_grad_()
    with set_recurrent_mode(True):
        module(batch)
    outputs = [batch[key] for key in module.out_keys]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(one.shape, generator=generator).to(one) for one in outputs]
    inputs = [batch["x"], *module.parameters()]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def exactly(batch: TensorDict) -> TensorDict:
    """Return the batch with its floats in float64."""
    return batch.apply(lambda one: one.double() if one.is_floating_point() else one)


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest error relative to the norm of a result, or to a hundredth of the largest norm."""
    least = max(one.norm().item() for one in wanted) / 100
    pairs = zip(found, wanted, strict=True)
    errors = [(one.cpu().double() - two.double()).norm() / two.norm().clamp_min(least) for one, two in pairs]
    return torch.stack(errors).max().item()  # NaN if any is


def captured(module: CellModule, batch: TensorDict, other: TensorDict) -> list[Tensor]:
    """Return the results for ``other`` from a CUDA graph that was captured with ``batch``."""
    static = batch.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(module, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results_in_graph(module, static)
    static.update_(other)
    graph.replay()
    return found


def features(module: CellModule, batch: TensorDict) -> Tensor:
    """Return the features."""
    with set_recurrent_mode(True):
        return module(batch.copy())["y"]


def results_in_graph(
    module: CellModule, batch: TensorDict, run: Callable[[CellModule, TensorDict], Tensor] = features
) -> list[Tensor]:
    """Return the features, and the gradients of their sum of squares."""
    y = run(module, batch)
    return [y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))]


def in_a_program(module: CellModule, batch: TensorDict) -> list[Tensor]:
    """Return :func:`results_in_graph` from a program of Inductor, with states stored at the starts of rows only."""
    length = batch.shape[1]
    stored = TensorDict({}, batch.shape, device=batch.device)
    step, begun = torch.arange(length, device=batch.device), batch["is_init"].squeeze(-1)
    stored[TRAJ_STEPS] = step - step.where(begun, -length).cummax(1).values  # 0 where an episode begins
    for key in module.state_keys:
        first = batch[key][:, 0]
        stored[key], starts = allocate(batch.shape, first.shape[1:], length, dtype=first.dtype, device=first.device)
        starts[:, 0] = first.flatten(1)
    leaves = list(stored.keys(True, True))

    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = batch.select("x", "is_init")
        for leaf, tensor in zip(leaves, tensors, strict=True):
            given[leaf] = tensor
        with torch.enable_grad():
            return tuple(results_in_graph(module, given))

    tensors = [stored[leaf] for leaf in leaves]
    return [*InductorFunction(program, tensors)(*tensors)]


def modules(cell: Cell, hidden_size: int) -> tuple[CellModule, CellModule, CellModule]:
    """Return a module, the same in float64, and the same on the GPU."""
    module = CellModule(cell, 5, hidden_size, 2, in_key="x", out_key="y", recurrent_backend="fastest")
    exact = CellModule(cell, 5, hidden_size, 2, in_key="x", out_key="y", recurrent_backend="loop", dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    return module, exact, copy.deepcopy(module).cuda()


def checks(name: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield what to check of a cell, with the error that must be small."""
    torch.manual_seed(0)
    cell = load_cell(OPTIONS.get(name, name))
    module, exact, on_gpu = modules(cell, 32)

    def sequences(shape: tuple[int, ...], stored: bool) -> float:
        batch = batch_of(module, shape, stored)
        with record_backends() as ran:
            found = results(on_gpu, batch.cuda())
        assert set(ran) <= {"triton" if cell.takes_time else "loop"}, ran
        return error(found, results(exact, exactly(batch)))

    def steps() -> float:
        batch = batch_of(module, (300,), True)
        with torch.no_grad():
            found, wanted = on_gpu(batch.cuda()), exact(exactly(batch))
        return error([found[key] for key in module.out_keys], [wanted[key] for key in module.out_keys])

    def capture() -> float:
        batch, other = batch_of(module, (16, 50), True), batch_of(module, (16, 50), True)
        other["x"], other["is_init"] = other["x"].flip(0), other["is_init"].flip(0)
        return error(captured(on_gpu, batch.cuda(), other.cuda()), results_in_graph(exact, exactly(other)))

    def compiled() -> float:
        batch = batch_of(module, (16, 50), True)
        found = results_in_graph(on_gpu, batch.cuda(), torch.compile(features))
        return error(found, results_in_graph(exact, exactly(batch)))

    def program() -> float:
        module, exact, on_gpu = modules(cell, 100)  # matrices of 25 x 25 numbers, in rows that Inductor pads by default
        batch = batch_of(module, (16, 64), True)
        for key in module.state_keys:
            batch[key][:, 1:] = 0  # what isn't stored
        return error(in_a_program(on_gpu, batch.cuda()), results_in_graph(exact, exactly(batch)))

    for shape in SHAPES:
        for stored in (False, True):
            yield f"{list(shape)}{' stored' * stored}", lambda shape=shape, stored=stored: sequences(shape, stored)
    yield "steps", steps
    yield "captured", capture
    yield "compiled", compiled
    yield "in a program", program


def main() -> int:
    """Run the checks."""
    wrong = 0
    for name in sys.argv[1:] or [name for name, cell in CELLS.items() if not cell.derivatives]:
        line = []
        for what, check in checks(name):
            try:
                found = check()
            except Exception:  # noqa: BLE001 - the others are checked, too
                traceback.print_exc(limit=-2)
                found = float("nan")
            good = found < 2e-4
            wrong += not good
            line.append(f"{what} {found:.0e}{'' if good else ' WRONG'}")
        print(f"{name}: {', '.join(line)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
