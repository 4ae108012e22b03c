"""Wiring of recurrent policies: the transforms an environment needs to feed recurrent states back at each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from recurl.core.errors import MissingKeyError, WiringError
from recurl.core.keys import DONE_KEYS, IS_INIT, REWARD, NestedKey, next_key, normalize_key
from recurl.core.specs import Composite
from recurl.execution.lowering import shared_state
from recurl.transforms import InitTracker, Transform

__all__ = ["Declares", "check_policy_wiring", "policy_transforms", "unfed_states"]


class Declares(Protocol):
    """Object that declares which entries it carries from one step to the next, such as an environment."""

    @property
    def observation_spec(self) -> Composite:
        """Entries of the root and of ``next``."""
        ...

    @property
    def state_spec(self) -> Composite:
        """Entries other than the action that a step reads from the root."""
        ...


def unfed_states(policy: Any, env: Declares) -> list[NestedKey]:
    """Return the keys of the states of ``policy`` that ``env`` would not feed back at the next step.

    A state is a key that the policy (or a recurrent module in it) reads at the root and writes under ``"next"``. It is
    fed back if the environment declares it, for example through a primer. A state that a recurrent module does not
    write under ``"next"`` is never fed back.
    """
    states: dict[NestedKey, None] = {}
    reads, writes = _keys(policy, "in_keys"), _keys(policy, "out_keys")
    for key in reads:
        if next_key(key) in writes and not _declares(env, key):
            states[key] = None
    for module in _recurrent_modules(policy):
        inputs = [key for key in _keys(module, "in_keys") if key != IS_INIT]
        outputs = _keys(module, "out_keys")
        for read, written in zip(inputs[1:], outputs[1:], strict=False):
            if written != next_key(read) or not _declares(env, read):
                states[read] = None
    return list(states)


def check_policy_wiring(policy: Any, env: Declares) -> None:
    """Check that the environment provides the states and ``is_init`` that a policy reads.

    Raises:
        MissingKeyError: the policy reads ``is_init``, but the environment has no ``InitTracker``.
        WiringError: a state is not fed back or is shared by two modules, or the environment overwrites an entry that
            the policy writes under ``"next"``.
    """
    if IS_INIT in _keys(policy, "in_keys") and not _declares(env, IS_INIT):
        raise MissingKeyError(
            "The policy reads 'is_init', which the environment does not write: append an InitTracker "
            "(env.append_transform(InitTracker())), or construct the environment with policy=."
        )
    shared = shared_state(policy.modules() if isinstance(policy, torch.nn.Module) else ())
    if shared is not None:
        raise WiringError(
            f"Each recurrent module of a policy must have its own state keys, but two of them share {shared!r} and "
            "would overwrite each other's state: give one of them other keys, in_keys=[value, 'its_state', ...] and "
            "out_keys=[features, ('next', 'its_state'), ...]."
        )
    overwritten = _overwritten(policy, env)
    if overwritten:
        raise WiringError(
            f"The policy writes {overwritten}, which the environment overwrites at every step with its own entries: "
            "rename the outputs of the policy. A recurrent module names its states by in_keys=[value, 'its_state', ...]"
            " and out_keys=[features, ('next', 'its_state'), ...]."
        )
    missing = unfed_states(policy, env)
    if missing:
        raise WiringError(
            f"The states {missing} of the policy would not be fed back, so it would have no memory: append the primer "
            "of its recurrent module (env.append_transform(module.make_tensordict_primer())) and let the module write "
            "each state under ('next', state); or construct the environment with policy=."
        )


def _overwritten(policy: Any, env: Declares) -> list[NestedKey]:
    """Return the outputs of ``policy`` under ``"next"``, other than states, that a step of ``env`` overwrites."""
    written = {key for module in (policy, *_recurrent_modules(policy)) for key in _keys(module, "out_keys")}
    own = [key for key in env.observation_spec.keys(True, True) if key not in env.state_spec]
    return [key for key in map(next_key, (*own, REWARD, *DONE_KEYS)) if key in written]


def policy_transforms(policy: Any, env: Declares) -> list[Transform]:
    """Return the transforms that ``policy`` needs and ``env`` lacks: an InitTracker and primers of its modules."""
    transforms: list[Transform] = [] if _declares(env, IS_INIT) else [InitTracker()]
    for module in _recurrent_modules(policy):
        primer = module.make_tensordict_primer()
        if not all(_declares(env, key) for key in primer.primers.keys(True, True)):
            transforms.append(primer)
    return transforms


def _recurrent_modules(policy: Any) -> Iterator[Any]:
    if isinstance(policy, torch.nn.Module):
        for module in policy.modules():
            if hasattr(module, "make_tensordict_primer"):
                yield module


def _keys(module: Any, name: str) -> list[NestedKey]:
    return [normalize_key(key) for key in getattr(module, name, ())]


def _declares(env: Declares, key: NestedKey) -> bool:
    """Return whether ``env`` carries the entry ``key`` as a tensor, not as a group of entries."""
    found = (env.observation_spec.get(key), env.state_spec.get(key))
    return any(spec is not None and not isinstance(spec, Composite) for spec in found)
