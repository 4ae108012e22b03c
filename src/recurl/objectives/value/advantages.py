"""Estimators of advantages and value targets by temporal differences: TD(0), TD(1), TD(lambda) and GAE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.lazy import lazy_names
from recurl.objectives.common import standardized
from recurl.objectives.value.estimator import ValueEstimator, Values, check_fractions, without_torchrl_arguments
from recurl.sequences.returns import generalized_advantage_estimate, lambda_return

if TYPE_CHECKING:
    from recurl.objectives.value.vtrace import VTrace

__all__ = ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace"]

lazy_names(__name__, {"recurl.objectives.value.vtrace": "VTrace"})


@without_torchrl_arguments
class GAE(ValueEstimator):
    """Generalized advantage estimation (GAE) with exact values, for recurrent and feed-forward critics.

    One pass of the critic over the batch, in recurrent mode, computes V of every observation and the state after every
    token. Within a trajectory, the value of the next observation is that of the next token. Where a trajectory, slice
    or row ends, the critic takes one step with the true next observation from the state it has just computed (never a
    stored one). A step that ``terminated`` bootstraps 0; any other end, including truncation, bootstraps that value.
    See :func:`~recurl.sequences.returns.generalized_advantage_estimate` for the formula.

    Args:
        gamma: discount factor per step, in [0, 1].
        lmbda: trace decay, in [0, 1].
        value_network: critic, from observations (and recurrent states) to ``"state_value"``, including all encoders, as
            it also runs on the next observations. It may share modules with the policy. If None, the batch must hold
            ``"state_value"`` and ``("next", "state_value")``.
        average_gae: standardize the advantage to mean 0 and standard deviation 1 over the batch, after
            ``value_target`` is computed. A non-finite value then affects all trajectories through the mean.
        differentiable: let gradients flow from the results into the critic.

    Reads a batch ``[T]`` or ``[*B, T]``, time last: the inputs of the critic, at the root and (except states and
    ``"is_init"``) under ``"next"``; ``("next", "reward")``, ``("next", "done")``, ``("next", "terminated")``, all
    ``[*B, T, 1]``; and, if present, ``"is_init"``, ``("collector", "traj_ids")``, ``("collector", "traj_steps")``
    and ``("collector", "mask")``. A sequence ends at the end of a row, at ``done``, before ``is_init``, where the next
    token isn't the trajectory's next step, and where the mask changes.

    Writes ``"advantage"``, ``"value_target"``, ``"state_value"`` and ``("next", "state_value")`` (the bootstrap value,
    0 where terminated), each ``[*B, T, 1]``, into the batch, and returns it. Recurrent states of the batch are not
    modified; if those of the critic are all missing, segments start from zeros. Advantage and target are 0 at padding,
    where ``("collector", "mask")`` is False.

    Raises:
        ArgumentError: gamma or lmbda is not in [0, 1]; the batch has no time dimension, or time is not its last;
            the critic's value is not one number per token.
        MissingKeyError: an entry is missing, or the critic reads an entry (such as a trunk's feature) that doesn't
            exist under ``"next"``.

    Example:
        >>> import torch
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
        check_fractions(gamma=gamma, lmbda=lmbda)
        super().__init__(value_network, differentiable=differentiable, average=average_gae)
        self.gamma = gamma
        self.lmbda = lmbda

    def estimate(self, values: Values) -> tuple[Tensor, ...]:
        """Compute advantages and value targets; see :class:`ValueEstimator`."""
        sequences = values.sequences
        return generalized_advantage_estimate(
            self.gamma,
            self.lmbda,
            values.value,
            values.next_value,
            sequences.reward,
            sequences.terminated,
            sequences.ends,
        )


class _ReturnEstimator(ValueEstimator):
    """Base class of estimators whose target is a lambda-return and whose advantage is target minus value."""

    def __init__(
        self,
        gamma: float,
        lmbda: float,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool,
        differentiable: bool,
    ) -> None:
        check_fractions(gamma=gamma, lmbda=lmbda)
        super().__init__(value_network, differentiable=differentiable, average=False)
        self.gamma = gamma
        self.lmbda = lmbda
        self.average_rewards = average_rewards

    def estimate(self, values: Values) -> tuple[Tensor, ...]:
        """Compute advantages and value targets; see :class:`ValueEstimator`."""
        reward, terminated, ends = values.sequences.reward, values.sequences.terminated, values.sequences.ends
        if self.average_rewards:
            reward = standardized(reward, values.sequences.mask)
        target = lambda_return(self.gamma, self.lmbda, values.next_value, reward, terminated, ends)
        return target - values.value, target


@without_torchrl_arguments
class TD0Estimator(_ReturnEstimator):
    """One-step temporal differences: the target is the reward plus the discounted value of the next observation.

    Source: Sutton and Barto, "Reinforcement learning" (2018), section 6.1. Equivalent to :class:`TDLambdaEstimator`
    with ``lmbda = 0``; see there for the entries read and written.

    Args:
        gamma: discount factor per step, in [0, 1].
        value_network: critic; see :class:`ValueEstimator`.
        average_rewards: first standardize the rewards to mean 0 and standard deviation 1 over the batch.
        differentiable: let gradients flow from the results into the critic.

    Raises:
        ArgumentError: gamma is not in [0, 1]; or see :class:`GAE`.
    """

    def __init__(
        self,
        gamma: float,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(gamma, 0.0, value_network, average_rewards, differentiable)


@without_torchrl_arguments
class TD1Estimator(_ReturnEstimator):
    """Returns of all rewards to the end of the sequence, plus the discounted value there unless it terminated.

    Source: Sutton and Barto, "Reinforcement learning" (2018), section 5.1. Equivalent to :class:`TDLambdaEstimator`
    with ``lmbda = 1``; see there for the entries read and written.

    Args:
        gamma: discount factor per step, in [0, 1].
        value_network: critic; see :class:`ValueEstimator`.
        average_rewards: first standardize the rewards to mean 0 and standard deviation 1 over the batch.
        differentiable: let gradients flow from the results into the critic.

    Raises:
        ArgumentError: gamma is not in [0, 1]; or see :class:`GAE`.
    """

    def __init__(
        self,
        gamma: float,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(gamma, 1.0, value_network, average_rewards, differentiable)


@without_torchrl_arguments
class TDLambdaEstimator(_ReturnEstimator):
    """Lambda-returns as value targets, and their differences from the values as advantages.

    See :func:`~recurl.sequences.returns.lambda_return` for the formula. The sequences, the values at their
    ends, and the entries read and written are those of :class:`GAE`.

    Args:
        gamma: discount factor per step, in [0, 1].
        lmbda: trace decay, in [0, 1].
        value_network: critic; see :class:`ValueEstimator`.
        average_rewards: first standardize the rewards to mean 0 and standard deviation 1 over the batch.
        differentiable: let gradients flow from the results into the critic.

    Raises:
        ArgumentError: gamma or lmbda is not in [0, 1]; or see :class:`GAE`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> ends = torch.tensor([[False], [False], [True]])
        >>> batch = TensorDict({"state_value": torch.zeros(3, 1)}, [3])
        >>> batch["next"] = TensorDict(
        ...     {"state_value": torch.ones(3, 1), "reward": torch.ones(3, 1), "done": ends, "terminated": ends}, [3]
        ... )
        >>> TDLambdaEstimator(gamma=0.5, lmbda=1.0, value_network=None)(batch)["value_target"].squeeze(-1)
        tensor([1.7500, 1.5000, 1.0000])
    """

    def __init__(
        self,
        gamma: float,
        lmbda: float,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(gamma, lmbda, value_network, average_rewards, differentiable)
