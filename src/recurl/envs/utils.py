"""Helpers around environments: the step of the decision process, checks, and the wiring of policies."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from recurl.absent import absent_names
from recurl.errors import ArgumentError, MissingKeyError, WiringError
from recurl.keys import (
    ACTION,
    COLLECTOR,
    DONE,
    IS_INIT,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    next_key,
    normalize_key,
    shared_state,
)
from recurl.mode import ExplorationType, exploration_type, set_exploration_type
from recurl.transforms import InitTracker, Transform

if TYPE_CHECKING:
    from recurl.envs.base import EnvBase

__all__ = [
    "ExplorationType",
    "check_env_specs",
    "check_policy_wiring",
    "exploration_type",
    "policy_transforms",
    "set_exploration_type",
    "step_mdp",
    "unfed_states",
]

if not TYPE_CHECKING:  # for a checker a module with __getattr__ has every name
    __getattr__ = absent_names(__name__, StepMDP="write step_mdp(tensordict)", _StepMDP="write step_mdp(tensordict)")


def step_mdp(
    tensordict: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
) -> TensorDict:
    """Return the root that follows a step: the entries of ``"next"``, promoted.

    Tensors are shared with ``tensordict``, not copied.

    Args:
        tensordict: the result of ``env.step``, any batch size.
        keep_other: keep root entries that have no counterpart under ``"next"``.
        exclude_reward: leave the reward out.
        exclude_done: leave ``done``, ``terminated`` and ``truncated`` out.
        exclude_action: leave the action out.

    Raises:
        MissingKeyError: ``tensordict`` has no ``"next"``.

    Example:
        >>> td = TensorDict({"observation": torch.zeros(1), "next": {"observation": torch.ones(1)}})
        >>> step_mdp(td)["observation"]
        tensor([1.])
    """
    after = tensordict.get(NEXT, None)
    if after is None:
        raise MissingKeyError(f"step_mdp needs the result of env.step, with 'next': got {list(tensordict.keys())}.")
    out = tensordict.exclude(NEXT) if keep_other else TensorDict({}, tensordict.batch_size, device=tensordict.device)
    out = out.copy().update(after.copy())
    excluded = [REWARD] * exclude_reward + [DONE, TERMINATED, TRUNCATED] * exclude_done + [ACTION] * exclude_action
    for key in excluded:
        out.pop(key, None)
    return out


def unfed_states(policy: Any, env: EnvBase) -> list[NestedKey]:
    """Return the states of ``policy`` that ``env`` would not feed back from one step to the next.

    A state is a key that the policy (or a recurrent module in it) reads at the root and writes under ``"next"``;
    it is fed back when the environment declares it, as a primer makes it do. A recurrent module whose state is
    written anywhere else than under ``"next"`` is never fed back.
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


def check_policy_wiring(policy: Any, env: EnvBase) -> None:
    """Refuse a policy whose states the environment would not feed back, or whose ``is_init`` it lacks.

    Raises:
        MissingKeyError: the policy reads ``is_init``, which only an ``InitTracker`` writes.
        WiringError: a state is not fed back, or belongs to two modules.
    """
    if IS_INIT in _keys(policy, "in_keys") and not _declares(env, IS_INIT):
        raise MissingKeyError(
            "The policy reads 'is_init', which the environment does not write: append an InitTracker "
            "(env.append_transform(InitTracker())), or construct the environment with policy=."
        )
    shared = shared_state(_recurrent_modules(policy))
    if shared is not None:
        raise WiringError(
            f"Each recurrent module of a policy must have states of its own, but two keep theirs under {shared!r} and "
            "would overwrite each other's: give one of them other keys, in_keys=[value, 'its_state', ...] and "
            "out_keys=[features, ('next', 'its_state'), ...]."
        )
    missing = unfed_states(policy, env)
    if missing:
        raise WiringError(
            f"The states {missing} of the policy would not be fed back, it would have no memory: append the primer of "
            "its recurrent module (env.append_transform(module.make_tensordict_primer())) and let the module write "
            "each state under ('next', state); or construct the environment with policy=."
        )


def policy_transforms(policy: Any, env: EnvBase) -> list[Transform]:
    """Return what ``env`` lacks to feed ``policy``: an InitTracker and the primers of its recurrent modules."""
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


def _declares(env: EnvBase, key: NestedKey) -> bool:
    return key in env.observation_spec or key in env.state_spec


def check_env_specs(env: EnvBase, max_steps: int = 5) -> None:
    """Refuse an environment whose resets and steps don't match its specs: keys, shapes, dtypes and domains.

    Resets ``env`` and makes up to ``max_steps`` random steps.

    Args:
        env: the environment.
        max_steps: most steps to make.

    Raises:
        ArgumentError: the first entry that does not match.

    Example:
        >>> from recurl.envs import GymEnv
        >>> check_env_specs(GymEnv("CartPole-v1"))
    """
    root = env.reset()
    for _ in range(max_steps):
        _check(env, root, "the root after reset")
        td = env.rand_step(root)
        _check(env, td.get(NEXT), "'next' after step", reward=True)
        root = env.maybe_reset(env.carry(td))
        if not env.action_spec.is_in(td.get(ACTION)):
            raise ArgumentError(f"A random action is not in the action spec {env.action_spec}: {td.get(ACTION)}.")
    fake, real = env.fake_tensordict(), env.rollout(max_steps)[..., 0].exclude(COLLECTOR)
    extra = set(real.keys(True, True)) ^ set(fake.keys(True, True))
    if extra:
        raise ArgumentError(
            f"A rollout and the specs must have the same entries, they differ in {sorted(map(str, extra))}."
        )


def _check(env: EnvBase, td: TensorDictBase, where: str, reward: bool = False) -> None:
    specs = {**dict(env.observation_spec.items(True, True)), **dict(env.state_spec.items(True, True))}
    specs.update(env.done_spec.items())
    if reward:
        specs[REWARD] = env.reward_spec
    for key, spec in specs.items():
        value = td.get(key, None)
        if not spec.is_in(value):
            got = "nothing" if value is None else f"{list(value.shape)} {value.dtype}"
            raise ArgumentError(f"{where} must hold {key!r} in {spec}, got {got}: {value}.")


def complete_done(after: TensorDictBase) -> None:
    """Add to the result of a step those of ``done``, ``terminated`` and ``truncated`` that follow from the others.

    Raises:
        MissingKeyError: it has none of them.
    """
    known = [after.get(key) for key in (DONE, TERMINATED, TRUNCATED) if key in after]
    if not known:
        raise MissingKeyError("A step must return 'done', or 'terminated' and 'truncated': it returned none of them.")
    none = torch.zeros_like(known[0])
    if TERMINATED not in after:
        truncated = after.get(TRUNCATED, none)
        after.set(TERMINATED, after.get(DONE) & ~truncated if DONE in after else none)
    if TRUNCATED not in after:
        after.set(TRUNCATED, after.get(DONE) & ~after.get(TERMINATED) if DONE in after else none)
    after.set(DONE, after.get(TERMINATED) | after.get(TRUNCATED))


def checked_seed(seed: Any) -> int:
    """Return ``seed`` as an integer.

    Raises:
        ArgumentError: it is negative, or no integer.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(f"A seed must be an integer that is not negative, got {seed!r}.")
    return number
