"""Experimental runs of a policy: once, twice with the same seed, and with recorded module calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictSequential
from torch import Tensor, nn

from recurl.core.keys import ACTION, NestedKey, is_action, normalize_key
from recurl.diagnostics.parts import keys_of, submodules
from recurl.diagnostics.preserve import preserved
from recurl.sequences.mode import ExplorationType, set_recurrent_mode

_CHOSEN_VALUE = "chosen_action_value"


def run(policy: Any, batch: TensorDictBase, mode: bool | None, seed: int = 0) -> TensorDictBase:
    """Run ``policy`` on ``batch`` without gradients and return the result. Policy and batch are left unchanged.

    Args:
        policy: any policy.
        batch: input of the policy.
        mode: recurrent mode. If True, the policy runs as in a loss, with the collected actions.
        seed: seed of all random numbers.
    """
    with preserved(policy, seed):
        return _call(policy, batch, mode)


def run_twice(policy: Any, batch: TensorDictBase, mode: bool | None) -> tuple[TensorDictBase, TensorDictBase]:
    """Run ``policy`` twice with the same seed; state left in the policy by the first run is visible to the second."""
    with preserved(policy) as kept:
        first = _call(policy, batch, mode)
        kept.seed(0)
        return first, _call(policy, batch, mode)


def _call(policy: Any, batch: TensorDictBase, mode: bool | None) -> TensorDictBase:
    chosen = bool(mode) and batch.get(ACTION, None) is not None
    for module in submodules(policy).values():
        if isinstance(module, ProbabilisticTensorDictModule):
            # By default a sampler takes the deterministic action, which not every distribution supports, and sets this
            # exploration type for the modules in its sequence.
            vars(module)["default_interaction_type"] = None if mode else ExplorationType.RANDOM
        if chosen and _only_chooses_action(module):
            vars(module)["forward"] = (
                partial(_keep_action, module.forward) if _overwrites_inputs(module) else _pass_through
            )
    with set_recurrent_mode(mode), torch.no_grad():
        return policy(batch.copy())


def _only_chooses_action(module: nn.Module) -> bool:
    """Return whether ``module`` only chooses the action."""
    if isinstance(module, ProbabilisticTensorDictModule):
        return True
    written = set(keys_of(module, "out_keys"))
    chosen = {key for key in written if is_action(key)}
    others = written - {*chosen, _CHOSEN_VALUE, *keys_of(module, "in_keys")}
    return bool(chosen) and not others and not isinstance(module, TensorDictSequential)


def _overwrites_inputs(module: nn.Module) -> bool:
    """Return whether ``module`` also overwrites its inputs, such as masked action values."""
    written = set(keys_of(module, "out_keys")) & set(keys_of(module, "in_keys"))
    return any(not is_action(key) for key in written) and not isinstance(module, ProbabilisticTensorDictModule)


def _keep_action(forward: Callable[..., Any], tensordict: TensorDictBase, *_: Any, **__: Any) -> TensorDictBase:
    kept = tensordict.select(ACTION, strict=False)
    return forward(tensordict).update(kept)


def _pass_through(tensordict: TensorDictBase, *_: Any, **__: Any) -> TensorDictBase:
    return tensordict


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: name of the module; ``""`` for the policy itself.
        module: the module.
        arguments: positional arguments.
        named: keyword arguments.
        inputs: input entries of a TensorDict module by key, or tensor arguments of another module by position.
        outputs: output entries of a TensorDict module by key, or tensors returned by another module by position.
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


def all_leaves(tensordict: TensorDictBase) -> list[tuple[NestedKey, Tensor]]:
    """Return all tensors of a TensorDict, including those under ``"next"``, as pairs of key and value."""
    keys = [normalize_key(key) for key in cast(Iterable[object], tensordict.keys(True, True))]
    return [(key, value) for key in keys if isinstance(value := tensordict.get(key), Tensor)]


def record(policy: Any, batch: TensorDictBase, mode: bool | None, seed: int = 0) -> tuple[list[Call], TensorDictBase]:
    """Run ``policy`` and return the calls of its modules, in order of completion, and the result."""
    ended: list[Call] = []
    open_calls: list[Call] = []

    def begin(name: str) -> Callable[..., None]:
        def record_call(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs = _values(module, "in_keys", (*arguments, *named.values()))
            open_calls.append(Call(name, module, arguments, named, inputs, {}))

        return record_call

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
        return dict(all_leaves(given[0].select(*present)))
    return dict(enumerate(_flat_tensors(given)))


def _flat_tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _flat_tensors(cast(Iterable[Any], value))
        elif isinstance(value, dict):
            found += _flat_tensors(cast(dict[Any, Any], value).values())
    return found


def first_difference(
    calls: list[Call], others: list[Call], differ: Callable[[Tensor, Tensor], bool]
) -> tuple[str, nn.Module | None]:
    """Return the name and module of the first call whose outputs differ between two runs of the same policy.

    The module is None if no call differs.
    """
    names = {call.name: call for call in calls}
    for call, other in zip(calls, others, strict=False):
        if not _any_differ(differ, call.outputs, other.outputs):
            continue
        if not _any_differ(differ, call.inputs, other.inputs):
            return str(call), call.module
        parent = names.get(call.name.rpartition(".")[0], call)
        return str(parent), parent.module
    return "the policy", None


def _any_differ(
    differ: Callable[[Tensor, Tensor], bool],
    values: dict[NestedKey | int, Tensor],
    others: dict[NestedKey | int, Tensor],
) -> bool:
    return any(differ(value, others[key]) for key, value in values.items() if key in others)
