"""Returns and advantages as functions of plain tensors, without data-dependent shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.sequences.reverse import reverse_linear_recurrence

__all__ = [
    "generalized_advantage_estimate",
    "inverse_value_rescaling",
    "lambda_return",
    "n_step_return",
    "reverse_linear_recurrence",
    "truncated_weight",
    "value_rescaling",
    "vtrace_advantage_estimate",
]


def generalized_advantage_estimate(
    gamma: float,
    lmbda: float,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    cut: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantages and the corresponding value targets.

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
        terminated: bool ``[..., T]``, True where the step ended its episode: nothing is bootstrapped.
        cut: bool ``[..., T]``, True where the next token doesn't continue this one (end of a trajectory, slice or row).
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


def truncated_weight(log_ratio: Tensor, threshold: float) -> Tensor:
    """Return ``min(threshold, exp(log_ratio))``, with finite derivatives where the ratio overflows.

    Args:
        log_ratio: logarithms of importance weights.
        threshold: largest weight, positive; inf for no bound.

    Example:
        >>> truncated_weight(torch.tensor([-torch.inf, 0.0, 1000.0]), 1.0)
        tensor([0., 1., 1.])
    """
    return log_ratio.clamp(max=math.log(threshold)).exp()


def vtrace_advantage_estimate(
    gamma: float,
    log_ratio: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    cut: Tensor,
    rho_thresh: float = 1.0,
    c_thresh: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute V-trace targets and the corresponding advantages.

    Source: Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures"
    (2018), section 4. With ``rho = min(rho_thresh, exp(log_ratio))``, ``c = min(c_thresh, exp(log_ratio))`` and
    ``next[t] = (1 - terminated[t]) * next_state_value[t]``, along the last dimension::

        delta[t]     = rho[t] * (reward[t] + gamma * next[t] - V[t])
        v[t] - V[t]  = delta[t] + gamma * c[t] * (v[t + 1] - next[t])
        advantage[t] = reward[t] + gamma * v[t + 1] - V[t]

    where ``v[t + 1]`` is ``next[t]`` if ``terminated`` or ``cut``. The policy gradient weights the advantage by
    ``rho``. For on-policy actions and thresholds of at least 1, v is the return to the end of the sequence.

    Args:
        gamma: discount factor per step, in [0, 1].
        log_ratio: ``[..., T]``, current log-probability of the action minus that of the policy that chose it.
        state_value: ``[..., T]``, V of the observation before the step.
        next_state_value: ``[..., T]``, V of the true observation after the step; not used where ``terminated``.
        reward: ``[..., T]``, reward of the step.
        terminated: bool ``[..., T]``, True where the step ended its episode: nothing is bootstrapped.
        cut: bool ``[..., T]``, True where the next token doesn't continue this one. The last position is always cut.
        rho_thresh: largest importance weight of a temporal difference, which determines the fixed point of V.
        c_thresh: largest importance weight of the trace, which determines the speed of convergence.

    Returns:
        ``(advantage, value_target)``, each ``[..., T]`` in the dtype of ``state_value``; the advantage without ``rho``.

    Example:
        >>> no, zero = torch.zeros(3, dtype=torch.bool), torch.zeros(3)
        >>> advantage, target = vtrace_advantage_estimate(0.5, zero, zero, zero, torch.ones(3), no, no)
        >>> target
        tensor([1.7500, 1.5000, 1.0000])
    """
    ends = cut | terminated
    bootstrap = next_state_value.masked_fill(terminated, 0.0)
    log_ratio = log_ratio.to(state_value.dtype)
    rho, c = truncated_weight(log_ratio, rho_thresh), truncated_weight(log_ratio, c_thresh)
    one_step = reward.to(state_value.dtype) + gamma * bootstrap
    excess = reverse_linear_recurrence(rho * (one_step - state_value), (gamma * c).masked_fill(ends, 0.0))
    after = torch.cat([excess[..., 1:], torch.zeros_like(excess[..., :1])], -1).masked_fill(ends, 0.0)
    return one_step + gamma * after - state_value, state_value + excess


def n_step_return(
    gamma: float, n_steps: int, next_value: Tensor, reward: Tensor, terminated: Tensor, cut: Tensor
) -> Tensor:
    """Compute n-step returns: the sum of up to n rewards and a bootstrap value.

    Source: Sutton and Barto, "Reinforcement learning" (2018), equation 7.1, over the available steps: with
    ``m <= n_steps`` steps from t up to and including the first that is ``terminated`` or ``cut``::

        G[t] = sum_{i < m} gamma^i reward[t + i] + gamma^m (1 - terminated[t + m - 1]) next_value[t + m - 1]

    Args:
        gamma: discount factor per step.
        n_steps: maximum number of rewards summed, at least 1.
        next_value: ``[..., T]``, value of the true observation after the step; not used where ``terminated``.
        reward: ``[..., T]``, reward of the step.
        terminated: bool ``[..., T]``, True where the step ended its episode: nothing is bootstrapped.
        cut: bool ``[..., T]``, True where the next token doesn't continue this one. The last position is always cut.

    Returns:
        The returns, ``[..., T]`` in the dtype of ``next_value``.

    Raises:
        ArgumentError: ``n_steps`` is below 1.

    Example:
        >>> no = torch.tensor([False, False, False])
        >>> n_step_return(0.5, 2, torch.tensor([8.0, 8.0, 8.0]), torch.ones(3), no, no)
        tensor([3.5000, 3.5000, 5.0000])
    """
    if n_steps < 1:
        raise ArgumentError(f"n_steps must be at least 1, got {n_steps}.")
    bootstrap = next_value.masked_fill(terminated, 0.0)
    reward, last = reward.to(next_value.dtype), (cut | terminated)[..., :-1]
    value = reward + gamma * bootstrap
    for _ in range(min(n_steps, reward.shape[-1]) - 1):
        after = torch.where(last, bootstrap[..., :-1], value[..., 1:])
        value = reward + gamma * torch.cat([after, bootstrap[..., -1:]], -1)
    return value


def lambda_return(
    gamma: float, lmbda: float, next_value: Tensor, reward: Tensor, terminated: Tensor, cut: Tensor
) -> Tensor:
    """Compute lambda-returns, geometrically weighted averages of the n-step returns of all n.

    Source: Sutton and Barto, "Reinforcement learning" (2018), equation 12.20. With
    ``next[t] = (1 - terminated[t]) * next_value[t]``, along the last dimension::

        G[t] = reward[t] + gamma * ((1 - lmbda) * next[t] + lmbda * G[t + 1])

    and ``G[t] = reward[t] + gamma * next[t]`` where ``terminated`` or ``cut``.

    Args:
        gamma: discount factor per step.
        lmbda: trace decay, in [0, 1]; 0 gives the one-step return TD(0), 1 the sum of all rewards, TD(1).
        next_value: ``[..., T]``, value of the true observation after the step; not used where ``terminated``.
        reward: ``[..., T]``, reward of the step.
        terminated: bool ``[..., T]``, True where the step ended its episode: nothing is bootstrapped.
        cut: bool ``[..., T]``, True where the next token doesn't continue this one. The last position is always cut.

    Returns:
        The returns, ``[..., T]`` in the dtype of ``next_value``.

    Example:
        >>> no = torch.tensor([False, False, False])
        >>> lambda_return(0.5, 1.0, torch.tensor([8.0, 8.0, 8.0]), torch.ones(3), no, no)
        tensor([2.7500, 3.5000, 5.0000])
    """
    ends = cut | terminated
    ends[..., -1:] = True
    bootstrap = next_value.masked_fill(terminated, 0.0)
    here = torch.where(ends, bootstrap, (1.0 - lmbda) * bootstrap)
    coefficient = torch.full_like(bootstrap, gamma * lmbda).masked_fill(ends, 0.0)
    return reverse_linear_recurrence(reward.to(next_value.dtype) + gamma * here, coefficient.detach())


def value_rescaling(value: Tensor, eps: float = 1e-3) -> Tensor:
    """Compress values to a smaller range: ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x``.

    Source: Pohlen et al., "Observe and look further" (2018), proposition A.2, as in R2D2. Evaluated as
    ``x / (sqrt(|x| + 1) + 1) + eps x``, which avoids cancellation.

    Args:
        value: values of any shape, floating point.
        eps: non-negative constant that keeps the inverse Lipschitz continuous.

    Example:
        >>> value_rescaling(torch.tensor([-3.0, 0.0, 8.0]), eps=0.0)
        tensor([-1.,  0.,  2.])
    """
    return value / (torch.sqrt(value.abs() + 1.0) + 1.0) + eps * value


def inverse_value_rescaling(value: Tensor, eps: float = 1e-3) -> Tensor:
    """Invert :func:`value_rescaling`: ``sign(x) (((sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps))^2 - 1)``.

    Source: Pohlen et al. (2018), proposition A.2. The quotient is evaluated as
    ``2 (|x| + 1 + eps) / (sqrt(1 + 4 eps (|x| + 1 + eps)) + 1)``, which avoids cancellation.

    Args:
        value: rescaled values of any shape, floating point.
        eps: the constant passed to :func:`value_rescaling`.

    Example:
        >>> inverse_value_rescaling(torch.tensor([-1.0, 0.0, 2.0]), eps=0.0)
        tensor([-3.,  0.,  8.])
    """
    size = value.abs() + 1.0 + eps
    root = 2.0 * size / (torch.sqrt(1.0 + 4.0 * eps * size) + 1.0)
    return torch.sign(value) * (root.square() - 1.0)
