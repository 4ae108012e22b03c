"""The greedy policy as a function of tensors, hidden states in and out, and whether another function equals it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from recurl.envs import EnvBase, interact
from recurl.errors import UnsupportedError
from recurl.keys import ACTION, IS_INIT, NestedKey, next_key
from recurl.mode import ExplorationType, set_exploration_type, set_recurrent_mode
from recurl.modules.recurrent import RecurrentModule

Function: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
VERIFIED_STEPS = 1_000
_RESET_RATE = 1 / 50
_TOLERANCE = 1e-4
_SEED = 7


class PolicyStep(nn.Module):
    """One greedy step of a policy, on tensors.

    Args:
        actor: the policy, ending in a sampler or a choice; its hidden states are found by their modules.

    Attributes:
        observations: keys of the observations, in the order of the arguments.
        states: keys of the hidden states, likewise.
        inputs: names of all arguments; the parts of a nested key are joined by a dot.
        outputs: names of all results.

    Shapes:
        observations ``[B, ...]``, ``is_init`` bool ``[B]`` (where it is true the states count as zeros; a policy
        without memory takes it too), states ``[B, L, H]``; to the action ``[B, ...]`` and the states after.
    """

    def __init__(self, actor: TensorDictSequential) -> None:
        super().__init__()
        self.actor = actor
        modules = [module for module in actor.modules() if isinstance(module, RecurrentModule)]
        self.states: list[NestedKey] = [key for module in modules for key in module.state_keys]
        known = (IS_INIT, *self.states)
        self.observations = [key for key in cast(list[NestedKey], actor.in_keys) if key not in known]
        self.inputs = [_name(key) for key in (*self.observations, *known)]
        self.outputs = [_name(ACTION), *(_name(next_key(key)) for key in self.states)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the action and the states after, for the arguments named by ``inputs``."""
        keys: tuple[Any, ...] = (*self.observations, IS_INIT, *self.states)
        step: TensorDictBase = TensorDict(dict(zip(keys, tensors, strict=True)), tensors[0].shape[:1])
        with set_exploration_type(ExplorationType.DETERMINISTIC), set_recurrent_mode(False):
            return self.results(self.actor(step))

    def arguments(self, root: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the arguments for the root of a step, ``[B]``."""
        is_init = root.get(IS_INIT, None)
        flag = torch.zeros(root.batch_size, dtype=torch.bool) if is_init is None else is_init.reshape(root.batch_size)
        return (*(root.get(key) for key in self.observations), flag, *(root.get(key) for key in self.states))

    def results(self, step: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the action and the states after from a step that the policy has taken."""
        return (step.get(ACTION), *(step.get(next_key(key)) for key in self.states))


def _name(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def verify(function: Function, policy: PolicyStep, env: EnvBase, steps: int = VERIFIED_STEPS) -> None:
    """Compare ``function`` with ``policy`` at every step of episodes, some cut short by a reset of the states.

    Both get the same arguments, with the states that the policy reached; all rows together and the first alone.
    Actions and states must agree to 1e-4 (absolute and relative); another discrete action must be of equal value.

    Args:
        function: from the arguments of ``policy`` to its results.
        policy: the policy.
        env: environments ``[B]`` in which the policy acts.
        steps: steps of each environment.

    Raises:
        UnsupportedError: they differ.
    """
    generator = torch.Generator().manual_seed(_SEED)
    taken = 0

    def act(root: TensorDictBase) -> TensorDictBase:
        nonlocal taken
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
        return step

    interact(env, act, env.reset(), steps, write=lambda index, step: None)


def _compare(found: Sequence[Tensor], policy: PolicyStep, step: TensorDictBase, where: str) -> None:
    expected = policy.results(step)
    same = [_close(*pair) for pair in zip(found, expected, strict=True)]
    same[0] = same[0] or _tied(found[0], expected[0], step.get(policy.actor[-1].in_keys[0]))
    if not all(same):
        names = [name for name, equal in zip(policy.outputs, same, strict=True) if not equal]
        raise UnsupportedError(
            f"The exported function must give what the policy gives, but {', '.join(names)} differ at {where}: this "
            "policy can't be exported in this format; try the other one, and report it."
        )


def _alike(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and found.dtype == expected.dtype


def _close(found: Tensor, expected: Tensor) -> bool:
    return _alike(found, expected) and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _tied(found: Tensor, expected: Tensor, values: Tensor) -> bool:
    """Whether discrete actions, where they differ, are worth the same: rounding may decide between them."""
    if found.is_floating_point() or not _alike(found, expected):
        return False
    return _close(*(values.gather(-1, action.unsqueeze(-1)) for action in (found, expected)))
