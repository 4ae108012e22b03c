"""Step-by-step verification of an exported policy against the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.core.keys import IS_INIT
from recurl.core.seeding import derive_seed
from recurl.envs import EnvBase, interact
from recurl.sequences.mode import ExplorationType, set_exploration_type
from recurl.trainers.export.policy_step import PolicyStep

Function: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
VERIFIED_STEPS = 1_000
_RESET_RATE = 1 / 50
_TOLERANCE = 1e-4


def verify(function: Function, policy: PolicyStep, env: EnvBase, steps: int = VERIFIED_STEPS) -> None:
    """Compare ``function`` with ``policy`` at every step of episodes, with occasional state resets.

    Both receive the same arguments, including the states computed by the policy: once with all rows and once with the
    first row alone. Actions and states must agree within 1e-4 (absolute and relative). A different discrete action is
    accepted if it has the same value.

    Args:
        function: maps the arguments of ``policy`` to its results.
        policy: the policy.
        env: environments of any batch shape, on any device, in which the policy acts on the CPU.
        steps: steps per environment.

    Raises:
        UnsupportedError: the results differ.
    """
    generator = torch.Generator().manual_seed(derive_seed(0, "resets of the verification"))
    taken = 0

    def act(root: TensorDictBase) -> TensorDictBase:
        nonlocal taken
        root = rows_on_cpu(root)
        if policy.states:
            cut = torch.rand(root.batch_size, generator=generator) < _RESET_RATE
            root.set(IS_INIT, root.get(IS_INIT) | cut.unsqueeze(-1))
        arguments = policy.arguments(root)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            step = policy.actor(root)
        for rows in (slice(None), slice(0, 1)):
            found = function([argument[rows] for argument in arguments])
            _compare(found, policy, step[rows], f"step {taken} of {steps}")
        taken += 1
        return step.reshape(env.batch_size).to(env.device)

    interact(env, act, env.reset(), steps, write=lambda index, step: None)


def rows_on_cpu(root: TensorDictBase) -> TensorDictBase:
    """Return the root of a step on the CPU, with a single batch dimension, ``[B]``."""
    return root.to("cpu").reshape(-1)


def _compare(found: Sequence[Tensor], policy: PolicyStep, step: TensorDictBase, where: str) -> None:
    expected = policy.results(step)
    same = [_close(*pair) for pair in zip(found, expected, strict=True)]
    if not all(same[: len(policy.actions)]) and _tied(found, expected, policy, step):
        same[: len(policy.actions)] = [True] * len(policy.actions)
    if not all(same):
        names = [name for name, equal in zip(policy.outputs, same, strict=True) if not equal]
        raise UnsupportedError(
            f"The exported function must match the policy, but {', '.join(names)} differ at {where}: this policy can't "
            "be exported in this format; try another format, and report it."
        )


def _same_layout(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and found.dtype == expected.dtype


def _close(found: Tensor, expected: Tensor) -> bool:
    return _same_layout(found, expected) and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _tied(found: Sequence[Tensor], expected: Sequence[Tensor], policy: PolicyStep, step: TensorDictBase) -> bool:
    """Return whether differing discrete actions have equal values, so that rounding decides between them."""
    pairs = list(zip(found, expected, strict=True))[: len(policy.actions)]
    if not all(_same_layout(*pair) and (not pair[0].is_floating_point() or _close(*pair)) for pair in pairs):
        return False
    values = _value_function(policy.actor[-1], step)
    same = [expected if expected.is_floating_point() else found for found, expected in pairs]
    return _close(values(same), values([expected for _, expected in pairs]))


def _value_function(sampler: Any, step: TensorDictBase) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that maps the parts of an action to its value or log-probability."""
    if hasattr(sampler, "get_dist"):
        return lambda actions: sampler.get_dist(step).log_prob(*actions)
    values = step.get(sampler.in_keys[0])
    return lambda actions: values.gather(-1, actions[0].unsqueeze(-1))
