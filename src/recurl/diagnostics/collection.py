"""Collecting a batch for an experiment: whatever the wiring, with ends of episodes in it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from recurl.collectors import Collector
from recurl.envs import EnvBase, TransformedEnv
from recurl.errors import UsageError
from recurl.keys import DONE, RESET, TRUNCATED
from recurl.transforms import Transform


def device_of(policy: Any) -> torch.device | None:
    """Return the device of the policy's parameters, None if it has none."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), None)


class _Ends(Transform):
    """Truncates row i every ``period + i % 3`` steps, so that a short experiment sees ends, of some rows at a time."""

    def __init__(self, period: int, batch_size: torch.Size, device: torch.device | None) -> None:
        rows = torch.arange(batch_size.numel(), device=device).reshape(*batch_size, 1)
        self._limit = period + rows % 3
        self._count = torch.zeros_like(rows)

    def _reset(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if tensordict is None or RESET not in tensordict:
            self._count.zero_()
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._count += 1
        over = self._count >= self._limit
        for key in (TRUNCATED, DONE):
            next_tensordict.set(key, next_tensordict[key] | over)
        self._count.masked_fill_(next_tensordict[DONE], 0)
        return next_tensordict


class _Cut(TransformedEnv):
    """``base_env`` with early ends; roots are carried by its own method, which may be what is wrong with it."""

    def carry(self, tensordict: Any) -> Any:
        """Return the root that follows a step, as ``base_env`` makes it."""
        return self.base_env.carry(tensordict)


def collect(policy: Any, env: EnvBase, steps: int) -> TensorDict:
    """Return ``steps`` steps of every row from a reset, as a Collector collects them, ``[*B, T]`` (``[1, T]`` for one).

    Nothing is appended for the policy, and nothing refused. Episodes are cut so that several end.
    """
    if _resets_open_rows(env):
        env = _Cut(env, _Ends(max(2, steps // 4), env.batch_size, env.device))
    collector = Collector(
        env,
        lambda td: policy(td),  # a plain function: the constructor finds nothing in it to refuse
        frames_per_batch=steps * env.batch_size.numel(),
        auto_register_policy_transforms=False,
        device=device_of(policy),
        storing_device=device_of(policy),
    )
    batch = collector.collect()
    return batch if batch.ndim > 1 else batch.unsqueeze(0)


def _resets_open_rows(env: EnvBase) -> bool:
    """Whether rows that are not done can be reset: not where a vector environment resets by itself within the step."""
    td = env.rand_step()
    root = env.carry(td)
    still_open = ~root[DONE]
    mask = still_open & (still_open.reshape(-1).cumsum(0) == 1).reshape(still_open.shape)  # the first of them
    try:
        env.reset(root.set(RESET, mask))
    except UsageError:
        return False
    return True
