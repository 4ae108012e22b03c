"""Running statistics of observations and returns, frozen during use and updated between batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.core.torch_compat import CompletedState
from recurl.distributed import merge_moments
from recurl.sequences.reverse import reverse_linear_recurrence

__all__ = ["ObservationNorm", "RewardScaler"]


class _RunningMoments(CompletedState):
    """Running mean and variance, merged batch by batch.

    They are stored in float64, as ``exact``, and rounded to ``mean`` and ``var``: after many samples, the change by one
    batch is below float32 resolution. A mean or variance set by hand, or loaded without ``exact``, takes precedence.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(torch.Size(shape)))
        self.var = nn.Buffer(torch.ones(torch.Size(shape)))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.exact = nn.Buffer(torch.stack([self.mean, self.var]).double())

    @torch.no_grad()
    def update(self, samples: Tensor) -> None:
        """Merge ``samples``, ``[n, *shape]`` (biased variance, as in Gymnasium)."""
        own, samples = samples.shape[0], samples.to(self.mean.dtype)
        if own == 0:  # other ranks may have samples
            samples = torch.zeros_like(self.mean).unsqueeze(0)
        count, mean, var = merge_moments(own, samples.mean(0), samples.var(0, correction=0))
        weight = count / (self.count + count).clamp_min(1).double()
        rounded = torch.stack([self.mean, self.var])
        exact = torch.where(self.exact.to(rounded.dtype) == rounded, self.exact.double(), rounded.double())
        delta = mean.double() - exact[0]
        exact = torch.lerp(exact, torch.stack([mean, var]).double(), weight)
        exact[1].add_(delta.square() * weight * (1 - weight))
        self.exact.copy_(exact)
        self.mean.copy_(exact[0])
        self.var.copy_(exact[1])
        self.count.add_(count)

    def complete_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add the exact moments, which a state saved by an earlier version lacks."""
        state_dict.setdefault(f"{prefix}exact", self.exact)


class ObservationNorm(nn.Module):
    """Normalize observations to mean 0 and standard deviation 1, with statistics that only ``update`` changes.

    The forward pass never changes the statistics, so the log-probabilities recomputed by a loss equal the collected
    ones. Call ``update`` between batches, after the last gradient step on the old one. Before the first update, the
    forward pass only clips.

    Args:
        shape: shape of one observation.
        clip: bound of the result's absolute value.
        eps: constant added to the variance.
        std_eps: constant added to the standard deviation.

    Shapes:
        ``[..., *shape]`` of any dtype to ``[..., *shape]`` in the dtype of the buffers (float32).

    The statistics are buffers: they are saved with the policy and move with ``.to(device)``. ``scale``, the factor of
    the forward pass, is computed from them by ``update``.

    Raises:
        ArgumentError: the observation doesn't end with ``shape``.

    Example:
        >>> norm = ObservationNorm((2,))
        >>> norm.update(torch.tensor([[0.0, 10.0], [2.0, 30.0]]))
        >>> norm(torch.tensor([2.0, 10.0]))
        tensor([ 1., -1.])
    """

    def __init__(self, shape: Sequence[int], *, clip: float = 10.0, eps: float = 1e-8, std_eps: float = 0.0) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        self.clip = clip
        self.eps = eps
        self.std_eps = std_eps
        self.moments = _RunningMoments(self.shape)
        self.scale = nn.Buffer(self._scale())

    def forward(self, observation: Tensor) -> Tensor:
        """Return the normalized observation."""
        mean = self.moments.mean
        return ((observation.to(mean.dtype) - mean) * self.scale).clamp(-self.clip, self.clip)

    def update(self, observation: Tensor) -> None:
        """Merge a batch of observations, ``[..., *shape]``, all finite, into the statistics."""
        lead = observation.ndim - len(self.shape)
        if lead < 0 or observation.shape[lead:] != self.shape:
            raise ArgumentError(
                f"An observation must end with the shape {tuple(self.shape)}, got {tuple(observation.shape)}."
            )
        self.moments.update(observation.reshape(-1, *self.shape))
        self.scale.copy_(self._scale())

    @torch.no_grad()
    def set_moments(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Replace the statistics, such as by those of another library.

        Args:
            mean: ``[*shape]``.
            var: biased variance, ``[*shape]``.
            count: number of samples that they are of, which later updates weigh.
        """
        self.moments.mean.copy_(mean)
        self.moments.var.copy_(var)
        self.moments.count.fill_(count)
        self.scale.copy_(self._scale())

    def _scale(self) -> Tensor:
        variance = self.moments.var + self.eps
        return torch.rsqrt(variance) if not self.std_eps else (variance.sqrt() + self.std_eps).reciprocal()


class RewardScaler(nn.Module):
    """Divide rewards by the running standard deviation of the discounted return.

    Source: ``VecNormalize`` of OpenAI Baselines and Stable-Baselines3.

    The tracked return runs forward in time, ``R[t] = reward[t] + gamma * R[t - 1]``, restarts after every finished
    episode, and is carried over from batch to batch. Rewards are not shifted, so their sign is preserved.

    Args:
        gamma: discount factor of the return.
        batch_size: ``(*B,)``, the environments of a batch ``[*B, T]``.
        clip: bound of the scaled reward's absolute value.
        eps: constant added to the variance.

    Statistics and carried returns are buffers, in ``state_dict()``. A non-finite reward corrupts the statistics, but
    carried returns only until the end of its episode.

    Raises:
        ArgumentError: a reward is not of shape ``[*B, T, 1]``.

    Example:
        >>> scaler = RewardScaler(0.5, (1,))
        >>> reward = torch.tensor([[[1.0], [1.0], [0.0], [0.0]]])
        >>> scaler.update(reward, torch.zeros(1, 4, 1, dtype=torch.bool))
        >>> scaler(reward).squeeze()
        tensor([2.4471, 2.4471, 0.0000, 0.0000])
    """

    def __init__(self, gamma: float, batch_size: Sequence[int] = (), *, clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.gamma = gamma
        self.clip = clip
        self.eps = eps
        self.returns = nn.Buffer(torch.zeros(torch.Size(batch_size)))
        self.moments = _RunningMoments(())

    def forward(self, reward: Tensor) -> Tensor:
        """Return the scaled reward, same shape."""
        return (reward * torch.rsqrt(self.moments.var + self.eps)).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, reward: Tensor, done: Tensor, mask: Tensor | None = None) -> None:
        """Merge the returns of a batch.

        Args:
            reward: ``[*B, T, 1]``, unscaled.
            done: bool ``[*B, T, 1]``, True where the step ended its episode (terminated or truncated).
            mask: bool ``[*B, T]``, False at steps that don't count, such as those of absent agents.
        """
        expected = self.returns.shape
        if reward.ndim != len(expected) + 2 or reward.shape[:-2] != expected or reward.shape[-1] != 1:
            raise ArgumentError(f"The reward must have the shape {(*expected, 'T', 1)}, got {tuple(reward.shape)}.")
        value, done = reward.squeeze(-1).to(self.returns.dtype), done.squeeze(-1)
        if value.numel():
            value = torch.cat([(value[..., 0] + self.returns).unsqueeze(-1), value[..., 1:]], -1)
            keep = torch.full_like(value, self.gamma).masked_fill(done, 0.0)
            value = reverse_linear_recurrence(value.flip(-1), keep.roll(1, -1).flip(-1)).flip(-1)
            last = keep[..., -1]
            self.returns.copy_((last * value[..., -1]).masked_fill(last == 0, 0.0))
        self.moments.update(value.reshape(-1) if mask is None else value[mask])
