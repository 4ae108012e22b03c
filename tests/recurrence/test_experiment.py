"""Cells whose step violates the contract are rejected when a module is built, with the observed values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from recurl.core.errors import ArgumentError
from recurl.modules import CellModule
from recurl.recurrence import CELLS, ONE_STEP, Cell, Sizes
from recurl.recurrence.experiment import size_options
from tests.own_cells import OWN, VARIANTS


class Sum(Cell):
    """A valid cell."""

    def parameters(self, sizes):
        return {"weight": (sizes.hidden_size, sizes.input_size)}

    def step(self, x, states, weight):
        h = 0.5 * states[0] + F.linear(x, weight)
        return h, (h,)


class Grows(Sum):
    def step(self, x, states, weight):
        h, _ = super().step(x, states, weight)
        return h, (torch.cat([h, h], -1),)


class ColumnLayout(Sum):
    def step(self, x, states, weight):
        h, states = super().step(x, states, weight)
        return h[:, :2], states


class Complex(Sum):
    def step(self, x, states, weight):
        h, _ = super().step(x, states, weight)
        return h, (torch.complex(h, h),)


class Counts(Sum):
    def __init__(self):
        self.steps = 0

    def step(self, x, states, weight):
        self.steps += 1
        return super().step(x, states, weight)


class CountsInASlot(Counts):
    __slots__ = ("steps",)


class Remembers(Sum):
    last: ClassVar[list[float]] = [0.0]

    def step(self, x, states, weight):
        h = F.linear(x, weight) + self.last[0]
        self.last[0] = h.sum()
        return h, (h,)


class Lags(Sum):
    """Depends on a number from the previous call."""

    last: ClassVar[list[float]] = [0.0]

    def step(self, x, states, weight):
        h = F.linear(x, weight) + self.last[0]
        self.last[0] = x.mean().item()
        return h, (h,)


class Keeps(Sum):
    def step(self, x, states, weight):
        h = F.linear(x, weight) + getattr(self, "mean", 0.0)
        self.mean = x.mean().item()
        return h, (h,)


class Clamps(Sum):
    def step(self, x, states, weight):
        weight.clamp_(-0.1, 0.1)
        return super().step(x, states, weight)


class Lonely(Sum):
    def step(self, x, states, weight):
        return F.linear(x, weight)


class Bare(Sum):
    def step(self, x, states, weight):
        h = F.linear(x, weight)
        return h, h


class Empty(Sum):
    def step(self, x, states, weight):
        return F.linear(x, weight), (None,)


class Doubled(Sum):
    state_names = ("h", "h")


class Unnamed(Sum):
    def state_shapes(self, sizes):
        return ((5,), (5,))


class Spelt(Sum):
    state_names = "hc"


class Stateless(Sum):
    state_names = ()

    def step(self, x, states, weight):
        return F.linear(x, weight), ()


class Flat(Sum):
    def state_shapes(self, sizes):
        return (5,)


class Owing(Sum):
    def state_shapes(self, sizes):
        return ((-5,),)


class Lazy(Sum):
    def __init__(self):
        self.lazy = torch.nn.Linear(5, 5)

    def step(self, x, states, weight):
        h = self.lazy(states[0]) + F.linear(x, weight)
        return h, (h,)


class Tuned(Sum):
    def __init__(self):
        self.scale = torch.nn.Parameter(torch.ones(()))


class Negative(Sum):
    def parameters(self, sizes):
        return {"weight": (sizes.hidden_size, -1)}


class Draws(Sum):
    def step(self, x, states, weight):
        h = F.dropout(F.linear(x, weight) + states[0], 0.5)
        return h, (h,)


class Overwrites(Sum):
    def step(self, x, states, weight):
        h = states[0].add_(F.linear(x, weight))
        return h, (h,)


class Centred(Sum):
    def step(self, x, states, weight):
        h, _ = super().step(x - x.mean(0), states, weight)
        return h, (h,)


class PeeksAtStates(Sum):
    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(torch.full_like(states[0], 0.5), F.linear(x, weight).where(states[0] > 0, 0), states[0])
        return h, (h,)


class Leaks(Sum):
    """Reads the state before each token from the previous token, even across the starts of sequences."""

    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(torch.full_like(states[0], 0.5), F.linear(x, weight), states[0])
        return h + torch.cat([states[0][:1], h[:-1]]) if len(x) > 3 else h + states[0], (h,)


class Explodes(Sum):
    decays = True

    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(1 + F.linear(x, weight).square(), F.linear(x, weight), states[0])
        return h, (h,)


class Alternates(Explodes):
    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(-F.linear(x, weight).sigmoid(), F.linear(x, weight), states[0])
        return h, (h,)


class Spirals(Sum):
    decays = True

    def state_shapes(self, sizes):
        return ((sizes.hidden_size, 2),)

    def step(self, x, states, weight, *, time=ONE_STEP):
        entering = F.linear(x, weight).unsqueeze(-1).expand_as(states[0])
        h = time.recur_complex(torch.tensor([0.8, 0.8], dtype=x.dtype).expand(5, 2), entering, states[0])
        return h[..., 0], (h,)


class RecursFromStarts(Sum):
    """Names a state that it doesn't pass to time.remember or time.attend."""

    read_at_starts = ("h",)

    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(torch.full_like(states[0], 0.5), F.linear(x, weight), states[0])
        return h, (h,)


class WritesFromStarts(Sum):
    read_at_starts = ("h",)
    states_at_ends = ("h",)

    def state_shapes(self, sizes):
        return ((1, sizes.hidden_size, 1),)

    def step(self, x, states, weight, *, time=ONE_STEP):
        key = F.linear(x, weight).unsqueeze(1)
        one = torch.ones_like(key[..., :1])
        read, h = time.remember(key, key, one, -one[..., 0], one[..., 0], states[0])
        return read.flatten(1).expand(-1, key.shape[-1]), (h,)


def build(cell: type[Cell]) -> CellModule:
    return CellModule(cell, 4, 5, in_key="x", out_key="y")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Grows, r"states of unchanged shapes, here \[\(3, 5\), \(3, 5\)\]; .*returned \[\(3, 5\), \(3, 10\)\]"),
        (ColumnLayout, r"must return features \[rows, hidden_size\].*returned \[\(3, 2\), \(3, 5\)\]"),
        (Complex, "must keep dtype.*returned the state 'h' as torch.complex64.*as pairs of real ones"),
        (Counts, r"must not store anything in the cell; .*had the attributes \{'steps': 1\}.*and \{'steps': 3\} after"),
        (
            CountsInASlot,
            r"must not store anything in the cell; .*had the attributes \{'steps': 1\}.*and \{'steps': 3\} after",
        ),
        (Remembers, "must be a function of input.*called twice with the same inputs, .*and the features differed by"),
        (
            Lags,
            "must be a function of input.*same inputs, and once with others in between, and the features differed by",
        ),
        (Keeps, r"must not store anything in the cell; .*had the attributes \{'mean': .*and \{'mean': .* after"),
        (Clamps, "must not change its inputs; .*changed the parameter 'weight' in place"),
        (Lonely, r"must return two values, the features and a tuple of the states.*step\(\) returned a Tensor"),
        (Bare, r"must return two values, .*step\(\) returned \(Tensor, Tensor\)"),
        (Empty, r"must return two values, .*step\(\) returned \(Tensor, \(NoneType\)\)"),
        (Doubled, r"states of .*Doubled must have distinct names in a non-empty tuple; .* \('h', 'h'\)"),
        (Spelt, "states of .*Spelt must have distinct names in a non-empty tuple; .* 'hc'"),
        (Stateless, r"states of .*Stateless must have distinct names in a non-empty tuple; .* \(\)"),
        (Unnamed, r"state_shapes\(\) must return one shape for each of state_names, \(h\), .* \(\(5,\), \(5,\)\)"),
        (
            Flat,
            r"state_shapes\(\) must return one shape for .* as a tuple of tuples of non-negative integers; got \(5,\)",
        ),
        (Owing, r"state_shapes\(\) must return one shape for .* non-negative integers; got \(\(-5,\),\)"),
        (Negative, r"must give shapes as tuples of non-negative integers; got \(5, -1\) for 'weight'"),
        (Draws, r"must be a function of input.*the features differed by .*Don't draw random numbers"),
        (Overwrites, r"must not change its inputs; .*changed the state 'h' in place"),
        (Centred, r"must not depend on each other; the features of .*in a row when the others changed"),
        (
            PeeksAtStates,
            r"must give the same results over a sequence as step by step; the features.*at step [123] of 6",
        ),
        (
            Leaks,
            r"must give the same results over a sequence.*the features.*at step 4 of 6, the second half of which",
        ),
        (
            Lazy,
            r"Lazy\(.*\) stores the Linear 'lazy' as an attribute, which optimizers, .to\(\) and checkpoints don't see",
        ),
        (Tuned, r"stores the Parameter 'scale' as an attribute"),
        (
            RecursFromStarts,
            r"must pass h to time.remember or time.attend, and not use them otherwise. With one of 3 states",
        ),
        (Explodes, r"declares \(decays = True\) that a is between 0 and 1; its step gave a from 1.* to "),
        (Alternates, r"that a is between 0 and 1; its step gave a from -0\."),
        (Spirals, r"that a is between 0 and 1; its step gave a from 1\.13137 to 1\.13137"),
    ],
)
def test_broken_promises(cell: type[Cell], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(cell)


@pytest.mark.parametrize(
    "cell", [Sum(), WritesFromStarts(), *CELLS.values(), *OWN.values(), *VARIANTS.values()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sound_cells_pass(cell: Cell, dtype: torch.dtype) -> None:
    for options in ({}, {"bias": False} if "fastweights" not in cell.name.lower() and cell.name[:5] != "tests" else {}):
        CellModule(cell, 6, 8, 2, in_key="x", out_key="y", dtype=dtype, **options)


class Deeper(Sum):
    """Draws random numbers if its input is as wide as its features."""

    def step(self, x, states, weight):
        h, states = super().step(x, states, weight)
        return (h + torch.randn_like(h) if x.shape == h.shape else h), states


class Timed(Sum):
    """A valid step with time; invalid cells override parts of it."""

    def state_shapes(self, sizes):
        return (sizes.hidden_size,), (2, sizes.hidden_size)

    state_names = ("h", "window")

    def reads(self, state):
        return state

    def gate(self, state):
        return torch.ones_like(state)

    def returns(self, state):
        return state

    def features(self, before, after):
        return after

    def step(self, x, states, weight, *, time=ONE_STEP):
        entering = F.linear(x, weight) * self.gate(states[0])
        window = time.window(entering, states[1])
        h = time.recur(torch.full_like(states[0], 0.5), window.sum(1), self.reads(states[0]))
        return self.features(states[0], h), (self.returns(h), window[:, 1:])


class ReturnsClamped(Timed):
    def returns(self, state):
        return state.clamp(-5.0, 5.0)


class ReturnsClampedFarAway(Timed):
    def returns(self, state):
        return state.clamp(max=1e20)


class ReturnsGated(Timed):
    def returns(self, state):
        return state * (state.abs() < 30.0)


class ReadsClamped(Timed):
    def reads(self, state):
        return state.clamp(min=-1e5)


class GatesOnItself(Timed):
    def gate(self, state):
        return (state > -8.0).to(state.dtype)


class FadesByItself(Timed):
    def gate(self, state):
        return (-1e-7 * state.square()).exp()


class ShowsTheStateBefore(Timed):
    def features(self, before, after):
        return torch.where(before.abs() > 1e4, before, after)


class KeepsAWindowOfItsOwn(Timed):
    def step(self, x, states, weight, *, time=ONE_STEP):
        h, (h, window) = super().step(x, states, weight, time=time)
        return h, (h, torch.where(window.abs() > 100.0, 100.0, window))


class Passes(Timed):
    """Rearranges its states, changes their sign, and computes in another precision."""

    def step(self, x, states, weight, *, time=ONE_STEP):
        window = time.window(F.linear(x, weight), states[1].flip(1).flip(1))
        before = -states[0].double().unflatten(-1, (-1, 1)).flatten(1)
        h = -time.recur(torch.full_like(before, 0.5), -window.sum(1).double(), before).float()
        return h, (torch.cat(h.split(2, -1), -1), window[:, 1:])


@pytest.mark.parametrize("cell", [Timed(), Passes()], ids=str)
def test_states_may_be_moved_about(cell: Cell) -> None:
    CellModule(cell, 4, 5, in_key="x", out_key="y")


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        (ReturnsClamped, "passed time a state other than the one time returned in the previous step"),
        (ReturnsClampedFarAway, "passed time a state other than the one time returned in the previous step"),
        (ReturnsGated, "passed time a state other than the one time returned in the previous step"),
        (KeepsAWindowOfItsOwn, "passed time a state other than the one time returned in the previous step"),
        (ReadsClamped, "passed time a state other than the one time returned in the previous step"),
        (GatesOnItself, "read a state other than through time"),
        (FadesByItself, "read a state other than through time"),
        (ShowsTheStateBefore, "read a state other than through time"),
    ],
)
def test_states_are_touched_through_time_alone_at_every_size(cell: type[Cell], what: str) -> None:
    """Violations that three rows of standard normal numbers don't reveal."""
    sequence = rf"must give the same results over a sequence as step by step; .*{cell.__name__}"
    with pytest.raises(
        ArgumentError, match=rf"{sequence}|only through the methods of time.*step\(\) {what}\. If states"
    ):
        build(cell)


class NormsOfAllRows(Sum):
    def step(self, x, states, weight):
        h, _ = super().step(x, states, weight)
        h = h * (50.0 / h.norm()).clamp(max=1.0)
        return h, (h,)


class DecaysForSmallInputs(Sum):
    decays = True

    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(0.05 * F.linear(x, weight).abs(), F.linear(x, weight), states[0])
        return h, (h,)


def test_larger_inputs_and_states_are_tried() -> None:
    with pytest.raises(ArgumentError, match=r"must not depend on each other; the features of .*NormsOfAllRows"):
        build(NormsOfAllRows)
    with pytest.raises(ArgumentError, match=r"declares \(decays = True\) that a is between 0 and 1; its step gave a"):
        build(DecaysForSmallInputs)


class Amplifies(Sum):
    """A valid step whose features magnify rounding: that of sequences differs from that of single steps."""

    factor = 3e4

    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(torch.full_like(states[0], 0.5), F.linear(x, weight), states[0])
        rounded = h / 3 * 3 if time is ONE_STEP else h
        return 100.0 * (self.factor * rounded).sin(), (h,)


class AmplifiesMore(Amplifies):
    factor = 1e12


def test_rounding_that_a_step_amplifies_is_no_violation() -> None:
    build(Amplifies)
    with pytest.raises(ArgumentError, match="must give the same results over a sequence as step by step; the features"):
        build(AmplifiesMore)


@pytest.mark.parametrize(("hidden_size", "seed"), [(112, 13), (128, 16)])
def test_gtrxl_passes_whatever_its_initial_parameters(hidden_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    CellModule(CELLS["gtrxl"], 128, hidden_size, in_key="x", out_key="y")


def test_every_layer_is_tried() -> None:
    build(Deeper)
    with pytest.raises(ArgumentError, match=r"must be a function of input.*the features differed by"):
        CellModule(Deeper, 4, 5, 2, in_key="x", out_key="y")


class Single(Sum):
    def step(self, x, states, weight):
        h, states = super().step(x, states, weight)
        return h.float(), states


class Solves(Sum):
    def step(self, x, states, weight):
        h, states = super().step(x, states, weight)
        return torch.linalg.solve(torch.eye(5, dtype=h.dtype), h.unsqueeze(-1)).squeeze(-1), states


def test_shapes_and_dtypes_are_tried_again_in_another_dtype() -> None:
    module = build(Single)
    with pytest.raises(
        ArgumentError, match=r"must keep dtype.*torch\.float64 on cpu; .*the features as torch\.float32"
    ):
        module.double()
    sound = build(Sum)
    with torch.no_grad():
        sound.net.weight.fill_(torch.nan)
    assert sound.double().net.dtype == torch.float64  # whatever the values of the parameters
    assert build(Solves).half().net.dtype == torch.float16  # which torch.linalg doesn't support on the CPU


def test_the_experiment_leaves_the_random_numbers_alone() -> None:
    class Noisy(Sum):
        def step(self, x, states, weight):
            torch.rand(3)
            return super().step(x, states, weight)

    found = []
    for cell in (Sum, Noisy):
        torch.manual_seed(0)
        module = CellModule(cell, 4, 5, in_key="x", out_key="y")
        found.append((module.net.weight, torch.rand(2)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@dataclass(frozen=True, repr=False)
class Thirds(Sum):
    groups: int = 3
    window_size: int = 1000

    def state_shapes(self, sizes):
        assert sizes.hidden_size % self.groups == 0
        return ((self.window_size * sizes.hidden_size,),)

    def step(self, x, states, weight):
        h = states[0][:, : weight.shape[0]] + F.linear(x, weight)
        return h, (torch.cat([h, states[0][:, weight.shape[0] :]], 1),)


def test_the_options_are_named_that_states_grow_with() -> None:
    """An option may have no half that the cell accepts."""
    assert size_options(Thirds(), Sizes(2, 3)) == ["window_size"]
    assert size_options(Sum(), Sizes(2, 3)) == []
    CellModule(Thirds(), 2, 3, in_key="x", out_key="y")
    with pytest.raises(ArgumentError, match="lower window_size or the hidden size"):
        CellModule(Thirds(window_size=10**12), 2, 3, in_key="x", out_key="y")


def test_without_numbers_nothing_is_tried() -> None:
    CellModule(Draws, 4, 5, in_key="x", out_key="y", device="meta")


def test_a_class_that_is_defined_again_is_tried_again() -> None:
    def define(noise: float) -> type[Cell]:
        class Edited(Sum):
            def step(self, x, states, weight):
                h = F.linear(x, weight) + noise * torch.randn(())
                return h, (h,)

        return Edited

    build(define(0.0))
    with pytest.raises(ArgumentError, match="must be a function of input"):
        build(define(1.0))


class ResetByLargeInputs(Sum):
    def step(self, x, states, weight, *, time=ONE_STEP):
        h = time.recur(torch.full_like(states[0], 0.5), F.linear(x, weight), states[0])
        return h, (torch.where(x[:, :1] > 500, 0.0, h),)


def test_a_state_that_large_inputs_reach_is_refused() -> None:
    with pytest.raises(ArgumentError, match="passed time a state other than the one time returned"):
        build(ResetByLargeInputs)


class FourierFeatures(Sum):
    """A valid cell whose features amplify rounding of a product, which may depend on the number of rows."""

    def step(self, x, states, weight):
        product = F.linear(x, weight)
        return torch.sin(1000 * product), (torch.tanh(product + states[0]),)


def test_features_that_amplify_rounding_are_no_dependence_on_rows() -> None:
    build(FourierFeatures)
