"""Selection of actions: lowered policies, policies on TensorDicts or another device, and random actions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl.core.keys import ACTION
from recurl.core.spans import TRANSFERS, span
from recurl.core.specs import OneHot
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.execution.compiled import CompiledNetwork
from recurl.execution.explain import Explanation
from recurl.execution.lowering import Network
from recurl.sequences.entries import Entries, Step
from recurl.sequences.mode import set_recurrent_mode

__all__ = ["act_on_tensordict", "explain", "lowered", "on_cpu", "on_device", "why_not_lowered"]


def explain(policy: Policy | None, env: EnvBase, root: Step | None = None) -> Explanation:
    """Explain how a collector steps ``policy`` in ``env``: in C++, on plain tensors, or on TensorDicts.

    Args:
        policy: the policy; None for random actions.
        env: the environment.
        root: an example of its roots, for their shapes and dtypes; made from its specs when None.

    Example:
        >>> from recurl.envs import GymEnv
        >>> print(explain(lambda td: td, GymEnv("CartPole-v1")))
        steps: TensorDicts (not cpp or tensors: function is not a TensorDict module)
    """
    network, reason = lowered(policy, env)
    compiled = reason
    if reason is None and network is None:
        compiled = "there is no policy"
    elif reason is None and not on_cpu(env):
        compiled = f"steps run on {env.device}"
    elif reason is None and network is not None:
        with set_recurrent_mode(False), torch.no_grad():
            example: Any = env.fake_tensordict() if root is None else root
            compiled = CompiledNetwork(network).explain(Entries.of(example))["cpp"]
    return Explanation("steps", {"cpp": compiled, "tensors": reason})


def on_cpu(env: EnvBase) -> bool:
    """Return whether an environment's tensors are on the CPU."""
    return (env.device or torch.device("cpu")).type == "cpu"


def why_not_lowered(policy: Policy | None, env: EnvBase) -> str | None:
    """Return ``explain(policy, env)["tensors"]``; the name of earlier versions."""
    return explain(policy, env)["tensors"]


def lowered(policy: Policy | None, env: EnvBase) -> tuple[Network | None, str | None]:
    """Return ``policy`` as a lowered network, and the reason why it or ``env`` needs TensorDicts, or None."""
    network = None if policy is None else Network([policy])
    return network, env.explain()["tensors"] or (None if network is None else network.obstacle)


def random_action(env: EnvBase, tensordict: TensorDictBase) -> Any:
    """Draw a random action in the encoding (one-hot or integer) of the policy's action in ``tensordict``."""
    like: Any = tensordict.get(ACTION)
    spec, action = env.action_spec, env.rand_action(tensordict.copy()).get(ACTION)
    if not isinstance(action, Tensor) or not isinstance(like, Tensor):
        return action
    if isinstance(spec, OneHot) and like.shape == env.batch_size:
        return action.argmax(-1).to(like.dtype)
    if action.shape != like.shape and like.shape[:-1] == action.shape:
        return F.one_hot(action, like.shape[-1]).to(like.dtype)
    return action


def act_on_tensordict(
    policy: Policy,
    device: torch.device | None,
    env: EnvBase,
    random_steps: float,
    past: Sequence[object],
    tensordict: TensorDictBase,
) -> TensorDictBase:
    """Return ``tensordict`` with the action of a policy on ``device``, or a random action.

    Args:
        policy: the policy.
        device: device of the policy; None for the environment's.
        env: the environment.
        random_steps: number of initial steps of the batch with random actions.
        past: sequence with one item for each completed step of the batch.
        tensordict: the root of the step.
    """
    if device is not None and device != env.device:
        with span(TRANSFERS):
            tensordict = tensordict.to(device)
        tensordict = policy(tensordict)
        with span(TRANSFERS):
            tensordict = tensordict.to(env.device or "cpu")
    else:
        tensordict = policy(tensordict)
    if len(past) < random_steps:
        tensordict.set(ACTION, random_action(env, tensordict))
    return tensordict


def on_device(policy: Policy, device: torch.device | None) -> Policy:
    """Return ``policy`` itself if it is on ``device`` or is not a module, else a copy on ``device``."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = itertools.chain(policy.parameters(), policy.buffers())
    if all(tensor.device.type == device.type and device.index in (None, tensor.device.index) for tensor in tensors):
        return policy
    return copy.deepcopy(policy).to(device)
