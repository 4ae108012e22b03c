"""Collection of a batch for experiments, with unchecked wiring and early ends of episodes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from recurl.collectors import Collector
from recurl.core.errors import UsageError
from recurl.core.keys import DONE, RESET, TRUNCATED
from recurl.envs import EnvBase, TransformedEnv
from recurl.transforms import Transform


def device_of(policy: Any) -> torch.device | None:
    """Return the device of the policy's parameters, or None if it has no parameters."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), None)


class _EarlyTruncation(Transform):
    """Transform that truncates row i every ``period + i % 3`` steps, so that short experiments have partial resets."""

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


class _TruncatedEnv(TransformedEnv):
    """Environment with early truncation that keeps the ``carry`` of ``base_env``, which may be the faulty part."""

    def carry(self, tensordict: Any) -> Any:
        """Return the root of the next step from ``base_env.carry``."""
        return self.base_env.carry(tensordict)


def collect(policy: Any, env: EnvBase, steps: int) -> TensorDict:
    """Collect ``steps`` steps per row after a reset with a Collector, ``[*B, T]`` (``[1, T]`` for a single row).

    No transforms are appended for the policy, its wiring is not checked, and episodes are truncated early.
    """
    if _can_reset_running_rows(env):
        env = _TruncatedEnv(env, _EarlyTruncation(max(2, steps // 4), env.batch_size, env.device))
    collector = Collector(
        env,
        lambda td: policy(td),  # a plain function, so that the constructor can't check the wiring
        frames_per_batch=steps * env.batch_size.numel(),
        auto_register_policy_transforms=False,
        device=device_of(policy),
        storing_device=device_of(policy),
    )
    batch = collector.collect()
    return batch if batch.ndim > 1 else batch.unsqueeze(0)


def _can_reset_running_rows(env: EnvBase) -> bool:
    """Return whether rows that are not done can be reset, unlike in vector environments with same-step autoreset."""
    td = env.rand_step()
    root = env.carry(td)
    running = ~root[DONE]
    mask = running & (running.reshape(-1).cumsum(0) == 1).reshape(running.shape)  # the first running row
    try:
        env.reset(root.set(RESET, mask))
    except UsageError:
        return False
    return True
