"""Advantage estimators on TensorDict batches."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.errors import ArgumentError, MissingKeyError
from recurl.keys import (
    DONE,
    IS_INIT,
    MASK,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    NestedKey,
    next_key,
    normalize_key,
)
from recurl.mode import set_recurrent_mode
from recurl.objectives.common import entry, from_entries, per_token, standardized, subset
from recurl.objectives.value.functional import generalized_advantage_estimate
from recurl.recurrence.boundaries import Boundaries

__all__ = ["GAE"]

_FROM_ENV = "Collect it with an environment of recurl, which writes it under 'next' at every step."
_GATHERED_ON = ("cpu",)  # where counting the ends of trajectories costs nothing
_ADVANTAGE, _TARGET, _VALUE = "advantage", "value_target", "state_value"


class _Stream(NamedTuple):
    """What of a batch the estimate reads, one number per token, ``[*B, T]`` each."""

    reward: Tensor
    terminated: Tensor
    starts: Tensor
    ends: Tensor
    mask: Tensor | None


class GAE(TensorDictModuleBase):
    """Generalised advantage estimation with exact values, for recurrent and feed-forward critics.

    One pass of the critic over the batch, in recurrent mode, gives V of every observation and the state after every
    token. Inside a trajectory the value of the next observation is that of the next token. Where a trajectory, slice
    or row ends, the critic makes one step from the state it has just computed (never a stored one) with the true next
    observation. A step that ``terminated`` bootstraps 0; any other end, truncation included, bootstraps that value.
    See :func:`~recurl.objectives.value.functional.generalized_advantage_estimate` for the formula.

    Args:
        gamma: discount factor per step.
        lmbda: trace decay.
        value_network: critic, from observations (and recurrent states) to ``"state_value"``, the *whole* chain: the
            next observations go through it too. It may share modules with the policy. None: the batch already holds
            ``"state_value"`` and ``("next", "state_value")``.
        average_gae: shift and scale the advantage to mean 0 and standard deviation 1 over the batch (``value_target``
            is taken before that).
        differentiable: let gradients flow from the results into the critic.

    Reads a batch ``[T]`` or ``[*B, T]``, time last: what the critic reads, at the root and (states and ``"is_init"``
    excepted) under ``"next"``; ``("next", "reward")``, ``("next", "done")``, ``("next", "terminated")``, all
    ``[*B, T, 1]``; and, where present, ``"is_init"``, ``("collector", "traj_ids")`` and ``("collector", "mask")``. A
    trajectory ends at a row's end, at ``done``, before ``is_init``, and where trajectory ids or the mask change.

    Writes ``"advantage"``, ``"value_target"``, ``"state_value"`` and ``("next", "state_value")`` (what is
    bootstrapped: 0 where terminated), each ``[*B, T, 1]``, into the batch, and returns it. Recurrent states of the
    batch are left as they are; where those of the critic are missing altogether, segments start from zeros. Where a
    mask is present, advantage and target are 0 on tokens that don't count.

    Raises:
        ArgumentError: gamma or lmbda is not in [0, 1]; the batch has no time dimension, or time is not its last;
            the critic's value is not one number per token.
        MissingKeyError: an entry is missing, or the critic reads one (such as a trunk's feature) that doesn't exist
            under ``"next"``.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> critic = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["observation"], out_keys=["state_value"])
        >>> gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        >>> ends = torch.tensor([[False], [False], [True]])
        >>> batch = TensorDict({"observation": torch.zeros(3, 1)}, [3])
        >>> batch["next"] = TensorDict(
        ...     {"observation": torch.zeros(3, 1), "reward": torch.ones(3, 1), "done": ends, "terminated": ends}, [3]
        ... )
        >>> gae(batch)["advantage"].shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        gamma: float,
        lmbda: float,
        value_network: TensorDictModuleBase | None,
        average_gae: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0.0 <= value <= 1.0:
                raise ArgumentError(f"{name} must be in [0, 1], got {value}.")
        self.gamma = gamma
        self.lmbda = lmbda
        self.value_network = value_network
        self.average_gae = average_gae
        self.differentiable = differentiable
        keys, written = _critic_keys(value_network)
        self._states = [key for key in keys if next_key(key) in written]
        self._observed = [key for key in keys if key != IS_INIT and key not in self._states]
        self._critic_keys = keys
        known = [_VALUE, next_key(_VALUE)] if value_network is None else keys
        self.in_keys = cast(Any, [*known, *map(next_key, (*self._observed, REWARD, DONE, TERMINATED))])
        self.out_keys = cast(Any, [_ADVANTAGE, _TARGET, _VALUE, next_key(_VALUE)])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages, targets and values into ``tensordict`` and return it."""
        _check_time(tensordict)
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            stream = self._read(tensordict)
            value, next_value = self._values(tensordict, stream)
            advantage, target = generalized_advantage_estimate(
                self.gamma, self.lmbda, value, next_value, stream.reward, stream.terminated, stream.ends
            )
            advantage, target = _finish(advantage, target, stream.mask, self.average_gae)
        tensordict.set(_ADVANTAGE, advantage.unsqueeze(-1))
        tensordict.set(_TARGET, target.unsqueeze(-1))
        tensordict.set(_VALUE, value.unsqueeze(-1))
        tensordict.set(next_key(_VALUE), next_value.unsqueeze(-1))
        return tensordict

    def _read(self, tensordict: TensorDictBase) -> _Stream:
        shape = tensordict.batch_size
        for key in self._observed:
            if tensordict.get(next_key(key), None) is None:
                raise MissingKeyError(
                    f"The critic reads {key!r}, but the batch has no {next_key(key)!r}, so the value of the last "
                    "observations of a trajectory can't be computed. Pass the whole chain as value_network, trunk "
                    "included: from observations, which exist under 'next', to the value."
                )
        reward, done, terminated = (
            per_token(next_key(key), entry(tensordict, next_key(key), _FROM_ENV), shape)
            for key in (REWARD, DONE, TERMINATED)
        )
        mask = tensordict.get(MASK, None)
        mask = None if mask is None else per_token(MASK, cast(Tensor, mask), shape)
        starts = _segment_starts(tensordict, done | terminated, mask)
        ends = starts.reshape(-1).roll(-1).reshape(shape)  # a row's first token is a start, so its last is an end
        return _Stream(reward, terminated, starts, ends, mask)

    def _values(self, tensordict: TensorDictBase, stream: _Stream) -> tuple[Tensor, Tensor]:
        """V of every observation and of every next one, ``[*B, T]`` each."""
        shape = tensordict.batch_size
        if self.value_network is None:
            value, following = (
                per_token(key, entry(tensordict, key, "Or pass a value_network, which computes it."), shape)
                for key in (_VALUE, next_key(_VALUE))
            )
            return value, following.masked_fill(stream.terminated, 0.0)
        run = subset(tensordict, [*self._critic_keys, TRAJ_IDS])
        if IS_INIT in self._critic_keys:
            run.set(IS_INIT, stream.starts.unsqueeze(-1))
        with set_recurrent_mode(True):
            run = self.value_network(run)
        value = per_token(_VALUE, cast(Tensor, run.get(_VALUE)), shape)
        flat = value.reshape(-1)
        shifted = flat.roll(-1).masked_fill(stream.terminated.reshape(-1), 0.0)
        bootstraps = (stream.ends & ~stream.terminated).reshape(-1)
        if bootstraps.device.type in _GATHERED_ON:
            where = bootstraps.nonzero().squeeze(-1)
            if where.numel() == 0:
                return value, shifted.reshape(shape)
            return value, shifted.index_put((where,), self._step(tensordict, run, where)).reshape(shape)
        # Elsewhere the number of ends is not known without waiting for the device: step from every token.
        return value, torch.where(bootstraps, self._step(tensordict, run, None), shifted).reshape(shape)

    def _step(self, tensordict: TensorDictBase, run: TensorDictBase, where: Tensor | None) -> Tensor:
        """V of the next observation of the tokens ``where`` (of all, when None), flat."""
        lead = tensordict.batch_dims

        def pick(source: TensorDictBase, key: tuple[str, ...]) -> Tensor:
            flat = cast(Tensor, source.get(key)).flatten(0, lead - 1)
            return flat if where is None else flat.index_select(0, where)

        entries: dict[NestedKey, Tensor] = {key: pick(tensordict, next_key(key)) for key in self._observed}
        entries |= {key: pick(run, next_key(key)) for key in self._states}
        count = tensordict.numel() if where is None else where.shape[0]
        if IS_INIT in self._critic_keys:
            entries[IS_INIT] = torch.zeros(count, 1, dtype=torch.bool, device=run.get(_VALUE).device)
        step = from_entries(entries, torch.Size([count]), run.device)
        assert self.value_network is not None
        with set_recurrent_mode(False):
            value = cast(Tensor, self.value_network(step).get(_VALUE))
        return per_token(_VALUE, value, step.batch_size)


def _critic_keys(critic: TensorDictModuleBase | None) -> tuple[list[NestedKey], set[NestedKey]]:
    if critic is None:
        return [], set()
    written = {normalize_key(key) for key in critic.out_keys}
    if _VALUE not in written:
        raise ArgumentError(f"The critic must write {_VALUE!r}, but its out_keys are {critic.out_keys}.")
    return [normalize_key(key) for key in critic.in_keys], written


def _check_time(tensordict: TensorDictBase) -> None:
    if tensordict.batch_dims == 0:
        raise ArgumentError("GAE needs a batch with a time dimension, [T] or [*B, T], got one of shape [].")
    names = tensordict.names
    if "time" in names and names[-1] != "time":
        raise ArgumentError(f"Time must be the last dimension of the batch, got dimensions named {names}.")


def _segment_starts(tensordict: TensorDictBase, done: Tensor, mask: Tensor | None) -> Tensor:
    """Bool ``[*B, T]``: tokens that don't continue the one before."""
    shape = tensordict.batch_size
    is_init = tensordict.get(IS_INIT, None)
    after_done = done.reshape(-1).roll(1).reshape(shape)  # rows start anyway: what wraps around changes nothing
    flags = after_done if is_init is None else after_done | per_token(IS_INIT, cast(Tensor, is_init), shape)
    if mask is not None:
        flags = flags | (mask != mask.reshape(-1).roll(1).reshape(shape))
    return Boundaries.from_is_init(flags, tensordict.get(TRAJ_IDS, None), shape).starts.reshape(shape)


def _finish(advantage: Tensor, target: Tensor, mask: Tensor | None, average: bool) -> tuple[Tensor, Tensor]:
    if mask is not None:
        advantage, target = torch.where(mask, advantage, 0.0), torch.where(mask, target, 0.0)
    if average:
        advantage = standardized(advantage, mask)
    return advantage, target
