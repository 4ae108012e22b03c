"""What a cell promises of its step, tried out on a few rows when a network is built."""

from __future__ import annotations

import math
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
_SCALES = (1.0, 1e-2, 10.0, 100.0)
"""Sizes of inputs and states that are tried; in half precision the first alone."""
_DRAWS = 4
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
        for scale in _SCALES if x.itemsize >= 4 else _SCALES[:1]:
            others = [other * scale for other in self.others]
            _Trial(self.cell, self.weights, self.sizes, others)._scaled(x * scale, tuple(s * scale for s in states))
        if self.cell.takes_time:
            self._check_reach(x, states)

    def _scaled(self, x: Tensor, states: States) -> None:
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
        """Try the first row beside other rows, of the same number, so that products are rounded alike."""
        features, after = self._step(x, states)
        given = zip((x, *states), self.others, strict=True)
        other_x, *other_states = (torch.cat([one[:1], other[1:]]) for one, other in given)
        beside, after_beside = self._step(other_x, tuple(other_states))
        for name, one, other in zip(self.names, (features, *after), (beside, *after_beside), strict=True):
            if not _equal(one[:1], other[:1], _tolerance(x)):
                raise ArgumentError(
                    f"The rows of a step must not depend on each other; {name} of {self.cell}.step() differed by "
                    f"{_difference(one[:1], other[:1]):.1e} in a row when the others changed."
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

    def _check_reach(self, x: Tensor, states: States) -> None:
        """Try two steps at every magnitude, of inputs too, where time answers alike: nothing else may reach a state."""
        for draw in range(2 * _DRAWS):
            generator = torch.Generator().manual_seed(derive_seed(0, "states", draw))
            if draw >= _DRAWS:
                x = _of_every_magnitude(x.shape, x, generator)
            before = tuple(_of_every_magnitude(state.shape, x, generator) for state in states)
            first, second = _Probe(x, draw), _Probe(x, draw)
            features, after = self._step(x, before, time=first)
            again, _ = self._step(x, after, time=second)
            one, other = [features, *first.given], [again, *second.given]
            if len(one) != len(other) or not all(_equal(a, b, 0.0) for a, b in zip(one, other, strict=True)):
                self._refuse_reach("read a state otherwise than as what time returned")
            for kept, taken in zip(first.kept, second.taken, strict=True):
                if not torch.allclose(kept, taken, rtol=16 * torch.finfo(x.dtype).eps, atol=0.0):
                    self._refuse_reach("gave time another state than time had returned the step before")

    def _refuse_reach(self, what: str) -> None:
        raise ArgumentError(
            "A step with time must touch its states through the methods of time alone: give them the states, read what "
            f"they return, and return that as the states; {self.cell}.step() {what}. Take a step without time for "
            "states that are clamped or gated by themselves."
        )


class _Probe:
    """Time that answers with numbers of every magnitude, the same for the same seed, and keeps what it was given.

    Attributes:
        taken: the states that it was given.
        given: all else.
        kept: the states after its answers.
    """

    def __init__(self, like: Tensor, seed: int) -> None:
        self.like, self.generator = like, torch.Generator().manual_seed(derive_seed(0, "answers of time", seed))
        self.taken, self.given, self.kept = list[Tensor](), list[Tensor](), list[Tensor]()

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        self.given += [a, b]
        self.kept.append(self._answer(h))
        return self.kept[-1]

    recur_complex = recur

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        self.given.append(x)
        window = torch.cat([self._answer(before), x.unsqueeze(1)], 1)
        self.kept.append(window[:, 1:])
        return window

    def _answer(self, state: Tensor) -> Tensor:
        self.taken.append(state)
        return _of_every_magnitude(state.shape, self.like, self.generator).to(state.dtype)


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
    """Return whether two tensors agree to a tolerance, which is one of their largest number where that exceeds 1."""
    largest = torch.where(other.isfinite(), other, 0.0).abs().amax().clamp_min(1).item() if other.numel() else 1.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _of_every_magnitude(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw numbers of both signs whose exponents are uniform over most of what the dtype has."""
    exponent = 0.9 * math.log2(torch.finfo(like.dtype).max)
    sign, power = 2 * torch.rand(2, *shape, generator=generator, dtype=torch.float64) - 1
    return (sign.sign() * (power * exponent).exp2()).to(like)


def _is_result(result: Any) -> bool:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list)):
        return False
    return all(isinstance(part, Tensor) for part in (result[0], *result[1]))


def _kinds(result: Any) -> str:
    if not isinstance(result, tuple | list):
        return f"a {type(result).__name__}"
    return f"({', '.join(_kinds(part).removeprefix('a ') for part in result)})"
