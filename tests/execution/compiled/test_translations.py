"""Every registered C++ form matches the definition in torch, and serves subclasses that keep to the definition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torch.nn.utils import parametrize

from recurl.core import specs
from recurl.execution.compiled import CompiledNetwork, CompiledPass, NotCompiled
from recurl.execution.compiled.translations import DENSITIES, TRANSLATIONS
from recurl.execution.lowering import Entries, Network, modules_in_order
from recurl.modules import (
    MLP,
    ActionDistribution,
    ActionPart,
    Categorical,
    GRUModule,
    IndependentNormal,
    LearnedScale,
    LSTMModule,
    MaskedCategorical,
    MaskedOneHotCategorical,
    NormalParamExtractor,
    ObservationNorm,
    OneHotCategorical,
    ProbabilisticActor,
    QValueModule,
    RecurrentModule,
    TanhNormal,
)
from recurl.modules.actors import Sampler
from recurl.native import program
from recurl.native.library import INSTRUCTION_SETS, instruction_sets
from recurl.nn.recurrent_net import RecurrentNet
from recurl.objectives import ClipPPOLoss
from recurl.recurrence import Boundaries
from recurl.sequences.entries import takes_entries
from recurl.sequences.mode import ExplorationType, set_exploration_type, set_recurrent_mode
from recurl.trainers.networks.action_head import MaskedNaNSafeCategorical, NaNSafeCategorical
from recurl.trainers.networks.encoders import VectorEncoder
from recurl.trainers.networks.observations import Entry, FlatObservation, IntegerEncoder
from tests.objectives.test_compiled_ppo import check as check_losses

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

WIDTH, ACTIONS, HIDDEN = 38, 5, 9
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}
ROWS = [1, 2, 4, 7, 20, 33, 50, 64, 131]
LOW = torch.tensor([-1.0, -3.0, 0.0, -0.1, -1.0])


class Case(NamedTuple):
    """TensorDict modules that use a form, whether it has derivatives and a form in float64, and its outputs"""

    modules: list[Any]
    differentiable: bool = True
    float64: bool = True
    only: tuple[str, ...] = ()

    def network(self) -> Network:
        return Network([Seq(*self.modules, selected_out_keys=list(self.only))] if self.only else self.modules)


def layer(module: nn.Module, keys: tuple[str, ...] = ("out",)) -> Case:
    """A linear layer, which gives layers without weights their dtype, and the module."""
    return Case([Mod(nn.Sequential(nn.Linear(WIDTH, WIDTH), module), ["x"], list(keys))])


def observations(module: nn.Module, keys: list[str], features: int) -> Case:
    return Case([Mod(module, keys, ["features"]), Mod(nn.Linear(features, 3), ["features"], ["out"])], float64=False)


def norm(columns: int) -> ObservationNorm:
    found = ObservationNorm((columns,), clip=0.8)
    found.update(torch.randn(20, columns))
    return found


def flat() -> FlatObservation:
    given = {
        "choice": specs.Categorical(4),
        "grid": specs.Unbounded((2, 3)),
        "level": specs.Bounded(0, 12, (2,), dtype=torch.uint8),
        "codes": specs.MultiCategorical([2, 5, 3]),
        "bits": specs.Binary(3, dtype=torch.bool),
        "number": specs.Unbounded(()),
    }
    return FlatObservation([Entry(key, spec, torch.Size(spec.shape)) for key, spec in given.items()])


def encoder(normalize: bool) -> Case:
    module = flat()
    made = VectorEncoder(module, norm(module.numbers) if normalize else None, 7, layers=2)
    return observations(made, module.keys, 7)


def memory(cls: Any, **options: Any) -> Case:
    states = ["h", "c"] if cls is LSTMModule else ["h"]
    written = ["out", *(("next", key) for key in states)]
    module = cls(6, HIDDEN, in_keys=["embedding", *states], out_keys=written, recurrent_backend="cpu", **options)
    return Case([Mod(nn.Linear(WIDTH, 6), ["x"], ["embedding"]), module])


def values(space: str) -> Case:
    return Case([Mod(nn.Linear(WIDTH, ACTIONS), ["x"], ["action_value"]), QValueModule(space)], differentiable=False)


def actor(distribution: type) -> ProbabilisticActor:
    head: nn.Module = nn.Linear(WIDTH, ACTIONS)
    keys: Any = {"logits": "logits"}
    options: dict[str, Any] = {}
    if issubclass(distribution, TanhNormal):
        head = nn.Sequential(nn.Linear(WIDTH, 2 * ACTIONS), NormalParamExtractor())
        keys, options = {"loc": "loc", "scale": "scale"}, {"low": LOW, "high": 2.0}
    elif issubclass(distribution, MaskedCategorical):
        keys["mask"] = "mask"
    written = [key for key in keys.values() if key != "mask"]
    return ProbabilisticActor(
        Mod(head, ["x"], written),
        keys,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )


def draws(distribution: type) -> list[Callable[[], Case]]:
    return [lambda: Case([actor(distribution)], differentiable=False)]


def mean(distribution: type, *layers: nn.Module, **options: Any) -> Case:
    """The greedy action of an actor without bounds, whose scale and density have no form."""
    keys = ["outputs"] if distribution is ActionDistribution else ["loc", "scale"]
    policy = ProbabilisticActor(
        Mod(nn.Sequential(*layers), ["x"], keys),
        keys,
        ["out"],
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )
    return Case(modules_in_order(policy), only=("out",))


class TwoLayers(nn.Module):
    """Module without an entry in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


EXAMPLES: dict[type, list[Callable[[], Case]]] = {
    nn.Module: [lambda: layer(TwoLayers())],
    nn.Linear: [lambda: layer(nn.Linear(WIDTH, 21)), lambda: layer(nn.Linear(WIDTH, 70, bias=False))],
    nn.Identity: [lambda: layer(nn.Identity())],
    nn.Dropout: [lambda: layer(nn.Dropout(0.5).eval())],
    nn.Tanh: [lambda: layer(nn.Tanh())],
    nn.Sigmoid: [lambda: layer(nn.Sigmoid())],
    nn.SiLU: [lambda: layer(nn.SiLU())],
    nn.ReLU: [lambda: layer(nn.ReLU()), lambda: layer(nn.ReLU(inplace=True)), lambda: layer(InPlace(slice(4, 8)))],
    nn.ReLU6: [lambda: layer(nn.ReLU6())],
    nn.Hardtanh: [lambda: layer(nn.Hardtanh(-0.5, 0.25))],
    nn.ELU: [lambda: layer(nn.ELU(0.7))],
    nn.LeakyReLU: [lambda: layer(nn.LeakyReLU(0.2))],
    nn.LayerNorm: [
        lambda: layer(nn.LayerNorm(WIDTH)),
        lambda: layer(nn.LayerNorm(WIDTH, elementwise_affine=False, eps=0.1)),
    ],
    nn.RMSNorm: [lambda: layer(nn.RMSNorm(WIDTH))],
    nn.Sequential: [lambda: layer(nn.Sequential(nn.Linear(WIDTH, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))))],
    NormalParamExtractor: [lambda: layer(NormalParamExtractor(scale_lb=0.5), ("out", "more"))],
    MLP: [
        lambda: layer(MLP(WIDTH, 3, num_cells=[8, 20])),
        lambda: Case([Mod(nn.Linear(WIDTH, 4), ["x"], ["y"]), Mod(MLP(4 + WIDTH, 3), ["y", "x"], ["out"])]),
    ],
    LearnedScale: [lambda: mean(IndependentNormal, nn.Linear(WIDTH, 3), LearnedScale(3).requires_grad_(False))],
    IndependentNormal: [lambda: mean(IndependentNormal, nn.Linear(WIDTH, 6), NormalParamExtractor(), event_dims=1)],
    ActionDistribution: [
        lambda: mean(ActionDistribution, nn.Linear(WIDTH, 12), parts=(ActionPart(specs.Unbounded((2, 3))),))
    ],
    ObservationNorm: [lambda: layer(norm(WIDTH))],
    Mod: [lambda: layer(nn.Identity())],
    RecurrentModule: [
        lambda: memory(GRUModule),
        lambda: memory(LSTMModule, num_layers=2, bias=False),
        lambda: memory(LSTMModule, proj_size=4),
    ],
    RecurrentNet: [lambda: memory(GRUModule, num_layers=2)],
    QValueModule: [lambda: values("one_hot"), lambda: values("categorical")],
    Sampler: draws(Categorical),
    FlatObservation: [lambda: observations(flat(), flat().keys, flat().features)],
    IntegerEncoder: [lambda: observations(IntegerEncoder([2, 5, 3], 1), ["codes"], 10)],
    VectorEncoder: [lambda: encoder(normalize=False), lambda: encoder(normalize=True)],
    **{
        distribution: draws(distribution)
        for distribution in (
            Categorical,
            OneHotCategorical,
            MaskedCategorical,
            MaskedOneHotCategorical,
            NaNSafeCategorical,
            MaskedNaNSafeCategorical,
            TanhNormal,
        )
    },
}
CASES = [
    pytest.param(make, id=f"{cls.__name__}{i or ''}") for cls, made in EXAMPLES.items() for i, make in enumerate(made)
]


def registered(table: dict[type, Any]) -> set[type]:
    """Classes of the package and its dependencies."""
    for cls in EXAMPLES:
        TRANSLATIONS.find(cls)  # imports the forms of its package
    modules = {cls: sys.modules[cls.__module__] for cls in table if not cls.__module__.startswith("tests.")}
    return {cls for cls, module in modules.items() if getattr(module, cls.__qualname__, None) is cls}


def test_every_class_has_an_example() -> None:
    assert set(EXAMPLES) == registered(TRANSLATIONS)
    assert registered(DENSITIES) <= set(EXAMPLES)


def entries_of(case: Case, rows: int, dtype: torch.dtype) -> Entries:
    mask = torch.rand(rows, ACTIONS) < 0.5
    mask[:, 1] = True
    entries: dict[Any, torch.Tensor] = {
        "x": (3 if case.differentiable else 0.3) * torch.randn(rows, WIDTH, dtype=dtype),
        "mask": mask,
        "is_init": torch.rand(rows, 1) < 0.2,
        "choice": torch.randint(4, (rows,)),
        "grid": 3 * torch.randn(rows, 2, 3),
        "level": torch.randint(13, (rows, 2)).to(torch.uint8),
        "codes": torch.stack([torch.randint(size, (rows,)) for size in (2, 5, 3)], -1),
        "bits": torch.rand(rows, 3) < 0.5,
        "number": torch.randn(rows),
    }
    for module in case.modules:
        if isinstance(module, RecurrentModule):
            shapes = [(rows, module.net.num_layers, *shape) for shape in module.net.state_shapes]
            entries |= {
                key: torch.randn(shape, dtype=dtype) for key, shape in zip(module.state_keys, shapes, strict=True)
            }
    return Entries(entries, torch.Size([rows]))


def edit(case: Case) -> None:
    """Change all weights and statistics in place."""
    with torch.no_grad():
        for tensor in (t for m in case.modules for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()):
            tensor.mul_(1.1)


def assert_near(found: Entries, expected: Entries, dtype: torch.dtype, distribution: Any = None) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Entries):
            assert_near(found[key], value, dtype)
            continue
        got = found[key]
        assert (got.shape, got.dtype) == (value.shape, value.dtype), key
        if not value.is_floating_point():
            assert torch.equal(got, value), key
        elif key == "action_log_prob" and distribution is TanhNormal:  # sensitive to rounding of the action
            dist = TanhNormal(found["loc"], found["scale"], low=LOW, high=2.0)
            torch.testing.assert_close(got, dist.log_prob(found["action"]), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-4)
        else:
            infinite = value.isinf()
            assert torch.equal(got[infinite], value[infinite]), key
            got, value = got[~infinite], value[~infinite]
            assert (got - value).norm() <= TOLERANCE[dtype] * value.norm(), key


def with_dtype(make: Callable[[], Case], dtype: torch.dtype) -> Case | None:
    torch.manual_seed(0)
    case = make()
    if dtype is torch.float64 and not case.float64:
        return None
    for module in case.modules:
        module.to(dtype)
    return case


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    known = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(request.param) + 1]
    monkeypatch.setattr(program, "instruction_sets", lambda: known)
    return request.param


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", CASES)
def test_steps(make: Callable[[], Case], dtype: torch.dtype) -> None:
    case = with_dtype(make, dtype)
    if case is None:
        return
    kinds = [ExplorationType.DETERMINISTIC, *([] if case.differentiable else [ExplorationType.RANDOM])]
    distribution = getattr(case.modules[-1], "distribution_class", None)
    for kind in kinds:
        with torch.no_grad(), set_exploration_type(kind):
            definition = case.network()
            network = CompiledNetwork(definition)
            for rows in ROWS:
                entries, found = entries_of(case, rows, dtype), list[Any]()
                assert network.explain(entries)["cpp"] is None
                for run in (network, definition):
                    torch.manual_seed(7)
                    found.append((run(entries.copy()), torch.rand(3)))
                assert_near(found[0][0], found[1][0], dtype, distribution)
                assert torch.equal(found[0][1], found[1][1])  # the generator has advanced equally far
                edit(case)
                torch.manual_seed(7)
                edited = network(entries.copy())
                torch.manual_seed(7)
                assert_near(edited, definition(entries.copy()), dtype, distribution)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", CASES)
def test_gradients(make: Callable[[], Case], dtype: torch.dtype) -> None:
    case = with_dtype(make, dtype)
    if case is None:
        return
    keys: list[Any] = [key for key in case.modules[-1].out_keys if key in ("out", "more")]
    entries = entries_of(case, 40, dtype)
    if not case.differentiable:
        with pytest.raises(NotCompiled):
            CompiledPass([case.modules], entries, ["action"])
        return
    weights = [p for m in case.modules for p in m.parameters() if p.requires_grad]
    compiled = CompiledPass([case.modules], entries, keys)
    for rows in (40, 3, 131):
        entries = entries_of(case, rows, dtype)
        boundaries = Boundaries.from_is_init(entries["is_init"], None, entries.batch_size)
        with set_recurrent_mode(True):
            expected = Network(case.modules)(entries.copy())
        factors = [torch.rand_like(expected[key]) for key in keys]
        found, grads = compiled(entries, boundaries), list[Any]()
        for results in (found, expected):
            loss = torch.stack([(results[key] * factor).sum() for key, factor in zip(keys, factors, strict=True)])
            grads.append(torch.autograd.grad(loss.sum(), weights))
        for one, other in [*((found[key], expected[key]) for key in keys), *zip(*grads, strict=True)]:
            assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()
        edit(case)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("distribution", sorted(registered(DENSITIES) - {Sampler}, key=str))
def test_densities(distribution: type, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    policy, critic = actor(distribution).to(dtype), Mod(nn.Linear(WIDTH, 1), ["x"], ["state_value"]).to(dtype)
    entries = entries_of(Case([policy], differentiable=False), 30, dtype)
    batch = TensorDict({key: entries[key] for key in ("x", "mask", "is_init")}, [30])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        policy(batch)
    batch["advantage"], batch["value_target"] = (torch.randn(30, 1, dtype=dtype) for _ in range(2))
    batch["action_log_prob"] += 0.1 * torch.randn(30, dtype=dtype)
    check_losses(ClipPPOLoss(policy, critic, entropy_coeff=0.1), batch)


def test_numbers_that_are_none_stay_so() -> None:
    for module in (nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.ELU(), nn.LeakyReLU(), nn.Hardtanh()):
        network = CompiledNetwork(Network([Mod(module, ["x"], ["out"])]))
        x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]])
        with torch.no_grad():
            found = network(Entries({"x": x}, torch.Size([1])))["out"]
            torch.testing.assert_close(found, module(x), equal_nan=True)


# -- subclasses


class Plain(nn.Linear):
    """A subclass that adds something."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = 2.0

    def size(self) -> int:
        return self.weight.numel()


class Network_(MLP):
    pass


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 3), nn.Tanh())


class Memory(GRUModule):
    pass


class NaNFree(Categorical):
    """A subclass that adds something."""

    def uniform(self) -> torch.Tensor:
        return torch.zeros_like(self.logits)


@pytest.mark.parametrize(
    "case",
    [
        lambda: layer(Plain(WIDTH, 4)),
        lambda: layer(Network_(WIDTH, 4)),
        lambda: layer(Layers()),
        lambda: memory(Memory),
        *draws(NaNFree),
    ],
)
def test_subclasses_that_keep_to_the_definition_are_compiled(case: Callable[[], Case]) -> None:
    test_steps(case, torch.float32)
    test_gradients(case, torch.float32)


class Calls(nn.Tanh):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1


class Reversed(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Steps(GRUModule):
    def _step(self, *args: Any) -> Any:
        return super()._step(*args)


class Inputs(GRUModule):
    def _inputs(self, tensordict: Any) -> Any:
        return super()._inputs(tensordict)


def with_a_net_that_doubles() -> Case:
    case = memory(GRUModule)
    net = case.modules[1].net

    class Doubles(type(net)):
        def step(self, *args: Any) -> Any:
            features, states = super().step(*args)
            return 2 * features, states

    net.__class__ = Doubles
    return case


def with_a_step_of_the_net() -> Case:
    case = memory(GRUModule)
    net = case.modules[1].net
    net.step = net.step
    return case


class Computes(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return 2 * value if name == "weight" else value


class Exponential(nn.Linear):
    @property
    def weight(self) -> Any:  # type: ignore[override] - of the parameter
        return self.__dict__["_parameters"]["weight"].exp()


class OwnExponential(TwoLayers):
    @property
    def gain(self) -> Any:
        return self.__dict__["_parameters"]["gain"].exp()

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.gain)


def exponential() -> nn.Module:
    module: Any = nn.Linear(WIDTH, 2)
    module.__class__ = Exponential
    return module


def own_exponential() -> nn.Module:
    module: Any = TwoLayers()
    module.gain = nn.Parameter(torch.ones(2, WIDTH))
    module.__class__ = OwnExponential
    return module


class InPlace(nn.Module):
    """Reads ``which`` after an activation has changed its first half in place."""

    def __init__(self, which: slice) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, 8), nn.ELU(inplace=True)
        self.first, self.last = which.start, which.stop

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        return torch.cat([self.act(h[..., :4]), h[..., self.first : self.last]], -1)


class Values(QValueModule):
    @takes_entries
    def forward(self, tensordict: Any) -> Any:
        return super().forward(tensordict)


class Cold(Categorical):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(logits / 0.1)


class Rounded(TanhNormal):
    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return super().log_prob(value).round()


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(WIDTH, 2), "weight", nn.Tanh())


OTHERS: list[tuple[Callable[[], Case], str]] = [
    (lambda: layer(Calls()), "Calls has no"),
    (lambda: layer(Reversed(nn.Tanh())), "Reversed has no"),
    (lambda: layer(parametrized()), "the weight of ParametrizedLinear is computed"),
    (lambda: layer(exponential()), "the weight of Exponential is computed"),
    (lambda: layer(own_exponential()), "OwnExponential has no"),
    (lambda: layer(Computes(WIDTH, 2)), "Computes has no"),
    (lambda: Case([Mod(nn.ReLU(inplace=True), ["x"], ["out"])]), "a module changes an entry in place"),
    (
        lambda: Case([Mod(nn.Linear(WIDTH, 2), ["x"], ["y"]), Mod(nn.ReLU(inplace=True), ["y"], ["out"])]),
        "a module changes an entry in place",
    ),
    (lambda: layer(InPlace(slice(3, 5))), "a tensor is read after a module has changed it in place"),
    (lambda: memory(Steps), "Steps has no"),
    (lambda: memory(Inputs), "Inputs has no"),
    (with_a_net_that_doubles, "Doubles overrides a method of RecurrentNet"),
    (with_a_step_of_the_net, "GRU overrides a method of RecurrentNet"),
    (lambda: Case([Mod(nn.Linear(WIDTH, 2), ["x"], ["action_value"]), Values("one_hot")]), "Values has no"),
    (draws(Cold)[0], "a sampler of Cold has no"),
    (draws(Rounded)[0], "a sampler of Rounded has no"),
]


@pytest.mark.parametrize(("make", "reason"), OTHERS)
def test_subclasses_that_change_the_definition_are_not(make: Callable[[], Case], reason: str) -> None:
    torch.manual_seed(0)
    case = make()
    entries = entries_of(case, 5, torch.float32)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        assert reason in str(CompiledNetwork(Network([Seq(*case.modules)])).explain(entries)["cpp"])


def test_a_forward_of_the_instance_counts() -> None:
    module = nn.Tanh()
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(NotCompiled, match="its own forward"):
        CompiledPass([layer(module).modules], entries_of(layer(module), 3, torch.float32), ["out"])
