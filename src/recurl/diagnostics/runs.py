"""Runs of a policy in experiments: once, twice, with other seeds, and with a record of the calls of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictSequential
from torch import Tensor, nn

from recurl.diagnostics.parts import keys_of, submodules
from recurl.diagnostics.preserve import preserved
from recurl.keys import ACTION, NestedKey, is_action, normalize_key
from recurl.mode import ExplorationType, set_recurrent_mode

_CHOSEN_VALUE = "chosen_action_value"


def run(policy: Any, batch: TensorDictBase, mode: bool | None, seed: int = 0) -> TensorDictBase:
    """Run ``policy`` on ``batch`` without gradients, and return the result; policy and batch are left unchanged.

    Args:
        policy: any policy.
        batch: input of the policy.
        mode: recurrent mode. In recurrent mode the policy runs as in a loss: collected actions are kept.
        seed: seed of all random numbers.
    """
    with preserved(policy, seed):
        return _call(policy, batch, mode)


def run_again(policy: Any, batch: TensorDictBase, mode: bool | None) -> tuple[TensorDictBase, TensorDictBase]:
    """Run ``policy`` twice with the same seed; the second run sees any state that the first has left in the policy."""
    with preserved(policy) as kept:
        first = _call(policy, batch, mode)
        kept.seed(0)
        return first, _call(policy, batch, mode)


def _call(policy: Any, batch: TensorDictBase, mode: bool | None) -> TensorDictBase:
    chosen = bool(mode) and batch.get(ACTION, None) is not None
    for module in submodules(policy).values():
        if isinstance(module, ProbabilisticTensorDictModule):
            # By default a sampler chooses the best action, which not every distribution supports, and sets this as the
            # exploration type of the modules in its sequence.
            vars(module)["default_interaction_type"] = None if mode else ExplorationType.RANDOM
        if chosen and _chooses(module):
            vars(module)["forward"] = partial(_keep_action, module.forward) if _rewrites(module) else _leave
    with set_recurrent_mode(mode), torch.no_grad():
        return policy(batch.copy())


def _chooses(module: nn.Module) -> bool:
    """Return whether ``module`` does nothing but choose the action."""
    if isinstance(module, ProbabilisticTensorDictModule):
        return True
    written = set(keys_of(module, "out_keys"))
    chosen = {key for key in written if is_action(key)}
    others = written - {*chosen, _CHOSEN_VALUE, *keys_of(module, "in_keys")}
    return bool(chosen) and not others and not isinstance(module, TensorDictSequential)


def _rewrites(module: nn.Module) -> bool:
    """Return whether ``module`` also replaces what it reads, as masked action values."""
    written = set(keys_of(module, "out_keys")) & set(keys_of(module, "in_keys"))
    return any(not is_action(key) for key in written) and not isinstance(module, ProbabilisticTensorDictModule)


def _keep_action(forward: Callable[..., Any], tensordict: TensorDictBase, *_: Any, **__: Any) -> TensorDictBase:
    kept = tensordict.select(ACTION, strict=False)
    return forward(tensordict).update(kept)


def _leave(tensordict: TensorDictBase, *_: Any, **__: Any) -> TensorDictBase:
    return tensordict


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: name of the module; ``""`` for the policy itself.
        module: the module.
        arguments: positional arguments.
        named: keyword arguments.
        inputs: entries that a TensorDict module reads, by key; or tensor arguments of another module, by position.
        outputs: entries that a TensorDict module wrote, by key; or tensors that another module returned, by position.
    """

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    inputs: dict[NestedKey | int, Tensor]
    outputs: dict[NestedKey | int, Tensor]

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"the {kind} {self.name!r}" if self.name else f"the policy itself, a {kind}"


def everywhere(tensordict: TensorDictBase) -> list[tuple[NestedKey, Tensor]]:
    """Return all tensors of a TensorDict, those under ``"next"`` included, as pairs of key and value."""
    keys = [normalize_key(key) for key in cast(Iterable[object], tensordict.keys(True, True))]
    return [(key, value) for key in keys if isinstance(value := tensordict.get(key), Tensor)]


def record(policy: Any, batch: TensorDictBase, mode: bool | None, seed: int = 0) -> tuple[list[Call], TensorDictBase]:
    """Run ``policy`` and return the calls of its modules, in the order in which they end, and the result."""
    ended: list[Call] = []
    open_calls: list[Call] = []

    def begin(name: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs = _values(module, "in_keys", (*arguments, *named.values()))
            open_calls.append(Call(name, module, arguments, named, inputs, {}))

        return note

    def end(module: nn.Module, _: Any, __: Any, result: Any) -> None:
        call = open_calls.pop()
        call.outputs = _values(module, "out_keys", (result,))
        ended.append(call)

    # ScriptModules have no hooks.
    modules = {name: m for name, m in submodules(policy).items() if not isinstance(m, torch.jit.ScriptModule)}
    hooks = [module.register_forward_pre_hook(begin(name), with_kwargs=True) for name, module in modules.items()]
    hooks += [module.register_forward_hook(end, with_kwargs=True) for module in modules.values()]
    try:
        outcome = run(policy, batch, mode, seed)
    finally:
        for hook in hooks:
            hook.remove()
    return ended, outcome


def _values(module: nn.Module, keys: str, given: tuple[Any, ...]) -> dict[NestedKey | int, Tensor]:
    if given and isinstance(given[0], TensorDictBase):
        present = [key for key in keys_of(module, keys) if given[0].get(key, None) is not None]
        return dict(everywhere(given[0].select(*present)))
    return dict(enumerate(_flat(given)))


def _flat(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _flat(cast(Iterable[Any], value))
        elif isinstance(value, dict):
            found += _flat(cast(dict[Any, Any], value).values())
    return found


def first_to_differ(
    calls: list[Call], others: list[Call], differ: Callable[[Tensor, Tensor], bool]
) -> tuple[str, nn.Module | None]:
    """Return name and module of the first call whose outputs differ between two runs of the same policy.

    The module is None if no call differs.
    """
    names = {call.name: call for call in calls}
    for call, other in zip(calls, others, strict=False):
        if not _any(differ, call.outputs, other.outputs):
            continue
        if not _any(differ, call.inputs, other.inputs):
            return str(call), call.module
        parent = names.get(call.name.rpartition(".")[0], call)
        return str(parent), parent.module
    return "the policy", None


def _any(
    differ: Callable[[Tensor, Tensor], bool],
    values: dict[NestedKey | int, Tensor],
    others: dict[NestedKey | int, Tensor],
) -> bool:
    return any(differ(value, others[key]) for key, value in values.items() if key in others)
