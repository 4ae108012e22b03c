"""Timing of the recurrent backends on this machine for given sizes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl.core.devices import check_device, check_memory, numbered
from recurl.core.errors import ArgumentError, RecurlError
from recurl.core.precision import MODES
from recurl.core.ranges import Count, check_fields
from recurl.core.relative_error import relative_error
from recurl.core.seeding import derive_seed
from recurl.execution.capture import WARM_UP, GraphedFunction
from recurl.modules import CellModule, set_recurrent_mode
from recurl.recurrence import BACKENDS, Sizes, load_cell

PRECISIONS = (*MODES, "bf16")
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_SLOW = "reference"

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class RNNCase:
    """Sizes of a recurrent module and of a batch for it.

    Raises:
        ArgumentError: a size is not positive, or a name is unknown.
    """

    cell: str = "lstm"
    """Name of a built-in cell, such as ``"lstm"``, or ``"module:Class"``."""
    input_size: Count = 64
    """Number of input features."""
    hidden_size: Count = 64
    """Number of hidden units."""
    num_layers: Count = 1
    """Number of layers."""
    batch: Count = 32
    """Number of rows."""
    time: Count = 128
    """Number of steps per row."""
    mean_segment: Count | None = None
    """Mean number of steps between random resets; None for no resets."""
    dtype: str = "float32"
    """Dtype of parameters and data: ``"float32"``, ``"float64"`` or ``"bfloat16"``."""
    precision: str = "auto"
    """Precision of float32 recurrent products, see ``recurrent_matmul_precision``; ``"bf16"`` for bfloat16 operands."""
    device: str = "cpu"
    """Device to run on."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            load_cell(self.cell)
        except ArgumentError as error:
            raise ArgumentError(f"--cell: {error}") from error
        for name, known in (("dtype", tuple(_DTYPES)), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ArgumentError(f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")

    def check_machine(self) -> None:
        """Check that the device is available and has enough memory.

        Raises:
            ArgumentError: it is not or has not; the message names the options to lower.
        """
        check_device(self.device)
        cell, first, more = load_cell(self.cell), Sizes(self.input_size, self.hidden_size), self.num_layers - 1
        weights = (1, first), (more, Sizes(self.hidden_size, self.hidden_size))
        bytes_each = _DTYPES[self.dtype].itemsize + torch.float64.itemsize  # with the float64 reference
        parts = {
            "the weights": sum(n * math.prod(s) for n, z in weights for s in cell.parameters(z).values()) * bytes_each,
            "the batch": self.batch * self.time * (self.input_size + 2 * self.hidden_size) * bytes_each,
        }
        advice = {"the weights": "--hidden-size, --input-size or --num-layers", "the batch": "--batch or --time"}
        check_memory(self.device, parts, lambda: f"lower {advice[max(parts, key=lambda name: parts[name])]}")

    def __str__(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers > 1 else ""
        resets = "no resets" if self.mean_segment is None else f"a reset every {self.mean_segment}"
        return f"{self.cell} {self.input_size}>{self.hidden_size}{layers}, {self.batch} x {self.time}, {resets}"


@dataclass(frozen=True)
class RNNTime:
    """Measurements of one backend.

    Example:
        >>> from recurl.diagnostics import RNNCase
        >>> RNNTime(RNNCase(batch=10, time=100), "loop", (2.0, 1.0, 9.0)).tokens_per_s
        500000.0
    """

    case: RNNCase
    backend: str
    times_ms: tuple[float, ...] = ()
    """Wall time of forward and backward pass in milliseconds, one per repeat; empty if the backend can't run."""
    peak_mb: float | None = None
    """Peak memory allocated on top of parameters and batch, in MiB; CUDA only."""
    error: float = math.nan
    """Largest relative error (Frobenius norm) of features and gradients compared with the step loop in float64."""
    reason: str | None = None
    """Reason why the backend can't run, or None."""

    @property
    def median_ms(self) -> float:
        """Median time in milliseconds."""
        return statistics.median(self.times_ms)

    @property
    def tokens_per_s(self) -> float:
        """Number of tokens (steps of a row) processed per second."""
        return self.case.batch * self.case.time / self.median_ms * 1e3


def timed_backends() -> tuple[str, ...]:
    """Return the names of the backends to time: all but the slow reference.

    Example:
        >>> "loop" in timed_backends(), "reference" in timed_backends()
        (True, False)
    """
    return tuple(name for name in BACKENDS.names if name not in ("auto", "fastest", _SLOW))


def time_rnn(
    case: RNNCase, backends: Sequence[str] = (), *, repeats: int = 20, seconds: float = 30.0, captured: bool = False
) -> list[RNNTime]:
    """Time the forward and backward pass (gradients of input and weights) of a module in recurrent mode.

    All backends use the same parameters and the same batch. Its boundaries are recomputed every time, as for a new
    minibatch. Each backend runs twice as a warm-up; then the backends take turns.

    Args:
        case: sizes to time.
        backends: names of backends; all but ``"reference"`` if empty.
        repeats: number of timed runs per backend, at least 1.
        seconds: time limit after which no new round is started.
        captured: time replays of a CUDA graph, which exclude the host's time; on a GPU.

    Returns:
        One result per backend, fastest first, followed by backends that can't run, with the reason.

    Raises:
        ArgumentError: ``repeats`` is not positive, the case can't run on this machine, or ``captured`` without a GPU.

    Example:
        >>> from recurl.diagnostics import RNNCase
        >>> first, *_ = time_rnn(RNNCase(hidden_size=8, batch=2, time=10), repeats=2)
        >>> first.reason is None, len(first.times_ms), first.error < 1e-5
        (True, 2, True)
    """
    if repeats < 1:
        raise ArgumentError(f"--repeats must be positive, got {repeats}.")
    if captured and numbered(case.device).type != "cuda":
        raise ArgumentError(f"captured=True times CUDA graphs, on a GPU; got device {case.device}: leave it out.")
    case.check_machine()
    data = _Data(case)
    weights = _module(case, "auto", _DTYPES[case.dtype]).net.state_dict()
    exact = _exact(case, weights, data)
    ready: dict[str, Step] = {}
    results: dict[str, RNNTime] = {}
    for name in backends or timed_backends():
        try:
            step = _step(case, weights, data, name)
            error = max(map(relative_error, step(), exact))
            peak = _peak(step, case.device)
            if captured:
                step = _captured(step, case.device)
        except (RecurlError, RuntimeError) as refused:
            results[name] = RNNTime(case, name, reason=_one_line(refused))
            continue
        ready[name], results[name] = step, RNNTime(case, name, peak_mb=peak, error=error)
    del exact
    for name, times in take_turns(ready, repeats, seconds, sync=case.device != "cpu").items():
        seen = results[name]
        results[name] = RNNTime(case, name, tuple(1e3 * time for time in times), seen.peak_mb, seen.error)
    return sorted(results.values(), key=lambda result: result.median_ms if result.times_ms else float("inf"))


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sync: bool = False,
) -> dict[str, list[float]]:
    """Return the durations of calls in seconds, measured in turns so that other load affects all calls equally.

    Args:
        calls: functions to time, by name.
        repeats: number of rounds.
        seconds: time limit after which no new round is started.
        clock: clock to read before and after each call.
        sync: synchronize with the accelerator before reading the clock.

    Example:
        >>> {name: len(times) for name, times in take_turns({"a": int, "b": float}, 3, 1.0).items()}
        {'a': 3, 'b': 3}
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for _ in range(repeats):
        for name, call in calls.items():
            if sync:
                torch.accelerator.synchronize()
            start = clock()
            call()
            if sync:
                torch.accelerator.synchronize()
            times[name].append(clock() - start)
        if time.perf_counter() - begin > seconds:
            break
    return times


class _Data:
    """Batch of a case and gradient of the features."""

    def __init__(self, case: RNNCase) -> None:
        generator = torch.Generator().manual_seed(derive_seed(0, "rnn timing"))
        shape = (case.batch, case.time)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*shape, *sizes, generator=generator).to(case.device, _DTYPES[case.dtype])

        self.x = normal(case.input_size)
        cell = load_cell(case.cell)
        shapes = zip(cell.state_names, cell.state_shapes(Sizes(case.input_size, case.hidden_size)), strict=True)
        self.states = {name: normal(case.num_layers, *shape) * 0.3 for name, shape in shapes}
        rate = 0.0 if case.mean_segment is None else 1 / case.mean_segment
        self.is_init = (torch.rand(*shape, 1, generator=generator) < rate).to(case.device)
        self.gradient = normal(case.hidden_size)


def _module(case: RNNCase, backend: str, dtype: torch.dtype, precision: str = "auto") -> CellModule:
    low = precision == "bf16"
    cell = load_cell(case.cell)
    return CellModule(
        cell,
        case.input_size,
        case.hidden_size,
        case.num_layers,
        in_keys=["x", *cell.state_names],
        out_keys=["y", *(("next", name) for name in cell.state_names)],
        recurrent_backend=backend,
        recurrent_compute_dtype=torch.bfloat16 if low else torch.float32,
        recurrent_matmul_precision="auto" if low else precision,
        device=case.device,
        dtype=dtype,
    )


def _step(
    case: RNNCase, weights: Mapping[str, Tensor], data: _Data, backend: str, dtype: torch.dtype | None = None
) -> Step:
    """Return a function that computes features and the gradients of input and weights."""
    dtype = _DTYPES[case.dtype] if dtype is None else dtype
    module = _module(case, backend, dtype, case.precision)
    module.net.load_state_dict(weights)
    x, gradient = data.x.to(dtype).detach().requires_grad_(), data.gradient.to(dtype)
    stored = {name: state.to(dtype) for name, state in data.states.items()}
    inputs = [x, *module.parameters()]

    def step() -> list[Tensor]:
        batch = TensorDict({"x": x, "is_init": data.is_init.clone(), **stored}, x.shape[:2])
        with set_recurrent_mode(True):
            features = cast(Tensor, module(batch).get("y"))
        return [features.detach(), *torch.autograd.grad(features, inputs, gradient)]

    return step


def _exact(case: RNNCase, weights: Mapping[str, Tensor], data: _Data) -> list[Tensor]:
    return _step(replace(case, precision="ieee"), weights, data, "loop", torch.float64)()


def _peak(step: Step, device: str) -> float | None:
    if torch.device(device).type != "cuda":
        step()
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _captured(step: Step, device: str) -> Step:
    """Return the step as a CUDA graph."""
    graph = GraphedFunction(step, numbered(device), name="step of the layer", instead="time it without captured=True")
    for _ in range(WARM_UP + 1):
        graph()
    return graph


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.partition("can't run this call: ")[2] or text
