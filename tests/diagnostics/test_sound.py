"""Correct policies, common and unusual ones: none fails any check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.modules import (
    ActorValueOperator,
    GRUModule,
    ObservationNorm,
    ValueOperator,
)
from recurl.trainers.networks.agent import collecting
from tests.diagnostics.policies import CELLS, actor_of, critic_memory, each_cell, failures, linear, memory, wired, zero
from tests.pairs import paired

pytestmark = pytest.mark.slow

Make = Callable[[], Any]
SOUND: dict[str, Make] = {}


def sound(make: Make) -> Make:
    SOUND[make.__name__] = make
    return make


OPTIONS = [{"num_layers": 2}, {"bias": False}, {"recurrent_backend": "fastest"}, {"recurrent_backend": "reference"}]


@pytest.mark.parametrize(
    ("cell", "options"),
    [*(("gru", option) for option in OPTIONS), *paired((cell for cell in CELLS if cell != "gru"), OPTIONS)],
    ids=str,
)
def test_every_cell(cell: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    policy = actor_of(CELLS[cell](4, 8, in_key="observation", out_key="features", **options), linear())
    assert failures(policy, wired(policy)) == []


# -- zero-initialized layers: their dependencies can't be seen in their current outputs


@pytest.mark.parametrize(("cell", "what"), each_cell(["head", "memory", "choice"]))
def test_zeros(cell: str, what: str) -> None:
    module, head = memory(cell), linear()
    if what == "memory":
        zero(module)
    else:
        zero(head)
    choice = Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    policy = Seq(module, head, choice) if what == "choice" else actor_of(module, head)
    assert failures(policy, wired(policy, 3)) == []


@sound
def rounding_is_amplified() -> Any:
    """Steps and sequences differ by some 1e-8, times 10,000."""
    return actor_of(memory(), Mod(lambda x: (10_000 * x).sin(), ["features"], ["features"]), linear())


class Best(nn.Module):
    """Policy in a single module that doesn't expose action values."""

    def __init__(self) -> None:
        super().__init__()
        self.values = zero(nn.Linear(8, 2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.values(features).argmax(-1)


@sound
def choice_of_zeros_in_one() -> Any:
    return Seq(memory(), Mod(Best(), ["features"], ["action"]))


class Gate(nn.Module):
    """Module whose memory passes a gate that is initially closed: a weight, or a number increased by a schedule."""

    def __init__(self, gate: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.direct, self.remembered = gate, nn.Linear(4, 2), nn.Linear(8, 2)

    def forward(self, observation: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.direct(observation) + self.gate * self.remembered(features)


@sound
def shut_gate() -> Any:
    return actor_of(memory(), Mod(Gate(nn.Parameter(torch.zeros(()))), ["observation", "features"], ["logits"]))


@sound
def gate_of_a_schedule() -> Any:
    return actor_of(memory(), Mod(Gate(nn.Buffer(torch.zeros(()))), ["observation", "features"], ["logits"]))


# -- critics


def value() -> ValueOperator:
    return ValueOperator(nn.Linear(8, 1), ["of_critic"])


@sound
def shared_trunk() -> Any:
    return ActorValueOperator(memory(), actor_of(linear()), ValueOperator(nn.Linear(8, 1), ["features"]))


@sound
def separate_critic() -> Any:
    return Seq(actor_of(memory("lstm"), linear()), critic_memory(), value())


@sound
def memory_of_the_critic_first() -> Any:
    return Seq(critic_memory(), actor_of(memory("lstm"), linear()))


@sound
def memory_of_the_critic_only() -> Any:
    return Seq(actor_of(linear(4, "observation")), critic_memory(), value())


# -- layers in either mode


@sound
def running_statistics() -> Any:
    norm = ObservationNorm((4,))
    norm.update(torch.randn(100, 4) * 3 + 1)
    return actor_of(Mod(norm, ["observation"], ["x"]), memory("gru", "x"), linear())


class Flat(nn.Module):
    """Module that runs a layer on ``[N, F]`` for any batch size."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(-1, x.shape[-1])).reshape(x.shape)


@sound
def evaluation_mode() -> Any:
    layers = nn.Sequential(Flat(nn.BatchNorm1d(4)), nn.Dropout(0.5))
    return actor_of(Mod(layers, ["observation"], ["x"]), memory("gru", "x"), linear()).eval()


@sound
def dropout_of_nothing() -> Any:
    layers = nn.Sequential(
        nn.LayerNorm(4), nn.Dropout(0.0), torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    )
    return actor_of(Mod(layers, ["observation"], ["x"]), memory("gru", "x"), linear())


class Words(nn.Module):
    """Module that reads the numbers of an observation as a sequence, with a plain LSTM within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.reshape(-1, 4, 1))[0][:, -1].reshape(*x.shape[:-1], 8)


@sound
def sentences() -> Any:
    return actor_of(Mod(Words(), ["observation"], ["x"]), memory("gru", "x", 8), linear())


@sound
def sentences_without_memory() -> Any:
    return actor_of(Mod(Words(), ["observation"], ["x"]), linear(8, "x"))


class Images(nn.Module):
    """Module that takes only ``[C, H, W]`` and ``[N, C, H, W]``, as image layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.unflatten(-1, (1, 2, 2))).flatten(-3)


@sound
def images() -> Any:
    return actor_of(Mod(Images(), ["observation"], ["x"]), memory("gru", "x", 8), linear())


@sound
def lazy_layer() -> Any:
    return actor_of(memory(), Mod(nn.LazyLinear(2), ["features"], ["logits"]))


@sound
def one_head_called_twice() -> Any:
    head = nn.Linear(8, 8)
    layers = nn.Sequential(head, nn.ReLU(inplace=True), head)
    twice = Mod(layers, ["features"], ["features"])
    return actor_of(memory(), twice, twice, linear())


@sound
def nested_keys_and_two_memories() -> Any:
    first = GRUModule(4, 8, in_keys=["observation", ("deep", "h")], out_keys=[("deep", "x"), ("next", "deep", "h")])
    second = GRUModule(8, 8, in_keys=[("deep", "x"), "h"], out_keys=["features", ("next", "h")])
    return actor_of(first, second, linear())


# -- other callables


class Callable_:
    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self, td: Any) -> Any:
        return self.policy(td)


class Module(Callable_, nn.Module):
    """Callable that doesn't declare its inputs and outputs."""

    def __init__(self, policy: Any) -> None:
        nn.Module.__init__(self)
        self.policy = policy
        self.losses: list[float] = []

    forward = Callable_.__call__
    __call__ = nn.Module.__call__


WRAPPED = {
    "function": lambda policy: lambda td: policy(td),
    "partial": lambda policy: functools.partial(lambda inner, td: inner(td), policy),
    "method": lambda policy: policy.forward,
    "object": Callable_,
    "module": Module,
    "inference": lambda policy: torch.inference_mode()(lambda td: policy(td)),
    "compiled": lambda policy: torch.compile(policy, backend="eager"),
    "selecting": collecting,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_wrapped(wrap: Callable[[Any], Any]) -> None:
    policy = actor_of(memory(), zero(linear()))
    assert failures(wrap(policy), wired(policy)) == []


@sound
def without_memory() -> Any:
    return actor_of(linear(4, "observation"))


@sound
def without_weights() -> Any:
    return Mod(lambda x: torch.randint(2, x.shape[:-1]), ["observation"], ["action"])


@pytest.mark.parametrize(("make", "rows"), list(zip(SOUND.values(), cycle([2, None]), strict=False)), ids=SOUND.keys())
def test_sound(make: Make, rows: int | None) -> None:
    torch.manual_seed(0)
    policy = make()
    assert [str(failure) for failure in failures(policy, wired(policy, rows))] == []
