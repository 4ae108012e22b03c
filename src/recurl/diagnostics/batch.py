"""Run all checks of a policy on a batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from recurl.diagnostics.collection import device_of
from recurl.diagnostics.influence import check_action
from recurl.diagnostics.log_prob import check_log_prob
from recurl.diagnostics.marks import check_is_init, check_traj_ids
from recurl.diagnostics.memory import check_feedback, check_memory, check_reset
from recurl.diagnostics.repeat import check_repeat
from recurl.diagnostics.replay import check_gradient, check_leak, check_mode, check_replay, check_start
from recurl.diagnostics.result import CheckResult
from recurl.diagnostics.rows import check_rows
from recurl.diagnostics.states import states_in
from recurl.sequences.start_states import refuse

_CHECKS = (check_replay, check_log_prob)
_RECURRENT_CHECKS = (
    check_feedback,
    check_reset,
    check_memory,
    check_action,
    check_leak,
    check_replay,
    check_start,
    check_log_prob,
    check_gradient,
)


def check_batch(policy: Any, batch: TensorDictBase) -> list[CheckResult]:
    """Run all checks that need only a policy and a batch.

    Policy, batch and random generators are left unchanged. If the policy is not deterministic or mixes rows (checks
    ``repeat`` and ``rows``), the checks that compare its outputs are skipped.

    Args:
        policy: policy that collected the batch, with the same weights and in the same mode (training or evaluation).
        batch: batch ``[*B, T]`` as collected, before any recurrent pass, sampling or flattening.

    Returns:
        One result per check.

    Raises:
        UsageError: recurrent states are stored sparsely; see ``sequence_length`` of ``Collector``.

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
    refuse(batch, "check_batch")
    device = device_of(policy)
    if device is not None and batch.device != device:
        batch = batch.to(device)
    recurrent = bool(states_in(policy, batch))
    if recurrent:
        results = [check_is_init(batch), check_traj_ids(batch), check_mode(policy, batch)]
    else:
        results = [CheckResult("recurrent", True, "the policy has no state under 'next': it is feed-forward")]
    calls = [check_repeat(policy, batch), check_rows(policy, batch)]
    if not all(result.passed for result in calls):
        return results + calls  # outputs can't be compared
    checks = _RECURRENT_CHECKS if recurrent else _CHECKS
    return results + calls + [check(policy, batch) for check in checks]
