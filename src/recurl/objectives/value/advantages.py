"""Advantage estimators on TensorDict batches."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.absent import without_arguments
from recurl.errors import ArgumentError, UsageError
from recurl.keys import ADVANTAGE, MASK, STATE_VALUE, VALUE_TARGET, NestedKey, next_key
from recurl.lowering import Step
from recurl.objectives.common import entry, per_token, standardized, without_padding
from recurl.objectives.sequences import SEQUENCE_KEYS, Sequences, Unroll
from recurl.objectives.value.functional import generalized_advantage_estimate

__all__ = ["GAE"]


@without_arguments(
    shifted="leave it out, next values are always those of the next token if it continues the trajectory",
    deactivate_vmap="leave it out, nothing is vmapped",
    vectorized="leave it out, there is one implementation",
    time_dim="leave it out, time is the last dimension of the batch",
)
class GAE(TensorDictModuleBase):
    """Generalised advantage estimation (GAE) with exact values, for recurrent and feed-forward critics.

    One pass of the critic over the batch, in recurrent mode, computes V of every observation and the state after every
    token. Within a trajectory, the value of the next observation is that of the next token. Where a trajectory, slice
    or row ends, the critic makes one step from the state it has just computed (never a stored one) with the true next
    observation. A step that ``terminated`` bootstraps 0; any other end, truncation included, bootstraps that value.
    See :func:`~recurl.objectives.value.functional.generalized_advantage_estimate` for the formula.

    Args:
        gamma: discount factor per step, in [0, 1].
        lmbda: trace decay, in [0, 1].
        value_network: critic, from observations (and recurrent states) to ``"state_value"``, including all encoders, as
            it also runs on the next observations. It may share modules with the policy. If None, the batch must hold
            ``"state_value"`` and ``("next", "state_value")``.
        average_gae: shift and scale the advantage to mean 0 and standard deviation 1 over the batch (``value_target``
            is computed before that). A value that isn't finite then affects all trajectories, through the mean.
        differentiable: let gradients flow from the results into the critic.

    Reads a batch ``[T]`` or ``[*B, T]``, time last: the inputs of the critic, at the root and (except states and
    ``"is_init"``) under ``"next"``; ``("next", "reward")``, ``("next", "done")``, ``("next", "terminated")``, all
    ``[*B, T, 1]``; and, where present, ``"is_init"``, ``("collector", "traj_ids")``, ``("collector", "traj_steps")``
    and ``("collector", "mask")``. A sequence ends at the end of a row, at ``done``, before ``is_init``, where the next
    token isn't the trajectory's next step, and where the mask changes.

    Writes ``"advantage"``, ``"value_target"``, ``"state_value"`` and ``("next", "state_value")`` (the bootstrapped
    value, 0 where terminated), each ``[*B, T, 1]``, into the batch, and returns it. Recurrent states of the batch are
    not modified; if those of the critic are all missing, segments start from zeros. Advantage and target are 0 at
    padding, where ``("collector", "mask")`` is False.

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
        self.out_keys = cast(Any, [ADVANTAGE, VALUE_TARGET, STATE_VALUE, next_key(STATE_VALUE)])
        self._unroll()

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the network
        """Keys of all entries that are read from a batch."""
        unroll = self._unroll()
        return [*([STATE_VALUE, next_key(STATE_VALUE)] if unroll is None else unroll.in_keys), *SEQUENCE_KEYS]

    def _unroll(self) -> Unroll | None:
        return None if self.value_network is None else Unroll(self.value_network, STATE_VALUE)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages, targets and values into ``tensordict`` and return it."""
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            masked = tensordict.get(MASK, None) is not None
            batch: Step = without_padding(tensordict, self.in_keys) if masked else tensordict
            sequences = Sequences.read(batch)
            value, next_value = self._values(batch, sequences)
            advantage, target = generalized_advantage_estimate(
                self.gamma, self.lmbda, value, next_value, sequences.reward, sequences.terminated, sequences.ends
            )
            advantage, target = _finish(advantage, target, sequences.mask, self.average_gae)
        for key, result in zip(self.out_keys, (advantage, target, value, next_value), strict=True):
            # Also detached from forward-mode tangents, which are kept when gradients are disabled.
            tensordict.set(key, (result if self.differentiable else result.detach()).unsqueeze(-1))
        return tensordict

    def why_not_lowered(self) -> str | None:
        """Return the reason why the critic needs TensorDicts, or None if it is lowered."""
        unroll = self._unroll()
        return None if unroll is None else unroll.why_not_lowered()

    def set_keys(self, **keys: object) -> NoReturn:
        """Raise UsageError: the names of entries are fixed."""
        raise UsageError(
            "There is no set_keys(): the entries that are read and written, listed in in_keys and out_keys, have fixed "
            "names. Rename those of your batch instead: batch.rename_key_(old, new)."
        )

    def _values(self, batch: Step, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return V of every observation and of every next observation, ``[*B, T]`` each."""
        shape, unroll = batch.batch_size, self._unroll()
        if unroll is None:
            value, next_value = (
                per_token(key, entry(batch, key, "Or pass a value_network, which computes it."), shape)
                for key in (STATE_VALUE, next_key(STATE_VALUE))
            )
            return value, next_value.masked_fill(sequences.terminated, 0.0)
        run = unroll.run(batch, sequences)
        value = per_token(STATE_VALUE, cast(Tensor, run.get(STATE_VALUE)), shape)
        return value, per_token(STATE_VALUE, unroll.next_output(batch, sequences, run), shape)


def _finish(advantage: Tensor, target: Tensor, mask: Tensor | None, average: bool) -> tuple[Tensor, Tensor]:
    if mask is not None:
        advantage, target = torch.where(mask, advantage, 0.0), torch.where(mask, target, 0.0)
    if average:
        advantage = standardized(advantage, mask)
    return advantage, target
