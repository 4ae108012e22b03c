"""Checks of a collector's policy."""

from __future__ import annotations

from tensordict.nn import TensorDictModuleBase
from torch import nn

from recurl.core.errors import ArgumentError, ArgumentTypeError, WiringError
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.envs.transformed import TransformedEnv
from recurl.envs.wiring import check_policy_wiring
from recurl.modules import recurrent_modules
from recurl.transforms import TensorDictPrimer

__all__ = ["check_policy"]


def check_policy(policy: Policy | None, env: EnvBase, init_random_frames: int) -> None:
    """Check that a collector can run a policy in an environment.

    Args:
        policy: maps a root to one with ``"action"``; None for random actions.
        env: the environment, with all its transforms.
        init_random_frames: number of frames with random actions.

    Raises:
        ArgumentError: random frames would contradict stored log-probabilities, or are negative.
        ArgumentTypeError: the policy takes tensors instead of a TensorDict.
        MissingKeyError: the policy reads ``is_init``, and the environment does not write it.
        WiringError: a state of the policy would not be fed back, or would not start from zero.
    """
    if policy is None:
        return
    modules = recurrent_modules(policy) if isinstance(policy, nn.Module) else []
    if isinstance(policy, nn.Module) and _takes_tensors(policy):
        raise ArgumentTypeError(
            f"A policy must read and write a TensorDict, but a {type(policy).__name__} takes tensors: wrap it, "
            "TensorDictModule(net, in_keys=['observation'], out_keys=['action'])."
        )
    if any(module.net.bidirectional for module in modules):
        raise WiringError("A bidirectional module can't step in an environment: use it on whole sequences only.")
    check_policy_wiring(policy, env)
    states = {key for module in modules for key in module.state_keys}
    for transform in env.transform if isinstance(env, TransformedEnv) else ():
        if isinstance(transform, TensorDictPrimer) and (transform.random or transform.default_value != 0.0):
            wrong = sorted(str(key) for key in states & set(transform.primers.keys(True, True)))
            if wrong:
                raise WiringError(
                    f"The primer of {', '.join(wrong)} must give zeros: a step with is_init starts from zero, while a "
                    "replay starts from the stored state. Use make_tensordict_primer()."
                )
    if init_random_frames < 0:
        raise ArgumentError(f"init_random_frames must not be negative, got {init_random_frames}.")
    written = [str(key) for key in getattr(policy, "out_keys", ()) if str(key).endswith("log_prob")]
    if init_random_frames and written:
        raise ArgumentError(
            f"init_random_frames={init_random_frames} would pair random actions with the policy's {written[0]!r}: "
            "build the policy with return_log_prob=False."
        )


def _takes_tensors(policy: nn.Module) -> bool:
    """Return whether ``policy`` is a ``torch.nn`` network that contains no TensorDict modules."""
    plain = type(policy).forward.__module__.startswith("torch.nn.modules")
    return plain and not any(isinstance(module, TensorDictModuleBase) for module in policy.modules())
