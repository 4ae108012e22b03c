"""Returns and advantages as functions of plain tensors: no TensorDict, no module, no data-dependent shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recurl.errors import ArgumentError

__all__ = ["generalized_advantage_estimate", "reverse_linear_recurrence"]


def reverse_linear_recurrence(offset: Tensor, coefficient: Tensor) -> Tensor:
    """Solve ``y[t] = offset[t] + coefficient[t] * y[t + 1]`` backwards along the last dimension, with ``y[T] = 0``.

    The solution is built by doubling (Hillis and Steele, "Data parallel algorithms", 1986): after pass k every
    ``y[t]`` holds the sum of its first ``2 ** k`` terms, so ``ceil(log2 T)`` passes of elementwise operations do,
    without a loop over time and without a device synchronisation. A zero coefficient cuts the stream.

    Args:
        offset: ``[..., T]``, floating point.
        coefficient: ``[..., T]``, same dtype; what stands at the last position is not used.

    Returns:
        ``[..., T]``, differentiable with respect to both arguments.

    Raises:
        ArgumentError: the two shapes differ.

    Example:
        >>> reverse_linear_recurrence(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, 0.5, 0.5]))
        tensor([1.7500, 1.5000, 1.0000])
    """
    if offset.shape != coefficient.shape:
        raise ArgumentError(
            f"offset and coefficient must have the same shape, got {tuple(offset.shape)} and "
            f"{tuple(coefficient.shape)}."
        )
    length = offset.shape[-1]
    shift = 1
    while shift < length:
        offset = torch.addcmul(offset, coefficient, F.pad(offset[..., shift:], (0, shift)))
        if 2 * shift < length:
            coefficient = coefficient * F.pad(coefficient[..., shift:], (0, shift))
        shift *= 2
    return offset


def generalized_advantage_estimate(
    gamma: float,
    lmbda: float,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    cut: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages and the value targets that go with them.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (2016),
    equation 16.

    With ``delta[t] = reward[t] + gamma * (1 - terminated[t]) * next_state_value[t] - state_value[t]`` the advantage
    is ``A[t] = delta[t] + gamma * lmbda * (1 - cut[t]) * A[t + 1]`` along the last dimension, and the target
    ``A[t] + state_value[t]`` is the lambda-return.

    Args:
        gamma: discount factor per step, in [0, 1].
        lmbda: trace decay, in [0, 1]; 0 gives the one-step advantage, 1 the Monte-Carlo one.
        state_value: ``[..., T]``, V of the observation before the step.
        next_state_value: ``[..., T]``, V of the true observation after the step; not used where ``terminated``.
        reward: ``[..., T]``, reward of the step.
        terminated: bool ``[..., T]``, the step ended its episode for good: nothing is bootstrapped.
        cut: bool ``[..., T]``, the following token doesn't continue this one (end of a trajectory, slice or row).
            The last position is always cut.

    Returns:
        ``(advantage, value_target)``, each ``[..., T]`` in the dtype of ``state_value``.

    Example:
        >>> value = torch.zeros(3)
        >>> no = torch.zeros(3, dtype=torch.bool)
        >>> advantage, target = generalized_advantage_estimate(0.5, 1.0, value, value, torch.ones(3), no, no)
        >>> advantage
        tensor([1.7500, 1.5000, 1.0000])
    """
    bootstrap = torch.where(terminated, torch.zeros_like(next_state_value), next_state_value)
    delta = reward.to(state_value.dtype) + gamma * bootstrap - state_value
    coefficient = torch.full_like(delta, gamma * lmbda).masked_fill(cut | terminated, 0.0)
    advantage = reverse_linear_recurrence(delta, coefficient.detach())
    return advantage, advantage + state_value
