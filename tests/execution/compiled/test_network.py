"""A compiled network matches its modules, whether it compiles them or runs them as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torch.nn.utils import parametrize

from recurl.core.errors import ArgumentError, UsageError
from recurl.core.specs import Categorical as CategoricalSpec
from recurl.core.specs import Unbounded
from recurl.execution.compiled import CompiledNetwork
from recurl.execution.compiled import network as compiled
from recurl.execution.lowering import Entries, Network
from recurl.modules import (
    MLP,
    ActionDistribution,
    ActionPart,
    Categorical,
    CellModule,
    EGreedyModule,
    GRUModule,
    IndependentNormal,
    LearnedScale,
    LSTMModule,
    MaskedCategorical,
    NormalParamExtractor,
    ObservationNorm,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
)
from recurl.recurrence import LRUCell
from recurl.recurrence.cpu import instruction_sets
from recurl.sequences.mode import ExplorationType, set_exploration_type

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}
OBS, HIDDEN, ACTIONS = 5, 9, 3
ROWS = [1, 3, 8, 9, 40, 70]


@pytest.fixture(autouse=True)
def acting() -> Iterator[None]:
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        torch.manual_seed(0)
        yield


def root(rows: int, dtype: torch.dtype = torch.float32, layers: int = 1, **states: int) -> Entries:
    entries = {"observation": torch.randn(rows, OBS, dtype=dtype), "is_init": torch.arange(rows).unsqueeze(1) % 3 == 1}
    entries |= {key: torch.randn(rows, layers, size, dtype=dtype) for key, size in states.items()}
    entries["action_mask"] = torch.rand(rows, ACTIONS) < 0.5
    entries["action_mask"][:, 1] = True
    return Entries(entries, torch.Size([rows]))


def encoder() -> Mod:
    norm = ObservationNorm((OBS,), clip=1.5)
    norm.update(3 * torch.randn(20, OBS) + 1)
    return Mod(nn.Sequential(norm, MLP(OBS, 7, num_cells=[11])), ["observation"], ["embedding"])


def lstm(**options: Any) -> LSTMModule:
    return LSTMModule(
        7, HIDDEN, in_keys=["embedding", "h", "c"], out_keys=["memory", ("next", "h"), ("next", "c")], **options
    )


def gru(**options: Any) -> GRUModule:
    return GRUModule(7, HIDDEN, in_keys=["embedding", "h"], out_keys=["memory", ("next", "h")], **options)


def head(outputs: int, *more: nn.Module, keys: tuple[str, ...] = ("logits",), inputs: int = HIDDEN) -> Mod:
    return Mod(nn.Sequential(nn.Linear(inputs, outputs), *more), ["memory"], list(keys))


def actor(memory: nn.Module, distribution: type = Categorical, **options: Any) -> ProbabilisticActor:
    masked = "Masked" in distribution.__name__
    if distribution is TanhNormal:
        last = head(4, NormalParamExtractor(), keys=("loc", "scale"), inputs=memory.net.output_size)
        keys: Any = ["loc", "scale"]
        options["distribution_kwargs"] = {"low": torch.tensor([-1.0, -3.0]), "high": 2.0}
    else:
        last = head(ACTIONS, inputs=memory.net.output_size)
        keys = {"logits": "logits", "mask": "action_mask"} if masked else ["logits"]
    modules = Seq(encoder(), memory, last)
    return ProbabilisticActor(modules, keys, distribution_class=distribution, return_log_prob=True, **options)


def both(policy: nn.Module, entries: Entries) -> tuple[Entries, Entries, CompiledNetwork]:
    """Return the outputs of a compiled network, the same in its first and second call, and those of the modules."""
    network = CompiledNetwork(Network([policy]))
    results: list[Entries] = []
    for run in (network, network, Network([policy])):
        torch.manual_seed(7)
        results.append(run(entries.copy()))
        random = torch.rand(3)
    torch.manual_seed(7)
    Network([policy])(entries.copy())
    assert torch.equal(random, torch.rand(3))  # the generator has advanced equally far
    assert_close(results[0], results[1], 0.0)
    return results[1], results[2], network


def assert_close(found: Entries, expected: Entries, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Entries):
            assert_close(found[key], value, tolerance)
            continue
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        if value.is_floating_point() and tolerance:
            assert torch.equal(found[key].isneginf(), value.isneginf())
            value = value.masked_fill(value.isneginf(), 0.0)
            assert (found[key].masked_fill(found[key].isneginf(), 0.0) - value).norm() <= tolerance * value.norm(), key
        else:
            assert torch.equal(found[key], value), key


MEMORIES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lstm,
    "gru": gru,
    "two layers": lambda: gru(num_layers=2, bias=False),
    "projected": lambda: lstm(num_layers=2, proj_size=4),
}


def states_of(memory: nn.Module) -> dict[str, int]:
    return dict(zip(memory.state_keys, (memory.net.output_size, HIDDEN), strict=False))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_step_is_that_of_the_modules(name: str, rows: int) -> None:
    memory = MEMORIES[name]()
    entries = root(rows, layers=memory.net.num_layers, **states_of(memory))
    found, expected, network = both(actor(memory), entries)
    assert network.explain(entries)["cpp"] is None
    assert_close(found, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("action_space", ["one-hot", "categorical"])
def test_the_best_action_under_a_mask(action_space: str) -> None:
    values, entries = Seq(encoder(), gru(), head(ACTIONS, keys=("action_value",))), root(12, h=HIDDEN)
    masked = QValueActor(values, action_space=action_space, action_mask_key="action_mask")
    found, expected, network = both(masked, entries)
    assert network.explain(entries)["cpp"] == "QValueModule with a mask has no C++ implementation"
    assert_close(found, expected, TOLERANCE[torch.float32])


def test_float64() -> None:
    entries = root(11, torch.float64, h=HIDDEN, c=HIDDEN)
    found, expected, network = both(actor(lstm()).double(), entries)
    assert network.explain(entries)["cpp"] is None
    assert_close(found, expected, TOLERANCE[torch.float64])


def test_batches_of_any_dimensions() -> None:
    entries = root(6, h=HIDDEN)
    for batch in (torch.Size([2, 3]), torch.Size([])):
        shaped = {
            key: value[:1].reshape(value.shape[1:]) if batch == () else value.unflatten(0, batch)
            for key, value in entries.items()
        }
        found, expected, _ = both(actor(gru(), OneHotCategorical), Entries(shaped, batch))
        assert_close(found, expected, TOLERANCE[torch.float32])


def test_only_selected_outputs_are_written() -> None:
    policy = Seq(actor(gru()), selected_out_keys=["action", ("next", "h")])
    for entries in (root(4, h=HIDDEN), root(4, h=HIDDEN).set("logits", torch.zeros(4, ACTIONS))):
        found, expected, network = both(policy, entries)
        assert network.explain(entries)["cpp"] is None
        assert "memory" not in found
        assert_close(found, expected, TOLERANCE[torch.float32])


def unbounded(name: str) -> nn.Module:
    """Return an actor of real numbers without bounds, with a learned scale or one that depends on the state."""
    options: dict[str, Any] = {"return_log_prob": True}
    if name == "learned scale":
        keys, last = ["loc", "scale"], head(4, LearnedScale(4), keys=("loc", "scale"))
        options["distribution_class"] = IndependentNormal
    else:
        keys, last = ["outputs"], head(8, keys=("outputs",))
        part = ActionPart(Unbounded((2, 2) if name == "matrix" else 4))
        options |= {"distribution_class": ActionDistribution, "distribution_kwargs": {"parts": (part,)}}
    return ProbabilisticActor(Seq(encoder(), gru(), last), keys, **options)


@pytest.mark.parametrize("name", ["learned scale", "vector", "matrix"])
def test_greedy_actions_without_bounds_are_means(name: str) -> None:
    policy, entries = Seq(unbounded(name), selected_out_keys=["action", ("next", "h")]), root(9, h=HIDDEN)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        found, expected, network = both(policy, entries)
        assert network.explain(entries)["cpp"] is None
    assert_close(found, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["learned scale", "vector", "matrix"])
def test_samples_and_densities_without_bounds_are_those_of_the_modules(name: str) -> None:
    whole, entries = unbounded(name), root(9, h=HIDDEN)
    selected = Seq(whole, selected_out_keys=["action", "action_log_prob", ("next", "h")])
    for policy, kind in itertools.product((whole, selected), (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC)):
        with set_exploration_type(kind):
            found, expected, network = both(policy, entries)
            assert "in C++" in str(network.explain(entries)["cpp"])
        assert_close(found, expected, TOLERANCE[torch.float32])


# -- weights


def edits(policy: nn.Module) -> list[Callable[[], object]]:
    linear: Any = policy.module[0].module[0].module[1][0]
    memory: Any = policy.module[0].module[1].net
    return [
        lambda: linear.weight.mul_(1.5),
        lambda: memory.weight_hh_l0.data.add_(0.1),
        lambda: linear.bias.numpy().fill(0.3),
        lambda: policy.load_state_dict({name: value * 1.1 for name, value in policy.state_dict().items()}),
    ]


def test_edits_in_place_count_at_once() -> None:
    policy, entries = actor(lstm(), TanhNormal), root(5, h=HIDDEN, c=HIDDEN)
    network = CompiledNetwork(Network([policy]))
    before = network(entries.copy())["loc"]
    for edit in edits(policy):
        edit()
        torch.manual_seed(7)
        found = network(entries.copy())
        assert not torch.equal(found["loc"], before)
        before = found["loc"]
        assert_close(found, both(policy, entries)[0], 0.0)


@pytest.mark.parametrize("edit", ["data", "parameter", "module", "parametrization", "hook", "double"])
def test_replaced_modules_take_effect_in_the_next_network(edit: str) -> None:
    policy, entries = actor(gru()), root(5, h=HIDDEN)
    before = both(policy, entries)[0]["logits"]
    layers: Any = policy.module[0].module[2].module
    layer = layers[0]
    if edit == "data":
        layer.weight.data = torch.randn(ACTIONS, HIDDEN)
    elif edit == "parameter":
        layer.weight = nn.Parameter(torch.randn(ACTIONS, HIDDEN))
    elif edit == "module":
        layers[0] = nn.Linear(HIDDEN, ACTIONS)
    elif edit == "parametrization":
        parametrize.register_parametrization(layer, "weight", nn.Tanh())
    elif edit == "hook":
        layer.register_forward_hook(lambda module, args, result: 2 * result)
    else:
        policy.double()
        entries["observation"], entries["h"] = entries["observation"].double(), entries["h"].double()
    found, expected, _ = both(policy, entries)
    assert not torch.equal(found["logits"], before)
    assert_close(found, expected, TOLERANCE[torch.float32])


def test_memory_of_a_replaced_weight_lives_as_long_as_the_program() -> None:
    policy, entries = actor(gru()), root(5, h=HIDDEN)
    network = CompiledNetwork(Network([policy]))
    before = network(entries.copy())["logits"]
    for parameter in policy.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    assert torch.equal(network(entries.copy())["logits"], before)


# -- modules that aren't compiled


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch.nn's name
        return super().forward(input) + 1.0


def lru() -> CellModule:
    return CellModule(LRUCell, 7, HIDDEN, in_keys=["embedding", "h"], out_keys=["memory", ("next", "h")])


def q_values(memory: nn.Module) -> nn.Module:
    values = Seq(encoder(), memory, head(ACTIONS, keys=("action_value",)))
    spec = CategoricalSpec(ACTIONS)
    return Seq(QValueActor(values, spec=spec), EGreedyModule(spec, eps_init=0.5))


LEFT: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: q_values(gru()), "EGreedyModule has no C\\+\\+ implementation"),
    (lambda: Seq(encoder(), gru(), head(4, nn.GELU())), "GELU has no C\\+\\+ implementation"),
    (lambda: Seq(encoder(), gru(), Mod(Own(HIDDEN, 2), ["memory"], ["out"])), "Own has no C\\+\\+ implementation"),
    (lambda: Seq(encoder(), gru(), Mod(lambda x: x + 1, ["memory"], ["out"])), "function is not a plain module"),
    (lambda: Seq(encoder(), gru(num_layers=2, dropout=0.5), head(2)), "GRUModule uses dropout"),
    (lambda: Seq(encoder(), gru(), head(2, nn.Dropout(0.5))), "Dropout in training draws"),
    (lambda: Seq(Mod(nn.Linear(4, 7), ["missing"], ["embedding"]), gru()), "the entry 'missing' is missing"),
]


@pytest.mark.parametrize(("build", "reason"), LEFT)
def test_modules_that_the_library_lacks_run_as_before(build: Callable[[], nn.Module], reason: str) -> None:
    policy = build()
    memory = next(module for module in policy.modules() if hasattr(module, "state_keys"))
    entries = root(6, layers=memory.net.num_layers, **states_of(memory))
    if "missing" in reason:
        with pytest.raises(KeyError, match="missing"):
            CompiledNetwork(Network([policy]))(entries.copy())
    else:
        found, expected, network = both(policy, entries)
        assert_close(found, expected, TOLERANCE[torch.float32])
        assert any(type(part) is compiled._CompiledModules for parts in network._parts.values() for part in parts)
    with pytest.raises(AssertionError, match=reason):
        assert CompiledNetwork(Network([policy])).explain(entries)["cpp"] is None


def test_a_cell_without_a_step_in_the_library_runs_as_before() -> None:
    memory = lru()
    entries = root(6)
    entries.update(
        zip(memory.state_keys, (torch.zeros(6, 1, *shape) for shape in memory.net.state_shapes), strict=True)
    )
    found, expected, network = both(Seq(encoder(), memory, head(2)), entries)
    assert_close(found, expected, TOLERANCE[torch.float32])
    assert "no step for this" in str(network.explain(entries)["cpp"])


def test_entries_and_batches_of_another_kind_than_at_first() -> None:
    policy, entries = actor(gru()), root(8, h=HIDDEN)
    network = CompiledNetwork(Network([policy]))
    network(entries.copy())
    strided = root(16, h=HIDDEN)
    halves = Entries({key: value[::2] for key, value in strided.items()}, torch.Size([8]))
    for other in (root(3, h=HIDDEN), halves, *(root(rows, h=HIDDEN) for rows in range(1, 12)), root(8, h=HIDDEN)):
        torch.manual_seed(7)
        found = network(other.copy())
        assert_close(found, both(policy, other)[1], TOLERANCE[torch.float32])


def test_with_gradients_the_modules_run() -> None:
    policy, entries = actor(gru()), root(4, h=HIDDEN)
    network = CompiledNetwork(Network([policy]))
    network(entries.copy())
    with torch.enable_grad():
        for each in (network, CompiledNetwork(Network([policy]))):
            assert each(entries.copy())["logits"].requires_grad
        assert "autograd" in str(network.explain(entries)["cpp"])


def test_without_a_compiler_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, entries = actor(gru()), root(4, h=HIDDEN)
    expected = both(policy, entries)[1]
    monkeypatch.setattr(compiled, "can_call", lambda: False)
    monkeypatch.setattr(compiled, "missing", lambda: "there was no compiler")
    found, _, network = both(policy, entries)
    assert network.explain(entries)["cpp"] == "there was no compiler"
    assert_close(found, expected, TOLERANCE[torch.float32])


def test_a_network_that_needs_tensordicts_is_refused() -> None:
    with pytest.raises(UsageError, match="Only a network that can be lowered can be compiled, and function is not a"):
        CompiledNetwork(Network([lambda td: td]))


@pytest.mark.parametrize("what", ["nan", "mask"])
def test_an_action_that_cannot_be_drawn_is_refused_as_before(what: str) -> None:
    policy, entries = actor(gru(), MaskedCategorical), root(4, h=HIDDEN)
    network = CompiledNetwork(Network([policy]))
    network(entries.copy())
    if what == "nan":
        entries["observation"][2] = torch.nan
    else:
        entries["action_mask"][2] = False
    with pytest.raises(ArgumentError, match="got NaN" if what == "nan" else "allows none in rows"):
        network(entries.copy())
