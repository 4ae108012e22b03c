"""One recurrent layer on a GPU with random data, for checks and timings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recurl.recurrence import BACKENDS, CELLS, Boundaries, LayerCall, LayerWeights, Options, Support

DEVICE = torch.device("cuda")


def options_of(precision: str, recompute: bool = False) -> Options:
    """Return the options for "bf16" or one of the precisions of float32."""
    if precision == "bf16":
        return Options(recompute, "ieee", torch.bfloat16)
    return Options(recompute, precision)


def guarded(function: Callable[..., object], *arguments: object, **more: object) -> object:
    """Call ``function``; if it raises, print the error and return None, so that other cases still run."""
    try:
        return function(*arguments, **more)
    except Exception as error:  # noqa: BLE001 - any error of a case is printed
        print("FAIL", *arguments, more, type(error).__name__, str(error)[:300].replace("\n", " "), flush=True)
        return None


@dataclass(frozen=True)
class Problem:
    """A layer with H inputs and H units on a batch of B rows of T tokens.

    Attributes:
        cell: "lstm" or "gru".
        hidden: H.
        rows: B.
        length: T.
        resets: probability that a token starts an episode.
        projection: P, or 0.
        scale: of inputs and stored states.
    """

    cell: str
    hidden: int
    rows: int
    length: int
    resets: float = 0.0
    projection: int = 0
    scale: float = 1.0


class Layer:
    """A :class:`Problem` with its tensors."""

    def __init__(self, problem: Problem) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        hidden, rows, length, projection = problem.hidden, problem.rows, problem.length, problem.projection
        self.cell, self.hidden = CELLS[problem.cell], hidden
        tokens, width = rows * length, projection or hidden

        def uniform(*shape: int) -> Tensor:
            value = torch.rand(shape, generator=generator, device=DEVICE) * 2 - 1
            return (value / hidden**0.5).requires_grad_()

        gates = self.cell.num_gates * hidden
        projected = uniform(projection, hidden) if projection else None
        self.weights = LayerWeights(
            uniform(gates, hidden), uniform(gates, width), uniform(gates), uniform(gates), projected
        )
        x = torch.randn(tokens, hidden, generator=generator, device=DEVICE) * problem.scale
        self.x = x.requires_grad_()
        sizes = (width, hidden)[: len(self.cell.state_names)]
        self.states = tuple(
            torch.randn(tokens, size, generator=generator, device=DEVICE) * (0.5 * problem.scale) for size in sizes
        )
        self.is_init = torch.rand(rows, length, generator=generator, device=DEVICE) < problem.resets
        self.is_init[:, 0] = True
        self.boundaries = Boundaries.from_is_init(self.is_init)
        self.grad = torch.randn(tokens, width, generator=generator, device=DEVICE)

    def step(
        self, backend: str, options: Options, dtype: torch.dtype = torch.float32, stored: bool = False
    ) -> dict[str, Tensor]:
        """Return features and all gradients; with ``stored`` also those of the stored states, for a loss on h and c."""

        def convert(value: Tensor | None) -> Tensor | None:
            return value if value is None or dtype == torch.float32 else value.detach().to(dtype).requires_grad_()

        weights = LayerWeights(*(convert(value) for value in self.weights))
        x, states = convert(self.x), tuple(convert(state) for state in self.states)
        if stored:
            states = tuple(state.detach().requires_grad_() for state in states)
        support = Support(self.cell, DEVICE, dtype, self.hidden, 0, options)
        call = LayerCall(self.cell, weights, x, states, self.boundaries, options)
        features, after = BACKENDS.choose(backend, support).run(call)
        names = {"x": x, **{name: value for name, value in weights._asdict().items() if value is not None}}
        names.update({f"state{k}": state for k, state in enumerate(states) if stored})
        outputs, grads = [features], [self.grad.to(dtype)]
        if stored:
            outputs, grads = [features, *after[1:]], [self.grad.to(dtype), *(state.detach() for state in after[1:])]
        found = torch.autograd.grad(outputs, list(names.values()), grads)
        return {"y": features, **dict(zip(names, found, strict=True))}
