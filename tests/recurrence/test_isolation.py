"""NaN and infinities in one segment don't reach another: cuts select values and never multiply by zero."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from recurl.recurrence import BACKENDS, Backend, Options, Support, run_stack, step_stack
from recurl.recurrence.cpu import instruction_sets

from .contract import KNOWN, Case

NAMES = ["reference", "pad", "loop", "cpu", "scan"]
OWN = [(name, {"cell": cell, "layers": 2}) for name in ("loop", "scan") for cell in ("own_mingru", "fastweights")]
WHERE = ["x", "states", "gradients"]
OPTIONS = [
    {"cell": "lstm"},
    {"cell": "gru"},
    {"cell": "lstm", "layers": 2, "directions": 2},
    {"cell": "gru", "layers": 2},
    {"cell": "lstm", "projection": 4},
]
STEPS = [
    {"cell": "lstm", "layers": 2},
    {"cell": "gru", "layers": 2},
    {"cell": "lstm", "projection": 4},
]
NAN, INF = float("nan"), float("inf")
POISONED = [
    *(("x", NAN), ("states", INF), ("gradients", NAN)),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("x", INF), ("states", NAN), ("gradients", INF))),
]


def outputs_and_gradients(
    case: Case, backend: Backend, sick: Tensor | None = None, poison: float = 0.0, graph: bool = False
) -> dict[str, Tensor]:
    """Per-token results: features, states after, gradients of x and of the stored states.

    Incoming gradients are ``poison`` at the tokens ``sick``.
    """
    arguments = (KNOWN[case.cell], case.weights, case.x, case.states, case.boundaries, None, case.options)
    features, states = run_stack(backend, *arguments)
    outputs = {"features": features, **{f"after{k}": state for k, state in enumerate(states)}}
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(value.shape, generator=generator).to(value.dtype) for value in outputs.values()]
    if sick is not None:
        grads = [grad.masked_fill(sick.reshape(-1, *(1 for _ in grad.shape[1:])), poison) for grad in grads]
    inputs = {"grad x": case.x, **{f"grad state{k}": state for k, state in enumerate(case.states)}}
    found = torch.autograd.grad(list(outputs.values()), list(inputs.values()), grads, create_graph=graph)
    return {name: value.detach() for name, value in (outputs | dict(zip(inputs, found, strict=True))).items()}


def strangers_reached(
    backend: Backend, options: dict, where: Collection[str], poison: float, graph: bool = False
) -> list[str]:
    """Return what differs outside a segment when its ``where`` are set to ``poison``, for three of the segments."""
    clean = outputs_and_gradients(Case(**options), backend, graph=graph)
    segments = Case(**options).boundaries.segment_ids
    reached: list[str] = []
    for segment in (0, int(segments[-1]) // 2, int(segments[-1])):
        here, case = segments == segment, Case(**options)
        with torch.no_grad():
            for name, values in (("x", (case.x,)), ("states", case.states)):
                for value in values if name in where else ():
                    value[here] = poison
        found = outputs_and_gradients(case, backend, here if "gradients" in where else None, poison, graph)
        reached += [name for name, value in clean.items() if not torch.equal(found[name][~here], value[~here])]
        assert any(not torch.equal(found[name][here], value[here]) for name, value in clean.items())
    return reached


@pytest.mark.slow
@pytest.mark.parametrize(("where", "poison"), POISONED)
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, options) for name in NAMES for options in OPTIONS), *OWN],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_a_segment_reaches_no_other(name: str, options: dict, where: str, poison: float) -> None:
    backend = BACKENDS.choose(name, Support(KNOWN[options["cell"]], torch.device("cpu")))
    for layout in ({"shape": (3, 11)}, {"shape": (40,), "dtype": torch.float32}):
        assert strangers_reached(backend, options | layout, [where], poison) == []


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("isa", instruction_sets())
def test_nor_in_full_tiles(isa: str, cell: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every build of the cpu backend processes many segments in registers at once."""
    backend = BACKENDS.choose("cpu", Support(KNOWN[cell], torch.device("cpu")))
    monkeypatch.setattr(backend.kernels, "instruction_set", isa)
    options = {"cell": cell, "shape": (30, 9), "hidden": 17, "dtype": torch.float32}
    assert strangers_reached(backend, options, [where], float("nan")) == []


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", ["reference", "loop", "scan"])
def test_nor_in_gradients_to_be_differentiated(name: str, cell: str, where: str) -> None:
    backend = BACKENDS.choose(name, Support(KNOWN[cell], torch.device("cpu")))
    assert strangers_reached(backend, {"cell": cell}, [where], float("nan"), graph=True) == []


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", ["loop", "cpu", "scan"])
def test_nor_where_gates_are_computed_again(name: str, cell: str) -> None:
    backend = BACKENDS.choose(name, Support(KNOWN[cell], torch.device("cpu")))
    options = {"cell": cell, "options": Options(recompute=True)}
    assert strangers_reached(backend, options, ["x"], float("nan")) == []


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [3, 30])
@pytest.mark.parametrize("options", STEPS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_row_of_a_step_reaches_no_other(options: dict, rows: int, fused: bool, with_gradients: bool) -> None:
    """A state that is replaced doesn't reach its own row either."""
    case = Case(**options, shape=(rows,))
    is_init = torch.arange(rows) % 3 == 1
    sick = torch.arange(rows) == 0

    def run(x: Tensor, states: tuple[Tensor, ...]) -> list[Tensor]:
        inputs = [value.detach().requires_grad_(with_gradients) for value in (x, *states)]
        with torch.set_grad_enabled(with_gradients):
            features, after = step_stack(
                KNOWN[case.cell], case.weights, inputs[0], tuple(inputs[1:]), None, fused, is_init
            )
        outputs = [features, *after]
        if not with_gradients:
            return outputs
        return [
            *outputs,
            *torch.autograd.grad(sum((o.square()[~sick].sum() for o in outputs), torch.zeros(())), inputs),
        ]

    expected = run(case.x, case.states)
    x, states = case.x.detach().clone(), [state.detach().clone() for state in case.states]
    x[sick] = torch.nan
    for state in states:
        state[sick], state[is_init] = torch.nan, torch.nan
    for found, clean in zip(run(x, tuple(states)), expected, strict=True):
        assert torch.equal(found[~sick], clean[~sick])
