from __future__ import annotations

import functools
from typing import Any

from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.diagnostics.parts import keys_of, leaf_modules, submodules

GLOBAL = nn.Linear(1, 1)


class Calling:
    def __init__(self, net: Any) -> None:
        self.net, self.other = net, [1]

    def __call__(self, x: Any) -> Any:
        return self.net(x)

    def act(self, x: Any) -> Any:
        return self.net(x)


def test_callables_that_hold_a_module() -> None:
    net = nn.Linear(1, 1)

    def inner(x: Any) -> Any:
        return net(x)

    def outer(x: Any) -> Any:
        return inner(x)

    def later(x: Any) -> Any:
        return unbound(x)

    assert submodules(net) == {"": net}
    assert submodules(inner) == {"net": net}
    assert submodules(outer) == {"inner.net": net}
    assert submodules(lambda x, layer=net: layer(x)) == {"default 0": net}
    assert submodules(lambda x: GLOBAL(x)) == {"GLOBAL": GLOBAL}
    assert submodules(functools.partial(inner, layer=nn.ReLU)) == {"function.net": net}
    assert submodules(functools.partial(max, net)) == {"argument 0": net}
    assert submodules(net.forward) == {"forward": net}
    assert submodules(Calling(net)) == {"net": net}
    assert submodules(Calling(net).act) == {"act.net": net}
    assert submodules(Calling(inner)) == {"net.net": net}
    assert submodules(later) == submodules(len) == submodules(nn.Linear) == submodules(3) == {}
    unbound = net
    assert submodules(later) == {"unbound": net}


def test_functions_inside_modules() -> None:
    nets = [nn.Linear(1, 1), nn.ReLU()]
    policy = Seq(*(Mod(lambda x, net=net: net(x), ["a"], ["a"]) for net in nets))
    found = submodules(policy)
    assert [found[f"module.{number}.module.default 0"] for number in range(2)] == nets


def test_links_are_the_innermost() -> None:
    first, second = Mod(nn.Linear(1, 1), ["a"], ["b"]), Mod(nn.ReLU(), ["b"], ["c"])
    policy = Seq(Seq(first), second)
    assert list(leaf_modules(policy).values()) == [first, second]
    assert keys_of(policy, "out_keys") == ["b", "c"]
    assert keys_of(nn.Linear(1, 1), "out_keys") == []
