"""What a cell promises of its step, tried out on a few rows when a network is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recurl.errors import ArgumentError
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import Cell, OneStep, Sizes, States
from recurl.recurrence.segments import Segments
from recurl.seeding import derive_seed

_ROWS = 3
_passed: set[tuple[Any, ...]] = set()

_Step = Callable[[Tensor, States], tuple[Tensor, States]]


def check_step(cell: Cell, weights: Any, sizes: Sizes, *, form_alone: bool = False) -> None:
    """Refuse a cell whose step, on random input, doesn't do what the contract of cells says.

    A cell that passed once with these sizes is not tried again, nor is one without numbers (on ``"meta"``, or traced).

    Args:
        cell: the cell.
        weights: parameters of one layer, as ``cell.pack`` gives them.
        sizes: sizes of that layer.
        form_alone: try no more than shapes and dtypes, which don't depend on what the parameters have become.

    Raises:
        ArgumentError: the message says which promise is broken, and shows it.
    """
    _check_parts(cell)
    like: Tensor = next(weight for weight in weights if weight is not None).detach()
    key = (type(cell), cell.name, sizes, like.dtype, like.device.type)  # a class may be defined again
    if key in _passed or like.is_meta or type(like) is not Tensor or torch.compiler.is_compiling():
        return
    generator = torch.Generator().manual_seed(derive_seed(0, "trial of a cell"))
    shapes = [(sizes.input_size,), *cell.state_shapes(sizes)]
    drawn = [torch.randn(2, _ROWS, *shape, generator=generator, device="cpu").to(like) for shape in shapes]
    (x, *states), others = zip(*drawn, strict=True)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial = _Trial(cell, weights, sizes, others)
        if form_alone:
            trial.check_form(x, tuple(states))
            return
        trial.run(x, tuple(states))
    _passed.add(key)


def _check_parts(cell: Cell) -> None:
    for name, value in cell.attributes.items():
        if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad):
            raise ArgumentError(
                f"A cell must name its parameters in parameters() and take them in step(); {cell} keeps the "
                f"{type(value).__name__} {name!r} in itself, where no optimiser, no .to() and no checkpoint finds it."
            )


class _Trial:
    """The experiment.

    Args:
        cell: the cell.
        weights: its parameters.
        sizes: its sizes.
        others: another input, and states, to step with in between.
    """

    def __init__(self, cell: Cell, weights: Any, sizes: Sizes, others: Sequence[Tensor]) -> None:
        self.cell, self.weights, self.sizes, self.others = cell, weights, sizes, others
        self.names = ("the features", *(f"the state {name!r}" for name in cell.state_names))

    def run(self, x: Tensor, states: States) -> None:
        tensors = self._tensors(x, states)
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        self.check_form(x, states)
        for name, tensor in tensors.items():
            if not _equal(tensor, kept[name], 0.0):
                raise ArgumentError(f"A step must not change its inputs; {self.cell}.step() changed {name} in place.")
        self._check_function(x, states)
        self._check_rows(x, states)
        if self.cell.takes_time:
            self._check_sequence(x, states)
            if self.cell.decays:
                self._step(x, states, time=_Decaying(self.cell))

    def _step(self, x: Tensor, states: States, **time: Any) -> tuple[Tensor, States]:
        result: Any = self.cell.step(x, states, *self.weights, **time)
        if not _is_result(result):
            raise ArgumentError(
                "A step must return two things, the features and a tuple of the states, return features, (h,); "
                f"{self.cell}.step() returned {_kinds(result)}."
            )
        return result

    def _tensors(self, x: Tensor, states: States) -> dict[str, Tensor]:
        """Return all that a step is given, by what an error calls it."""
        weights = zip(self.cell.parameter_names, self.weights, strict=False)
        parameters = {f"the parameter {name!r}": weight for name, weight in weights if weight is not None}
        return {"x": x, **dict(zip(self.names[1:], states, strict=True)), **parameters}

    def check_form(self, x: Tensor, states: States) -> None:
        features, after = self._step(x, states)
        expected = [(_ROWS, self.sizes.output_size), *(tuple(state.shape) for state in states)]
        found = [tuple(value.shape) for value in (features, *after)]
        if found != expected:
            raise ArgumentError(
                f"A step must return features [rows, hidden_size] and states in the shapes that it got, here "
                f"{expected}; {self.cell}.step() returned {found}. See Cell.state_shapes for states of other shapes."
            )
        for name, value in zip(self.names, (features, *after), strict=True):
            if value.dtype != x.dtype or value.device != x.device:
                raise ArgumentError(
                    f"A step must keep dtype and device, {x.dtype} on {x.device}; {self.cell}.step() returned {name} "
                    f"as {value.dtype} on {value.device}. Complex numbers are kept as pairs of real ones."
                )

    def _check_function(self, x: Tensor, states: States) -> None:
        attributes = repr(self.cell.attributes)
        features, after = self._step(x, states)
        self._step(self.others[0], tuple(self.others[1:]))
        self._check_attributes(attributes)
        again, after_again = self._step(x, states)
        for name, one, other in zip(self.names, (features, *after), (again, *after_again), strict=True):
            if not _equal(one, other, 0.0):
                raise ArgumentError(
                    f"A step must be a function of input, states and parameters; {self.cell}.step() was called twice "
                    f"with the same, other inputs in between, and {name} differed by {_difference(one, other):.1e}. "
                    "Leave out random numbers, and keep in states what is to be remembered."
                )
        self._check_attributes(attributes)

    def _check_attributes(self, attributes: str) -> None:
        if repr(self.cell.attributes) != attributes:
            raise ArgumentError(
                f"A step must keep nothing in the cell; {self.cell.name} had the attributes {attributes} before "
                f"steps and {self.cell.attributes!r} after. Keep in states what is to be remembered."
            )

    def _check_rows(self, x: Tensor, states: States) -> None:
        features, after = self._step(x, states)
        alone, after_alone = self._step(x[:1], tuple(state[:1] for state in states))
        for name, one, other in zip(self.names, (features, *after), (alone, *after_alone), strict=True):
            if not _equal(one[:1], other, _tolerance(x)):
                raise ArgumentError(
                    f"The rows of a step must not depend on each other; {name} of {self.cell}.step() differed by "
                    f"{_difference(one[:1], other):.1e} between a row among {_ROWS} and the same row alone."
                )

    def _check_sequence(self, x: Tensor, states: States) -> None:
        """Try two segments; what is stored inside of them must not count."""
        tokens, count = torch.cat([x, self.others[0]]), 2 * _ROWS
        stored = [torch.cat([one, other]) for one, other in zip(states, self.others[1:], strict=True)]
        starts = torch.arange(count, device=x.device) % _ROWS == 0
        poisoned = tuple(torch.where(starts.view(-1, *(1,) * (one.ndim - 1)), one, torch.nan) for one in stored)
        features, after = self._step(tokens, poisoned, time=Segments(Boundaries(starts, (count,)), "loop"))
        carried: States = ()
        for token in range(count):
            if token % _ROWS == 0:
                carried = tuple(state[token : token + 1] for state in stored)
            y, carried = self._step(tokens[token : token + 1], carried)
            for name, whole, stepped in zip(self.names, (features, *after), (y, *carried), strict=True):
                if not _equal(whole[token : token + 1], stepped, _tolerance(x)):
                    raise ArgumentError(
                        f"A step with time must give the same over a sequence as step by step; {name} of "
                        f"{self.cell}.step() differed by {_difference(whole[token : token + 1], stepped):.1e} at step "
                        f"{token + 1} of {count}, whose second half was another sequence. It must touch its states "
                        "through the methods of time alone."
                    )


class _Decaying(OneStep):
    """One step that looks at ``a``."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        self._check(a, a)
        return super().recur(a, b, h)

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        self._check(a, a.square().sum(-1).sqrt())
        return super().recur_complex(a, b, h)

    def _check(self, a: Tensor, modulus: Tensor) -> None:
        low, high = modulus.min().item(), modulus.max().item()
        if not (low >= 0 and high <= 1 + _tolerance(a)):
            raise ArgumentError(
                f"The cell {self.cell} promises (decays = True) that a lies between 0 and 1; its step gave a from "
                f"{low:.6g} to {high:.6g}. Take it from a sigmoid or exp(-positive), or set decays = False."
            )


def _tolerance(like: Tensor) -> float:
    return torch.finfo(like.dtype).eps ** 0.5


def _difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _is_result(result: Any) -> bool:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list)):
        return False
    return all(isinstance(part, Tensor) for part in (result[0], *result[1]))


def _kinds(result: Any) -> str:
    if not isinstance(result, tuple | list):
        return f"a {type(result).__name__}"
    return f"({', '.join(_kinds(part).removeprefix('a ') for part in result)})"
