"""Base class of action-value losses, with returns along sequences as targets."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.objectives.common import LossModule
from recurl.objectives.kinds import ValueEstimators, find_kind, hyperparameters_of
from recurl.objectives.sequences import Sequences
from recurl.sequences.returns import lambda_return, n_step_return

__all__ = ["ActionValueLoss"]


class ActionValueLoss(LossModule):
    """Base class of action-value losses. Computes the returns that are their targets.

    Args:
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards summed before the bootstrap value, at least 1.

    Attributes:
        lmbda: trace decay of the lambda-returns chosen with :meth:`make_value_estimator`; None for n-step returns.

    Raises:
        ArgumentError: an option is out of range.
    """

    accepted_keys: ClassVar[tuple[str, ...]] = ("action", "priority", "priority_weight", "reward", "done", "terminated")

    def __init__(self, gamma: float, n_steps: int) -> None:
        super().__init__()
        _check_fraction("gamma", gamma)
        if n_steps < 1:
            raise ArgumentError(f"n_steps must be at least 1, got {n_steps}.")
        self.gamma = gamma
        self.n_steps = n_steps
        self.lmbda: float | None = None

    def make_value_estimator(self, value_type: ValueEstimators | str | None = None, **hyperparameters: Any) -> Self:
        """Choose the returns used as targets, and return the loss.

        Args:
            value_type: ``ValueEstimators.TD0``, one reward and the next value; ``TD1``, all rewards to the end of the
                sequence; ``TDLambda``, the lambda-return; None for the loss's default n-step return.
            **hyperparameters: ``gamma`` (unchanged by default), and ``lmbda`` of ``TDLambda`` (0.95).

        Raises:
            ArgumentError: there is no such estimator, or a hyperparameter is not in [0, 1].
            ArgumentTypeError: there is no such hyperparameter.
            UnsupportedError: the estimator is one of state values.
        """
        supported = (ValueEstimators.TD0, ValueEstimators.TD1, ValueEstimators.TDLambda)
        kind = None if value_type is None else find_kind(value_type, supported, self)
        defaults = {"gamma": self.gamma} | ({"lmbda": 0.95} if kind is ValueEstimators.TDLambda else {})
        chosen = hyperparameters_of(kind, hyperparameters, defaults)
        for name, value in chosen.items():
            _check_fraction(name, value)
        self.gamma = chosen["gamma"]
        self.lmbda = 1.0 if kind is ValueEstimators.TD1 else chosen.get("lmbda")
        if kind is ValueEstimators.TD0:
            self.n_steps = 1
        return self

    def returns(self, next_value: Tensor, sequences: Sequences) -> Tensor:
        """Return the targets of the actions taken, ``[*B, T]``.

        Args:
            next_value: value of the true next observation of every token, ``[*B, T]``.
            sequences: the sequences of the batch.
        """
        reward, terminated, ends = sequences.reward, sequences.terminated, sequences.ends
        if self.lmbda is None:
            return n_step_return(self.gamma, self.n_steps, next_value, reward, terminated, ends)
        return lambda_return(self.gamma, self.lmbda, next_value, reward, terminated, ends)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"{name} must be in [0, 1], got {value}.")
