"""Base class of value estimators, which compute the values of a batch in one pass of the critic."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import MASK, NestedKey, next_key
from recurl.core.messages import without_arguments
from recurl.execution.explain import Explanation
from recurl.execution.lowering import Network, explain
from recurl.objectives.common import check_network, entry, per_token, standardized, without_padding
from recurl.objectives.sequences import Sequences, Unroll
from recurl.objectives.tensor_keys import KeyedModule
from recurl.sequences.entries import Step

__all__ = ["ValueEstimator", "Values", "check_fractions", "without_torchrl_arguments"]

without_torchrl_arguments = without_arguments(
    shifted="leave it out, next values are always those of the next token if it continues the trajectory",
    deactivate_vmap="leave it out, nothing is vmapped",
    vectorized="leave it out, there is a single implementation",
    time_dim="leave it out, time is the last dimension of the batch",
    skip_existing="leave it out, values are computed at every call; without a value_network they are read",
    device="leave it out, everything is computed on the device of the batch",
    advantage_key="write set_keys(advantage=...)",
    value_target_key="write set_keys(value_target=...)",
    value_key="write set_keys(value=...)",
)
"""Decorator of estimators that rejects arguments that exist only in TorchRL."""


class Values(NamedTuple):
    """Inputs of an estimator, ``[*B, T]`` each.

    Attributes:
        value: V of every observation.
        next_value: V of the true next observation, 0 where terminated.
        sequences: reward, flags and sequences.
        log_ratio: current log-probability of the action minus the stored one, if the estimator reads it.
    """

    value: Tensor
    next_value: Tensor
    sequences: Sequences
    log_ratio: Tensor | None = None


class ValueEstimator(KeyedModule):
    """Base class of value estimators, which write advantages, value targets and values into a batch of sequences.

    One pass of the critic over the batch, in recurrent mode, computes V of every observation and the state after every
    token. Within a sequence, the value of the next observation is that of the next token. Where a trajectory, slice or
    row ends, the critic takes one step with the true next observation from the state that it has just computed (never a
    stored one). A step that ``terminated`` bootstraps 0; any other end, including truncation, bootstraps that value.

    Subclasses implement ``estimate``.

    Args:
        value_network: critic, from observations (and recurrent states) to the value, including all encoders, as it also
            runs on the next observations. It may share modules with the policy. If None, the batch must hold the value,
            at the root and under ``"next"``.
        differentiable: let gradients flow from the results into the critic.
        average: standardize the advantage to mean 0 and standard deviation 1 over the batch, after the value target is
            computed. A non-finite value then affects all sequences through the mean.

    Attributes:
        average: see above; statistics are those of all ranks inside :func:`recurl.distributed.global_statistics`.
    """

    accepted_keys: ClassVar[tuple[str, ...]] = ("advantage", "value_target", "value", "reward", "done", "terminated")

    def __init__(self, value_network: TensorDictModuleBase | None, *, differentiable: bool, average: bool) -> None:
        super().__init__()
        if value_network is not None:
            check_network("The value network", value_network, "ValueOperator")
        self.value_network = value_network
        self.differentiable = differentiable
        self.average = average

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the network
        """Keys of all entries that are read from a batch."""
        keys, unroll = self.tensor_keys, self._unroll()
        return [*([keys.value, next_key(keys.value)] if unroll is None else unroll.in_keys), *keys.of_sequences]

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows set_keys
        """Keys of advantage, value target, value and next value."""
        keys = self.tensor_keys
        return [keys.advantage, keys.value_target, keys.value, next_key(keys.value)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages, targets and values into ``tensordict`` and return it."""
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            results = self.results(tensordict)
        for key, result in results.items():
            # Also detached from forward-mode tangents, which are kept when gradients are disabled.
            tensordict.set(key, (result if self.differentiable else result.detach()).unsqueeze(-1))
        return tensordict

    def results(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Return the entries that :meth:`forward` writes, ``[*B, T]`` each, without modifying the batch."""
        if batch.get(MASK, None) is not None:
            batch = without_padding(batch, self.in_keys)
        sequences = Sequences.read(batch, self.tensor_keys)
        values = self._values(batch, sequences)
        advantage, target, *more = self.estimate(values)
        if sequences.mask is not None:
            advantage, target = (torch.where(sequences.mask, result, 0.0) for result in (advantage, target))
        if self.average:
            advantage = standardized(advantage, sequences.mask)
        return dict(zip(self.out_keys, (advantage, target, values.value, values.next_value, *more), strict=True))

    def estimate(self, values: Values) -> tuple[Tensor, ...]:
        """Compute advantages, value targets and any further entries in ``out_keys``, ``[*B, T]`` each."""
        raise NotImplementedError

    def explain(self) -> Explanation:
        """Explain in which form the networks run."""
        return explain("advantages", self._networks())

    def _networks(self) -> list[Network]:
        unroll = self._unroll()
        return [] if unroll is None else [unroll.network]

    def _unroll(self) -> Unroll | None:
        return None if self.value_network is None else Unroll(self.value_network, self.tensor_keys.value)

    def _values(self, batch: Step, sequences: Sequences) -> Values:
        """Read or compute the values."""
        unroll = self._unroll()
        if unroll is None:
            return self._stored(batch, sequences)
        return self._computed(batch, sequences, unroll, unroll.run(batch, sequences))

    def _stored(self, batch: Step, sequences: Sequences) -> Values:
        key, shape = self.tensor_keys.value, batch.batch_size
        value, next_value = (
            per_token(name, entry(batch, name, "Alternatively, pass a value_network, which computes it."), shape)
            for name in (key, next_key(key))
        )
        return Values(value, next_value.masked_fill(sequences.terminated, 0.0), sequences)

    def _computed(self, batch: Step, sequences: Sequences, unroll: Unroll, run: Step) -> Values:
        """Return the values in ``run``, the critic's outputs, and those one step past the ends of sequences."""
        value = cast(Tensor, run.get(unroll.out_key))
        next_value = unroll.next_output(batch, sequences, run)
        shape = batch.batch_size
        return Values(per_token(unroll.out_key, value, shape), per_token(unroll.out_key, next_value, shape), sequences)


def check_fractions(**values: Any) -> None:
    """Raise ArgumentError if a value isn't in [0, 1]."""
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ArgumentError(f"{name} must be in [0, 1], got {value}.")
