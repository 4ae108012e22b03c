"""Check that losses reproduce the collected log-probabilities."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor

from recurl.core.keys import ACTION, NestedKey
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.parts import keys_of
from recurl.diagnostics.preserve import preserved
from recurl.diagnostics.result import Fault, check
from recurl.diagnostics.runs import Call, all_leaves, record
from recurl.sequences.mode import ExplorationType, set_exploration_type, set_recurrent_mode

_TOLERANCE_FACTOR = 10  # a log-probability is a difference of larger numbers
_STEPPED = (
    "don't modify an action, its distribution or its log-probability once they are written: clip and scale actions in "
    "the environment (a transform), explore through the distribution itself; and check with the weights used for "
    "collection"
)
_EXPLORATION = "make the distribution parameters independent of exploration_type(): collectors set one, losses don't"
_REPLAYED = (
    "compute the same distribution parameters for steps [N] and for sequences [*B, T], from the same is_init and "
    "stored states"
)


@check("log_prob")
def check_log_prob(policy: Any, batch: TensorDictBase) -> str:
    """Check that log-probabilities of the collected actions, recomputed as in a loss, equal the collected ones.

    Their ratio must be 1 before the first gradient step; otherwise the first gradient is wrong.

    Args:
        policy: policy that collected ``batch``, with the same weights and in the same mode.
        batch: batch as collected, ``[*B, T]``.
    """
    forms = ex.sequences(policy, batch)
    with set_exploration_type(ExplorationType.RANDOM):
        collected = _gaps(policy, ex.tokens(batch), False)
        replayed = [gap for data in forms for gap in _gaps(policy, data, True)]
    in_loss = [gap for data in forms for gap in _gaps(policy, data, True)]
    for gaps, how, fix in (
        (collected, "recomputed step by step", _STEPPED),
        (replayed, "as replayed", _REPLAYED),
        (in_loss, "as computed in a loss, without an exploration type,", _EXPLORATION),
    ):
        for key, gap, limit in gaps:
            if not gap <= limit:
                raise Fault(f"{key} as collected and {how} differ by {gap:.2g} (relative)", fix)
    if not collected:
        return "the policy builds no distribution, or the batch has no log-probabilities: nothing to compare"
    worst = max(gap for _, gap, _ in (*collected, *replayed, *in_loss))
    return f"{', '.join(dict.fromkeys(key for key, _, _ in collected))} recomputed: difference {worst:.0e}"


def _gaps(policy: Any, data: TensorDictBase, mode: bool) -> list[tuple[str, float, float]]:
    """Return the key of the log-probability, its deviation, and the tolerated deviation of each distribution."""
    calls, _ = record(policy, data, mode)
    gaps: list[tuple[str, float, float]] = []
    for call in calls:
        keys = [key for key in _log_prob_keys(call.module) if ex.has(data, key)]
        if (
            keys
            and _makes_distribution(call.module)
            and all(ex.has(data, action) for action in _actions_of(call.module))
        ):
            with preserved(policy), set_recurrent_mode(mode), torch.no_grad():
                seen = _total(_log_prob(call, data), data)
            stored = sum(_total(data.get(key), data) for key in keys)
            everywhere = torch.ones(data.numel(), dtype=torch.bool, device=seen.device)
            gap = ex.distance(seen, torch.as_tensor(stored), everywhere)
            gaps.append((", ".join(map(str, keys)), gap, _TOLERANCE_FACTOR * ex.tolerance(seen)))
    return gaps


def _makes_distribution(module: Any) -> bool:
    """Return whether ``module`` itself, rather than a submodule, builds a distribution."""
    return hasattr(module, "get_dist") and not any(
        part is not module and hasattr(part, "get_dist") for part in module.modules()
    )


def _actions_of(module: object) -> list[NestedKey]:
    """Return the keys of the entries sampled from a distribution."""
    keys = keys_of(module, "dist_sample_keys") or keys_of(module, "out_keys")[:1]
    return keys or [ACTION]


def _log_prob_keys(module: Any) -> list[NestedKey]:
    try:
        keys = getattr(module, "log_prob_keys", None)
    except RuntimeError:  # raised if tensordict's setting of log-probability aggregation has changed
        keys = None
    return list(keys) if keys else [f"{ACTION}_log_prob"]


def _log_prob(call: Call, data: TensorDictBase) -> Any:
    """Return the log-probability of the actions in ``data`` under the distribution built by a module."""
    module: Any = call.module
    given = TensorDict({}, data.batch_size, device=data.device) if call.inputs else data.copy()
    for key, value in (
        *call.inputs.items(),
        *((k, data.get(k)) for k in keys_of(module, "out_keys") if ex.has(data, k)),
    ):
        given.set(cast(NestedKey, key), value)
    distribution = module.get_dist(given)
    if isinstance(distribution, CompositeDistribution):
        return module.log_prob(given, dist=distribution)
    return distribution.log_prob(*(data.get(key) for key in _actions_of(module)))


def _total(value: Any, data: TensorDictBase) -> Tensor:
    """Return one number per token, ``[N]``."""
    if isinstance(value, TensorDictBase):
        return sum((_total(part, data) for _, part in all_leaves(value)), torch.zeros(()))
    return value.reshape(data.numel(), -1).sum(-1)
