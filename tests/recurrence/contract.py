"""Contract tests shared by all backends: cases, and a comparison with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.core.relative_error import relative_error
from recurl.recurrence import (
    BACKENDS,
    CELLS,
    Boundaries,
    Cell,
    Options,
    Sizes,
    Support,
    Weights,
    record_backends,
    run_stack,
)
from tests.own_cells import OWN, VARIANTS

KNOWN: dict[str, Cell] = CELLS | OWN | VARIANTS
PATTERNS = ("none", "every", "random", "last", "alternating")


def serves(name: str, cell: str) -> bool:
    try:
        BACKENDS.check_cell(name, KNOWN[cell])
    except UnsupportedError:
        return False
    return True


@dataclass
class Case:
    """A recurrent problem with inputs that require gradients."""

    cell: str
    layers: int = 1
    directions: int = 1
    projection: int = 0
    bias: bool = True
    dropout: float = 0.0
    shape: tuple[int, ...] = (3, 11)
    pattern: str = "random"
    inputs: int = 5
    hidden: int = 7
    dtype: torch.dtype = torch.float64
    seed: int = 0
    options: Options = Options()  # noqa: RUF009 - frozen
    x: Tensor = field(init=False)
    states: tuple[Tensor, ...] = field(init=False)
    weights: list[list[Weights]] = field(init=False)
    masks: list[Tensor] | None = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, below_zero: bool = False, scale: float = 0.6) -> Tensor:
            value = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return (-value.abs() if below_zero else value).to(self.dtype).requires_grad_()

        cell = KNOWN[self.cell]
        tokens = torch.Size(self.shape).numel()
        output = self.projection or self.hidden
        self.x = normal(tokens, self.inputs)
        slots = self.layers * self.directions
        sizes = [
            Sizes(output * self.directions if depth else self.inputs, self.hidden, self.bias, self.projection)
            for depth in range(self.layers)
        ]
        self.states = tuple(normal(tokens, slots, *shape) for shape in cell.state_shapes(sizes[0]))

        def weights(shapes: dict[str, tuple[int, ...]]) -> Weights:
            drawn = [  # otherwise S5's clipping would make most gradients 0, and SHM's memory grow by 2 at every step
                normal(*shapes[name], below_zero=name == "lambda_re", scale=0.12 if name == "theta" else 0.6)
                if name in shapes
                else None
                for name in cell.parameter_names
            ]
            return cell.pack(drawn)

        self.weights = [[weights(cell.parameters(layer)) for _ in range(self.directions)] for layer in sizes]
        self.masks = None
        if self.dropout:
            width = (tokens, output * self.directions)
            keep = [torch.rand(width, generator=generator) >= self.dropout for _ in range(self.layers - 1)]
            self.masks = [k.to(self.dtype) / (1 - self.dropout) for k in keep]
        self.is_init = reset_pattern(self.pattern, self.shape, generator)

    @property
    def parameters(self) -> dict[str, Tensor]:
        named = {"x": self.x, **{f"state{k}": state for k, state in enumerate(self.states)}}
        for depth, layer in enumerate(self.weights):
            for direction, weights in enumerate(layer):
                for name, tensor in zip(KNOWN[self.cell].parameter_names, weights, strict=True):
                    if tensor is not None:
                        named[f"{name}_{depth}_{direction}"] = tensor
        return named

    @property
    def boundaries(self) -> Boundaries:
        return Boundaries.from_is_init(self.is_init, batch_shape=self.shape)

    def run(self, backend: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        with record_backends() as ran:
            result = run_stack(
                BACKENDS.choose(backend, Support(KNOWN[self.cell], torch.device("cpu"))),
                KNOWN[self.cell],
                self.weights,
                self.x,
                self.states,
                self.boundaries,
                self.masks,
                self.options,
            )
        assert set(ran) <= {backend}
        assert len(ran) == (self.layers * self.directions if self.x.shape[0] else 0)
        return result

    def outputs_and_gradients(
        self, backend: str, change: Callable[[Tensor], Tensor] = lambda weight: weight
    ) -> dict[str, Tensor]:
        """Return features, states at segment ends, and all gradients of a random function of both.

        ``change`` is applied to the weights of that function.
        """
        features, states = self.run(backend)
        ends = self.boundaries.ends
        results = {"features": features, **{f"end{k}": state[ends] for k, state in enumerate(states)}}
        generator = torch.Generator().manual_seed(self.seed + 1)
        loss = sum(
            (value * change(torch.randn(value.shape, generator=generator, dtype=torch.float64)).to(self.dtype)).sum()
            for value in results.values()
        )
        parameters = self.parameters
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        results.update({f"grad {name}": grad for name, grad in zip(parameters, gradients, strict=True)})
        return {name: value.detach() for name, value in results.items()}


def rounded_case(**arguments: object) -> Case:
    """Return the case in float64, with the parameters sampled in float32."""
    double, single = Case(**arguments), Case(**arguments, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in double.parameters.items():
            parameter.copy_(single.parameters[name])
    return double


@cache
def exact_and_allowed(**arguments: object) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the expected results of a case in float32, and the norms of the errors that its precision allows.

    These are the largest errors, over eight samples, that perturbations by float32's unit roundoff of all inputs and
    results cause in float64. The bound therefore follows from the conditioning of the problem. The error of a single
    float32 computation would not be a bound: it depends on the machine's instructions and BLAS, and where a recurrence
    amplifies rounding, it is a matter of luck.
    """
    case, generator = rounded_case(**arguments), torch.Generator().manual_seed(0)
    values = {name: parameter.detach().clone() for name, parameter in case.parameters.items()}

    def change(value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return value * (1 + torch.finfo(torch.float32).eps / 2 * noise)

    exact = case.outputs_and_gradients("loop")
    allowed = dict.fromkeys(exact, 0.0)
    for _ in range(8):
        with torch.no_grad():
            for name, parameter in case.parameters.items():
                parameter.copy_(change(values[name]))
        for name, value in case.outputs_and_gradients("loop", change).items():
            allowed[name] = max(allowed[name], (change(value) - exact[name]).norm().item())
    return exact, allowed


def reset_pattern(pattern: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    is_init = torch.zeros(shape, dtype=torch.bool)
    if pattern == "every":
        is_init[:] = True
    elif pattern == "random":
        is_init[:] = torch.rand(shape, generator=generator) < 0.3
    elif pattern == "last":
        is_init[..., -1:] = True
    elif pattern == "alternating":
        is_init[..., ::2] = True
    return is_init


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        assert actual[name].isfinite().all(), name
        error = relative_error(actual[name], value)
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
