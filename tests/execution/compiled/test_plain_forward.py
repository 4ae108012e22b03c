"""Modules without a registered form: their forward is translated through its parts, or refused with its line."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import relu

from recurl.execution.compiled import CompiledNetwork, CompiledPass
from recurl.execution.lowering import Entries, Network
from recurl.modules import MLP, GRUModule, ObservationNorm
from recurl.recurrence import Boundaries
from recurl.recurrence.cpu import instruction_sets

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}
SLOPE, CALLS, COUNT = 0.3, list[Any](), 0
WIDTH = 6


def halves(x: Tensor) -> Tensor:
    return torch.cat((x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), dim=-1)


class Base(nn.Module):
    """Two layers of one size."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([self.first, nn.Tanh(), self.second, nn.Tanh()])
        self.net = nn.Sequential(self.first, nn.SiLU(), self.second)
        self.gain = nn.Parameter(torch.randn(3, WIDTH))
        self.constant = torch.randn(WIDTH)
        self.seen: list[Tensor] = []
        self.calls = 0
        self.act: Any = F.silu
        self.depth = 2
        self.shape = (WIDTH, (WIDTH,))
        self.rate = 0.5


class Two(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Activations(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        parts = [h.tanh(), torch.sigmoid(h), F.silu(h), relu(h), F.elu(h, 0.7), F.leaky_relu(h, negative_slope=SLOPE)]
        return torch.cat([*parts, F.hardtanh(h, -0.2, 0.4), h.clamp(min=-0.1), torch.clamp(h, max=0.3)], dim=-1)


class Loops(Base):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for i in range(self.depth):
            x = self.layers[2 * i](x) if self.scale > 1 else x
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        outputs = [self.act(layer(x)) for layer in self.net]
        return torch.cat(outputs, -1)


class Weights(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(halves(x), self.first.weight, self.first.bias)
        return F.linear(F.dropout(h, self.rate, self.training), self.gain)


class Inherits(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return super().forward(input).relu()


class Parts(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, rest = self.net(x).split([2, 4], dim=-1)
        left, right = rest.chunk(2, -1)
        return torch.cat([first, right], -1), left.flatten(-1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two, self.norm, self.mlp = Two(), ObservationNorm((WIDTH,)), MLP(2 * WIDTH, 2, num_cells=[4])

    def forward(self, x: Tensor) -> Tensor:
        normalized = self.norm(x)
        return self.mlp(self.two(normalized), normalized)


SERVED: list[Callable[[], nn.Module]] = [Two, Activations, Loops, Weights, Inherits, Parts, Nested]


def modules(module: nn.Module, outputs: int = 1) -> list[Any]:
    keys = ["out", "more"][:outputs]
    return [Mod(nn.Linear(4, WIDTH), ["x"], ["h"]), Mod(module, ["h"], keys)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", SERVED)
def test_steps_and_gradients(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    nets = modules(make().eval().to(dtype), 2 if make is Parts else 1)
    nets[0].to(dtype)
    keys = list(nets[-1].out_keys)
    definition, weights = Network(nets), [p for m in nets for p in m.parameters()]
    network, sequences = CompiledNetwork(definition), None
    for batch in ((1,), (7,), (64,), (5, 8)):
        entries = Entries({"x": torch.randn(*batch, 4, dtype=dtype)}, torch.Size(batch))
        with torch.no_grad():
            assert network.explain(entries)["cpp"] is None
            found = network(entries.copy())
        sequences = sequences or CompiledPass([nets], entries, keys)
        starts = Boundaries(torch.zeros(batch, dtype=torch.bool), batch)
        passed, expected = sequences(entries, starts), definition(entries.copy())
        grads = [
            torch.autograd.grad(sum(run[key].square().sum() for key in keys), weights, allow_unused=True)
            for run in (passed, expected)
        ]
        near = [(run[key], expected[key]) for key in keys for run in (found, passed)]
        for one, other in [*near, *zip(*grads, strict=True)]:
            assert (one is None) == (other is None)
            assert one is None or (one - other).norm() <= TOLERANCE[dtype] * other.norm()
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.1)


def reason_of(module: nn.Module) -> str:
    entries = Entries({"x": torch.randn(5, 4)}, torch.Size([5]))
    before = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    with torch.no_grad():
        network = CompiledNetwork(Network(modules(module)))
        reason = network.explain(entries)["cpp"]
    assert before == {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert reason is not None
    return reason


def refused(forward: Callable[..., Any]) -> nn.Module:
    return type("Refused", (Base,), {"forward": forward})()


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.first(x)


def remembers(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return self.first(x)


def logs(self: Any, x: Tensor) -> Tensor:
    CALLS.append(x)
    return self.first(x)


def global_count(self: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return self.first(x)


def draws(self: Any, x: Tensor) -> Tensor:
    return self.first(x) if random.random() < 0.5 else x


def draws_tensors(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch.randn(2, WIDTH))


def draws_in_torch(self: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def opens(self: Any, x: Tensor) -> Tensor:
    open(x)  # noqa: SIM115 - never called
    return x


def imports(self: Any, x: Tensor) -> Tensor:
    import time

    return x if time.time() > 0 else self.first(x)


def branches(self: Any, x: Tensor) -> Tensor:
    return self.first(x) if x.sum() > 0 else x


def compares(self: Any, x: Tensor) -> Tensor:
    return self.first(x) if x == 0 else x


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return x + 1.0
    except Exception:  # noqa: BLE001 - the point of the test
        return x


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.first(x)


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Tensor:
    return self.first(x)


def detaches(self: Any, x: Tensor) -> Tensor:
    return self.first(x).detach()


def in_place(self: Any, x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def computes_a_weight(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.first.weight.exp())


def first_dimension(self: Any, x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)


def shape(self: Any, x: Tensor) -> Tensor:
    return self.first(x) if x.shape[-1] == WIDTH else x


def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.first(x)


def class_of(self: Any, x: Tensor) -> Tensor:
    self.__class__.scale = 3.0
    return self.first(x)


def default(self: Any, x: Tensor, seen: list[Any] = []) -> Tensor:  # noqa: B006 - the point of the test
    seen.append(x)
    return self.first(x)


def returns_a_weight(self: Any, x: Tensor) -> Tensor:
    return self.gain


def returns_a_list(self: Any, x: Tensor) -> list[Tensor]:
    return [x]


def indirectly(self: Any, x: Tensor) -> Tensor:
    return helper(self.first(x))


def helper(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x


def of_a_child(self: Any, x: Tensor) -> Tensor:
    return self.first.reset_parameters() or x


def closed() -> Callable[..., Any]:
    calls = 0

    def forward(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return self.first(x)

    return forward


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "counter": (counts, r"line \d+, 'self.calls \+= 1': it sets calls"),
    "list": (remembers, "'self.seen.append.*: seen has no operation"),
    "global list": (logs, "CALLS has no operation"),
    "global": (global_count, "it sets COUNT"),
    "random": (draws, "'return self.first.*random.random has no operation"),
    "random tensor": (draws_tensors, "torch.randn has no operation"),
    "dropout": (draws_in_torch, "dropout draws random numbers"),
    "open": (opens, "open has no operation"),
    "import": (imports, "it imports time"),
    "branch": (branches, "sum has no operation in C"),
    "equal": (compares, "eq.* has no operation in C"),
    "try": (catches, "it catches exceptions"),
    "no_grad": (without_gradient, "no_grad has no operation|with block"),
    "decorated": (decorated, "ctx_factory has no operation"),
    "detach": (detaches, "detach has no operation"),
    "in place": (in_place, "in-place"),
    "weight": (computes_a_weight, "exp has no operation"),
    "dim": (first_dimension, "dim=1 is not counted from the end"),
    "shape": (shape, "shape has no operation"),
    "residual": (residual, r"'return x \+ self.first\(x\)': .*add.* has no operation"),
    "class": (class_of, "it reads __class__|it sets"),
    "default": (default, "a default has no operation"),
    "returned weight": (returns_a_weight, "something else than tensors"),
    "returned list": (returns_a_list, "something else than tensors"),
    "helper": (indirectly, r"'CALLS.append\(1\)': CALLS has no operation"),
    "child": (of_a_child, "has no C"),
    "nonlocal": (closed(), "sets calls"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_the_line(kind: str) -> None:
    forward, reason = REFUSED[kind]
    seen = (CALLS.copy(), COUNT, Base.scale)
    found = reason_of(refused(forward))
    assert found.startswith("Refused has no C++ implementation: " + ("line " if kind != "decorated" else ""))
    assert re.search(reason, found), found
    assert seen == (CALLS, COUNT, Base.scale)


def test_modules_inside_give_their_own_reason() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    assert reason_of(Outer(nn.GELU())) == "GELU has no C++ implementation"
    assert reason_of(Outer(GRUModule(WIDTH, 2, in_key="h", out_key="y"))) == "GRUModule has no C++ implementation"
    hooked = nn.Tanh()
    hooked.register_forward_hook(lambda module, args, result: 2 * result)
    assert "has hooks" in reason_of(Outer(hooked))
    assert reason_of(Outer(refused(residual))).startswith("Refused has no C++ implementation: line")


def test_numbers_of_the_module_take_effect_in_the_next_network() -> None:
    class Leaky(Base):
        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(self.first(x), self.rate) if self.depth else math.inf * x

    module, entries = Leaky(), Entries({"x": torch.randn(5, 4)}, torch.Size([5]))
    for rate in (0.1, 0.7):
        module.rate = rate
        definition = Network(modules(module))
        with torch.no_grad():
            found = CompiledNetwork(definition)(entries.copy())
            torch.testing.assert_close(found["out"], definition(entries.copy())["out"])
