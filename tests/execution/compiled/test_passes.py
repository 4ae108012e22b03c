"""A compiled pass matches its modules over sequences, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torch.nn.utils import parametrize

from recurl.execution.compiled import CompiledPass, NotCompiled, check_passes
from recurl.execution.lowering import Entries, Network
from recurl.modules import GRUModule, LSTMModule, NormalParamExtractor
from recurl.native import program
from recurl.native.library import INSTRUCTION_SETS, instruction_sets
from recurl.recurrence import Boundaries, record_backends
from recurl.sequences.mode import set_recurrent_mode

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}
OBS, HIDDEN, TOKENS = 5, 9, 40


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (TOKENS,), **states: int) -> Entries:
    is_init = torch.rand(*shape, 1) < 0.2
    entries: dict[str, Any] = {"observation": torch.randn(*shape, OBS, dtype=dtype), "is_init": is_init}
    entries |= {key: torch.randn(*shape, 2, size, dtype=dtype) for key, size in states.items()}
    return Entries(entries, torch.Size(shape))


def boundaries(entries: Entries) -> Boundaries:
    return Boundaries.from_is_init(entries["is_init"], None, entries.batch_size)


def losses(found: Any, keys: list[Any]) -> torch.Tensor:
    """Sums with random weights, so that every gradient counts."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(found[key].shape, generator=generator, dtype=found[key].dtype) for key in keys]
    return torch.stack([(found[key] * weight).sum() for key, weight in zip(keys, weights, strict=True)]).sum()


def gradients(modules: list[Any]) -> list[torch.Tensor | None]:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    distance = (one - other).norm() / other.norm().clamp_min(1e-6)
    return one.shape == other.shape and bool(distance < TOLERANCE[one.dtype])


def check(branches: list[list[Any]], entries: Entries, keys: list[Any]) -> None:
    modules = [module for branch in branches for module in branch]
    with set_recurrent_mode(True):
        run = Network(branches[0])(entries.copy())
        expected = {}
        for branch in branches[1:] or [[]]:
            after = Network(branch)(run.copy())
            expected |= {key: after[key] for key in keys if key in after}
    losses(expected, keys).backward()
    wanted = gradients(modules)
    compiled = CompiledPass(branches, entries, keys)
    assert compiled.fits(entries)
    found = compiled(entries, boundaries(entries))
    losses(found, keys).backward()
    for key in keys:
        assert near(found[key], expected[key].detach()), key
    for grad, other in zip(gradients(modules), wanted, strict=True):
        assert (grad is None) == (other is None)
        assert grad is None or other is None or near(grad, other)


def net(*layers: nn.Module) -> list[list[Any]]:
    return [[Mod(nn.Sequential(nn.Linear(OBS, HIDDEN), *layers), ["observation"], ["out"])]]


NETS: dict[str, Callable[[], list[list[Any]]]] = {
    "linear": net,
    "wide": lambda: net(nn.Linear(HIDDEN, 130), nn.Tanh(), nn.Linear(130, 3)),
    "layer norm first": lambda: [[Mod(nn.LayerNorm(OBS), ["observation"], ["out"])]],
    "frozen": lambda: _frozen(net(nn.Tanh(), nn.Linear(HIDDEN, 2))),
    "tied": lambda: net(nn.Tanh(), *([nn.Linear(HIDDEN, HIDDEN)] * 2)),
}


def _frozen(branches: list[list[Any]]) -> list[list[Any]]:
    branches[0][0].module[0].weight.requires_grad_(False)
    branches[0][0].module[2].bias.requires_grad_(False)
    return branches


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", NETS)
def test_layers(kind: str, dtype: torch.dtype) -> None:
    branches = NETS[kind]()
    for module in branches[0]:
        module.to(dtype)
    check(branches, batch(dtype), ["out"])


def memory(kind: str, **options: Any) -> list[Any]:
    keys = ["h", "c"] if kind == "lstm" else ["h"]
    cls: Any = LSTMModule if kind == "lstm" else GRUModule
    written = [("next", key) for key in keys]
    options = {"num_layers": 2, "recurrent_backend": "cpu"} | options
    return [
        Mod(nn.Sequential(nn.Linear(OBS, 6), nn.Tanh()), ["observation"], ["embedding"]),
        cls(6, HIDDEN, in_keys=["embedding", *keys], out_keys=["features", *written], **options),
    ]


def branching(kind: str, **options: Any) -> list[list[Any]]:
    trunk, width = memory(kind, **options), options.get("proj_size", HIDDEN)
    actor = nn.Sequential(nn.Linear(width, 4), NormalParamExtractor())
    critic = nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, 1))
    return [trunk, [Mod(actor, ["features"], ["loc", "scale"])], [Mod(critic, ["features"], ["value"])]]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_memories_with_heads(kind: str, dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in instruction_sets():
        pytest.skip(f"this processor has no {isa}")
    present = instruction_sets()[: instruction_sets().index(isa) + 1]
    monkeypatch.setattr(program, "instruction_sets", lambda: present)
    branches = branching(kind)
    for module in (module for branch in branches for module in branch):
        module.to(dtype)
    states: Any = {"h": HIDDEN, "c": HIDDEN} if kind == "lstm" else {"h": HIDDEN}
    check(branches, batch(dtype, **states), ["loc", "scale", "value"])


@pytest.mark.parametrize("options", [{"proj_size": 4}, {"bias": False}, {"num_layers": 1}])
def test_other_memories(options: dict[str, Any]) -> None:
    entries = batch(h=options.get("proj_size", HIDDEN), c=HIDDEN)
    if "num_layers" in options:
        entries.update({key: entries[key][:, :1].contiguous() for key in ("h", "c")})
    check(branching("lstm", **options), entries, ["loc", "scale", "value"])


@pytest.mark.parametrize("shape", [(1,), (30,), (3, 10), (2, 3, 5)])
def test_any_batch_shape_and_no_states(shape: tuple[int, ...]) -> None:
    check(branching("gru"), batch(shape=shape), ["loc", "scale", "value"])


def test_memory_that_reads_the_observation() -> None:
    lstm = LSTMModule(OBS, HIDDEN, in_key="observation", out_key="features", recurrent_backend="fastest")
    check([[lstm]], batch(), ["features"])


def test_other_numbers_of_tokens_and_edited_weights() -> None:
    branches = branching("lstm")
    compiled = CompiledPass(branches, batch(), ["value"])
    with torch.no_grad():
        branches[0][0].module[0].weight.mul_(2)
    entries = batch(shape=(3, 7))
    with set_recurrent_mode(True):
        expected = Network([*branches[0], *branches[2]])(entries.copy())["value"]
    assert compiled.fits(entries)
    with record_backends() as ran:
        assert near(compiled(entries, boundaries(entries))["value"].detach(), expected.detach())
    assert ran == ["cpu"]


def test_threads_change_nothing() -> None:
    branches = branching("lstm", num_layers=1)
    entries, found = batch(shape=(400,)), []
    compiled = CompiledPass(branches, entries, ["value"])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            compiled(entries, boundaries(entries))["value"].square().sum().backward()
            found.append(gradients([module for branch in branches for module in branch]))
    finally:
        torch.set_num_threads(threads)
    assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


def test_entries_that_do_not_fit() -> None:
    compiled = CompiledPass(net(), batch(), ["out"])
    for other in (batch(torch.float64), batch(shape=(0,))):
        assert not compiled.fits(other)
    entries = batch()
    entries["observation"] = entries["observation"][..., :3]
    assert not compiled.fits(entries)
    entries["observation"] = torch.randn(TOKENS, OBS, requires_grad=True)
    assert not compiled.fits(entries)


def test_hooks_of_parameters_are_not_passed_over() -> None:
    branches = net()
    compiled = CompiledPass(branches, batch(), ["out"])
    branches[0][0].module[0].weight.register_hook(lambda grad: grad)
    assert not compiled.fits(batch())


REFUSED: dict[str, tuple[Callable[[], list[list[Any]]], str]] = {
    "own module": (lambda: net(nn.Softmax(-1)), "has no C\\+\\+ implementation"),
    "dropout": (lambda: net(nn.Dropout(0.5)), "draws random numbers"),
    "convolution": (lambda: net(nn.Unflatten(-1, (1, HIDDEN))), "has no C\\+\\+ implementation"),
    "another backend": (lambda: [memory("gru", recurrent_backend="loop")], "uses another backend"),
    "unwritten": (lambda: [[Mod(nn.Linear(OBS, 2), ["observation"], ["other"])]], "all wanted entries"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_modules_are_named(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(NotCompiled, match=message):
        CompiledPass(make(), batch(), ["out"])


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_computed_weights_are_refused() -> None:
    branches = net()
    parametrize.register_parametrization(branches[0][0].module[0], "weight", _Doubled())
    with pytest.raises(NotCompiled, match=r"is not a parameter|not a plain module|has no C\+\+ implementation"):
        CompiledPass(branches, batch(), ["out"])


def test_second_derivatives_are_refused() -> None:
    branches, entries = net(nn.Tanh()), batch()
    compiled = CompiledPass(branches, entries, ["out"])
    value = compiled(entries, boundaries(entries))["out"].square().sum()
    (first, *_) = torch.autograd.grad(value, list(branches[0][0].parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_edits_between_forward_and_backward_are_noticed() -> None:
    branches, entries = net(nn.Tanh()), batch()
    value = CompiledPass(branches, entries, ["out"])(entries, boundaries(entries))["out"].sum()
    with torch.no_grad():
        branches[0][0].module[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_nothing_runs_where_torch_is_followed() -> None:
    check_passes()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotCompiled, match="autocast"):
        check_passes()
