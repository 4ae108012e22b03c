"""All checks of a policy on a batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from recurl.diagnostics import experiment as ex
from recurl.diagnostics.collection import device_of
from recurl.diagnostics.marks import check_is_init, check_traj_ids
from recurl.diagnostics.memory import check_feedback, check_memory, check_reset
from recurl.diagnostics.replay import check_gradient, check_leak, check_mode, check_replay
from recurl.diagnostics.result import CheckResult, Fault, check
from recurl.diagnostics.states import first_root, states_in


def check_batch(policy: Any, batch: TensorDictBase) -> list[CheckResult]:
    """Run every check that needs a policy and a batch only, on a batch of your own.

    Args:
        policy: the policy that collected the batch, with the weights it had then.
        batch: ``[*B, T]`` as collected: before any recurrent pass, sampling or flattening.

    Example:
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from recurl.collectors import Collector
        >>> from recurl.envs import GymEnv
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> act = TensorDictModule(lambda x: (x.sum(-1) > 0).long(), ["features"], ["action"])
        >>> policy = TensorDictSequential(gru, act)
        >>> batch = Collector(GymEnv("CartPole-v1", num_envs=2), policy, frames_per_batch=40).collect()
        >>> all(result.passed for result in check_batch(policy, batch))
        True
    """
    device = device_of(policy)
    if device is not None and batch.device != device:
        batch = batch.to(device)
    if not states_in(policy, batch):
        return [check_feed_forward(policy, first_root(batch))]
    return [
        check_is_init(batch),
        check_traj_ids(batch),
        check_mode(policy, batch),
        check_feedback(policy, batch),
        check_reset(policy, batch),
        check_memory(policy, batch),
        check_leak(policy, batch),
        check_replay(policy, batch),
        check_gradient(policy, batch),
    ]


@check("recurrent")
def check_feed_forward(policy: Any, root: TensorDictBase) -> str:
    """Check that a policy without recurrent states has no memory hidden in itself."""
    with ex.evaluating(policy), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = ex.run(policy, root, False)
        torch.manual_seed(0)
        second = ex.run(policy, root, False)
    for key, value in ex.leaves(first):
        if not torch.equal(value, second.get(key)):
            raise Fault(
                f"the policy has no recurrent state, yet {key!r} differs when the same root is given again: it keeps a "
                "state in itself, which no batch holds and no reset clears",
                ex.USE_MODULE,
            )
    return "the policy has no recurrent module and writes no state under 'next': feed-forward, nothing to check"
