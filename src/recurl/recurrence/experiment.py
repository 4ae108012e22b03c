"""Contract checks for the step of user-defined cells, run on a few random rows when a network is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recurl.core.devices import check_memory, total_memory
from recurl.core.errors import ArgumentError
from recurl.core.seeding import derive_seed
from recurl.core.torch_compat import is_compiling
from recurl.recurrence.cells import Cell, OneStep, Sizes, States
from recurl.recurrence.cells.attention import Attention
from recurl.sequences.index import Boundaries

_ROWS = 3
_COPIES = 28  # of the states, at the peak of the checks of GTrXL
_SCALES = (1.0, 1e-2, 10.0, 100.0)
"""Scales of the inputs and states that are checked; half precision uses only the first."""
_DRAWS = 4
_passed: set[tuple[Any, ...]] = set()

_Step = Callable[[Tensor, States], tuple[Tensor, States]]


def check_step(cell: Cell, weights: Any, sizes: Sizes, *, shapes_only: bool = False) -> None:
    """Check on random inputs that the step of a cell satisfies the contract of :class:`Cell`.

    The check is skipped if the cell has passed it with these sizes before, or if its weights have no values (on
    ``"meta"`` or while tracing).

    Args:
        cell: the cell.
        weights: parameters of one layer, as returned by ``cell.pack``.
        sizes: sizes of that layer.
        shapes_only: check only shapes and dtypes, which don't depend on the values of the parameters.

    Raises:
        ArgumentError: the step violates the contract; the message shows how. Or its states don't fit into memory.
    """
    _check_no_parameters(cell)
    like: Tensor = next(weight for weight in weights if weight is not None).detach()
    key = (type(cell), cell.name, sizes, like.dtype, like.device.type)  # the class itself, as it may be redefined
    if key in _passed or like.is_meta or type(like) is not Tensor or is_compiling():
        return
    generator = torch.Generator().manual_seed(derive_seed(0, "trial of a cell"))
    shapes = [(sizes.input_size,), *cell.state_shapes(sizes)]
    _check_memory(cell, sizes, like)
    drawn = [torch.randn(2, _ROWS, *shape, generator=generator, device="cpu").to(like) for shape in shapes]
    (x, *states), others = zip(*drawn, strict=True)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial = _Checks(cell, weights, sizes, others)
        if shapes_only:
            trial.check_form(x, tuple(states))
            return
        trial.run(x, tuple(states))
    _passed.add(key)


def size_options(cell: Cell, sizes: Sizes) -> list[str]:
    """Return the names of a cell's options that its states grow with; none if the cell isn't a dataclass.

    Example:
        >>> from recurl.recurrence import load_cell
        >>> size_options(load_cell("mamba2(state_size=64)"), Sizes(8, 8)), size_options(load_cell("gru"), Sizes(8, 8))
        (['state_size', 'expand', 'conv_width'], [])
    """
    given: Any = cell  # whose type doesn't say that it is a dataclass

    def grows_with(name: str) -> bool:
        value = getattr(cell, name)
        if type(value) is not int or value < 2:
            return False
        try:
            half: Cell = replace(given, **{name: value // 2})
            return numbers_in(half.state_shapes(sizes)) < numbers_in(cell.state_shapes(sizes))
        except (ValueError, AssertionError, ArithmeticError):  # the cell refuses half of it
            return False

    return [field.name for field in fields(cell) if field.init and grows_with(field.name)] if is_dataclass(cell) else []


def numbers_in(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the number of numbers in tensors of these shapes."""
    return sum(map(math.prod, shapes))


def memory_of_check(cell: Cell, sizes: Sizes, itemsize: int) -> int:
    """Return the bytes that :func:`check_step` needs."""
    return _COPIES * _ROWS * numbers_in([(sizes.input_size,), *cell.state_shapes(sizes)]) * itemsize


def _check_memory(cell: Cell, sizes: Sizes, like: Tensor) -> None:
    needed = memory_of_check(cell, sizes, like.itemsize)
    device, window = str(like.device), getattr(cell, "window", None)

    def advice() -> str:
        if isinstance(window, int):
            return f"a window of {window * total_memory(device) // max(1, needed):,} fits"
        return f"lower {' or '.join([*size_options(cell, sizes), 'the hidden size'])}"

    check_memory(device, {f"steps of {_ROWS} rows of {cell}": needed}, advice)


def _check_no_parameters(cell: Cell) -> None:
    for name, value in cell.attributes.items():
        if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad):
            raise ArgumentError(
                f"A cell must declare its parameters in parameters() and take them in step(); {cell} stores the "
                f"{type(value).__name__} {name!r} as an attribute, which optimizers, .to() and checkpoints don't see."
            )


class _Checks:
    """Checks of one cell.

    Args:
        cell: the cell.
        weights: its parameters.
        sizes: its sizes.
        others: a second input and states, used for steps in between and for other rows.
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
            scaled = _Checks(self.cell, self.weights, self.sizes, [other * scale for other in self.others])
            scaled._check_up_to_rounding(x * scale, tuple(state * scale for state in states))
        if self.cell.takes_time:
            self._check_state_access(x, states)

    def _check_up_to_rounding(self, x: Tensor, states: States) -> None:
        """Check rows and time; what holds in float64 has only been rounded, by steps that amplify it at this scale."""
        try:
            self._check_rows_and_time(x, states)
        except ArgumentError:
            if x.dtype == torch.float64:
                raise
            weights = [weight if weight is None else weight.double() for weight in self.weights]
            others = [other.double() for other in self.others]
            precise = _Checks(self.cell, weights, self.sizes, others)
            try:
                precise._check_rows_and_time(x.double(), tuple(state.double() for state in states))
                return
            except (RuntimeError, TypeError, ArgumentError):  # the first two: no float64 in the cell or on the device
                pass
            raise

    def _check_rows_and_time(self, x: Tensor, states: States) -> None:
        self._check_rows(x, states)
        if self.cell.takes_time:
            self._check_sequence(x, states)
            if self.cell.decays:
                self._step(x, states, time=_DecayCheck(self.cell))

    def _step(self, x: Tensor, states: States, **time: Any) -> tuple[Tensor, States]:
        result: Any = self.cell.step(x, states, *self.weights, **time)
        if not _is_result(result):
            raise ArgumentError(
                "A step must return two values, the features and a tuple of the states, as in return features, (h,); "
                f"{self.cell}.step() returned {_type_names(result)}."
            )
        return result

    def _tensors(self, x: Tensor, states: States) -> dict[str, Tensor]:
        """Return all inputs of a step, keyed by their names in error messages."""
        weights = zip(self.cell.parameter_names, self.weights, strict=False)
        parameters = {f"the parameter {name!r}": weight for name, weight in weights if weight is not None}
        return {"x": x, **dict(zip(self.names[1:], states, strict=True)), **parameters}

    def check_form(self, x: Tensor, states: States) -> None:
        features, after = self._step(x, states)
        expected = [(_ROWS, self.sizes.output_size), *(tuple(state.shape) for state in states)]
        found = [tuple(value.shape) for value in (features, *after)]
        if found != expected:
            raise ArgumentError(
                f"A step must return features [rows, hidden_size] and states of unchanged shapes, here {expected}; "
                f"{self.cell}.step() returned {found}. Define Cell.state_shapes for states of other shapes."
            )
        for name, value in zip(self.names, (features, *after), strict=True):
            if value.dtype != x.dtype or value.device != x.device:
                raise ArgumentError(
                    f"A step must keep dtype and device, {x.dtype} on {x.device}; {self.cell}.step() returned {name} "
                    f"as {value.dtype} on {value.device}. Store complex numbers as pairs of real ones."
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
                    f"with the same inputs, and once with others in between, and {name} differed by "
                    f"{_difference(one, other):.1e}. Don't draw random numbers, and store in states whatever must "
                    "persist."
                )
        self._check_attributes(attributes)

    def _check_attributes(self, attributes: str) -> None:
        if repr(self.cell.attributes) != attributes:
            raise ArgumentError(
                f"A step must not store anything in the cell; {self.cell.name} had the attributes {attributes} before "
                f"steps and {self.cell.attributes!r} after. Store in states whatever must persist."
            )

    def _check_rows(self, x: Tensor, states: States) -> None:
        """Replace all rows but the first; their number stays the same, so that products are rounded alike."""
        features, after = self._step(x, states)
        given = zip((x, *states), self.others, strict=True)
        other_x, *other_states = (torch.cat([one[:1], other[1:]]) for one, other in given)
        changed, after_changed = self._step(other_x, tuple(other_states))
        for name, one, other in zip(self.names, (features, *after), (changed, *after_changed), strict=True):
            if not _equal(one[:1], other[:1], _tolerance(x)):
                raise ArgumentError(
                    f"The rows of a step must not depend on each other; {name} of {self.cell}.step() differed by "
                    f"{_difference(one[:1], other[:1]):.1e} in a row when the others changed."
                )

    def _check_sequence(self, x: Tensor, states: States) -> None:
        """Compare a run over two segments with single steps; states stored inside a segment must have no effect.

        States that the cell has at the ends of segments only are zero elsewhere; those that it reads at starts only
        are given for these alone.
        """
        at_ends = {f"the state {name!r}" for name in self.cell.states_at_ends}
        from recurl.recurrence.segments import Segments  # noqa: PLC0415 - only for cells that take time

        tokens, count = torch.cat([x, self.others[0]]), 2 * _ROWS
        stored = [torch.cat([one, other]) for one, other in zip(states, self.others[1:], strict=True)]
        starts = torch.arange(count, device=x.device) % _ROWS == 0
        given = [torch.where(starts.view(-1, *(1,) * (one.ndim - 1)), one, torch.nan) for one in stored]
        for number, name in enumerate(self.cell.state_names):
            if name in self.cell.read_at_starts:
                given[number] = stored[number][::_ROWS]
        time = Segments(Boundaries(starts, (count,)), "loop")
        try:
            features, after = self._step(tokens, tuple(given), time=time)
        except (RuntimeError, ArgumentError) as error:
            if not self.cell.read_at_starts:
                raise
            raise ArgumentError(
                f"States in read_at_starts may come from every S-th token only: {self.cell}.step() must pass "
                f"{', '.join(self.cell.read_at_starts)} to time.remember or time.attend, and not use them otherwise. "
                f"With one of {_ROWS} states it raised: {error}"
            ) from error
        carried: States = ()
        for token in range(count):
            if token % _ROWS == 0:
                carried = tuple(state[token : token + 1] for state in stored)
            y, carried = self._step(tokens[token : token + 1], carried)
            inside = token % _ROWS < _ROWS - 1
            for name, whole, stepped in zip(self.names, (features, *after), (y, *carried), strict=True):
                if inside and name in at_ends:
                    stepped = torch.zeros_like(stepped)
                if not _equal(whole[token : token + 1], stepped, _tolerance(x)):
                    raise ArgumentError(
                        f"A step with time must give the same results over a sequence as step by step; {name} of "
                        f"{self.cell}.step() differed by {_difference(whole[token : token + 1], stepped):.1e} at step "
                        f"{token + 1} of {count}, the second half of which was another sequence. It must access its "
                        "states only through the methods of time."
                    )

    def _check_state_access(self, x: Tensor, states: States) -> None:
        """Check that states are accessed only through time, with inputs and states of all magnitudes.

        Two steps with different states get the same results from time, so they must behave alike.
        """
        for draw in range(2 * _DRAWS):
            generator = torch.Generator().manual_seed(derive_seed(0, "states", draw))
            if draw >= _DRAWS:
                x = _random_magnitudes(x.shape, x, generator)
            before = tuple(_random_magnitudes(state.shape, x, generator) for state in states)
            first, second = _Probe(x, draw), _Probe(x, draw)
            features, after = self._step(x, before, time=first)
            again, _ = self._step(x, after, time=second)
            one, other = [features, *first.inputs], [again, *second.inputs]
            if len(one) != len(other) or not all(_equal(a, b, 0.0) for a, b in zip(one, other, strict=True)):
                self._refuse_state_access("read a state other than through time")
            for returned, passed in zip(first.states_out, second.states_in, strict=True):
                rtol = 16 * torch.finfo(x.dtype).eps
                if not torch.allclose(returned, passed, rtol=rtol, atol=0.0, equal_nan=True):
                    self._refuse_state_access(
                        "passed time a state other than the one time returned in the previous step"
                    )

    def _refuse_state_access(self, what: str) -> None:
        raise ArgumentError(
            "A step with time must access its states only through the methods of time: pass the states to them, read "
            f"their results, and return these as the new states; {self.cell}.step() {what}. If states are clamped or "
            "gated by their own values, define the step without time."
        )


class _Probe:
    """Implementation of ``Time`` that records its arguments and returns seeded random numbers of all magnitudes.

    Attributes:
        states_in: the states passed to it.
        inputs: all other arguments.
        states_out: the states after its results.
    """

    def __init__(self, like: Tensor, seed: int) -> None:
        self.like, self.generator = like, torch.Generator().manual_seed(derive_seed(0, "answers of time", seed))
        self.states_in, self.inputs, self.states_out = list[Tensor](), list[Tensor](), list[Tensor]()

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        self.inputs += [a, b]
        self.states_out.append(self._random_like(h))
        return self.states_out[-1]

    recur_complex = recur_max = recur

    def remember(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        before: Tensor,
        delta: bool = False,
    ) -> tuple[Tensor, Tensor]:
        del delta
        self.inputs += [query, key, value, log_decay, rate]
        self.states_out.append(self._random_like(before))
        return _random_magnitudes(value.shape, self.like, self.generator), self.states_out[-1]

    def count(self, before: Tensor, modulus: int) -> Tensor:
        self.states_out.append(self._random_like(before))
        return self.states_out[-1]

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        self.inputs.append(x)
        window = torch.cat([self._random_like(before), x.unsqueeze(1)], 1)
        self.states_out.append(window[:, 1:])
        return window

    def attend(self, attention: Attention, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        self.inputs += attention
        window = self.window(inputs, before)
        return _random_magnitudes(attention.query.shape, self.like, self.generator), window[:, 1:]

    def _random_like(self, state: Tensor) -> Tensor:
        self.states_in.append(state)
        return _random_magnitudes(state.shape, self.like, self.generator).to(state.dtype)


class _DecayCheck(OneStep):
    """Implementation of ``Time`` for one step that checks the range of ``a``."""

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
                f"The cell {self.cell} declares (decays = True) that a is between 0 and 1; its step gave a from "
                f"{low:.6g} to {high:.6g}. Compute a as a sigmoid or exp(-positive), or set decays = False."
            )


def _tolerance(like: Tensor) -> float:
    return torch.finfo(like.dtype).eps ** 0.5


def _difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree to a tolerance, which scales with their largest number if that exceeds 1."""
    largest = torch.where(other.isfinite(), other, 0.0).abs().amax().clamp_min(1).item() if other.numel() else 1.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _random_magnitudes(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Sample numbers of both signs whose exponents are uniform over most of the dtype's range."""
    exponent = 0.9 * math.log2(torch.finfo(like.dtype).max)
    sign, power = 2 * torch.rand(2, *shape, generator=generator, dtype=torch.float64) - 1
    return (sign.sign() * (power * exponent).exp2()).to(like)


def _is_result(result: Any) -> bool:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list)):
        return False
    return all(isinstance(part, Tensor) for part in (result[0], *result[1]))


def _type_names(result: Any) -> str:
    if not isinstance(result, tuple | list):
        return f"a {type(result).__name__}"
    return f"({', '.join(_type_names(part).removeprefix('a ') for part in result)})"
