"""Terms of the PPO objective, and distances between values and targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recurl.core.errors import ArgumentError
from recurl.objectives.common import masked_mean

__all__ = ["DISTANCES", "Surrogate", "SurrogateInputs", "SurrogateTerms", "value_distances"]

DISTANCES = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss, "l2": F.mse_loss}


class SurrogateInputs(NamedTuple):
    """Inputs of the losses except those of the networks and the action, ``[*B, T]`` each."""

    log_prob: Tensor
    advantage: Tensor
    target: Tensor
    old_value: Tensor | None
    mask: Tensor | None


class SurrogateTerms(NamedTuple):
    """Scalar means over the valid tokens, and ratios ``[*B, T]`` without gradients."""

    gain: Tensor
    distance: Tensor
    log_ratio: Tensor
    ratio: Tensor


class Surrogate(NamedTuple):
    """Clipped surrogate objective and value loss; see :class:`~recurl.objectives.ClipPPOLoss` for the options.

    Example:
        >>> zeros = torch.zeros(3)
        >>> data = SurrogateInputs(log_prob=zeros, advantage=zeros + 2, target=zeros, old_value=None, mask=None)
        >>> terms = Surrogate(clip_epsilon=0.2, clip_value=0.0, distance="l2")(zeros + 1, zeros + 3, data)
        >>> terms.gain, terms.distance
        (tensor(2.4000), tensor(9.))
    """

    clip_epsilon: float | Tensor
    clip_value: float
    distance: str

    def __call__(self, log_prob: Tensor, value: Tensor, data: SurrogateInputs) -> SurrogateTerms:
        """Return the terms for the current log-probabilities and values, ``[*B, T]`` each."""
        log_ratio = log_prob - data.log_prob
        if data.mask is not None:  # the ratio of padding may overflow, and 0 * inf is NaN
            log_ratio = torch.where(data.mask, log_ratio, 0.0)
        ratio = log_ratio.exp()
        epsilon: Any = self.clip_epsilon  # both ends are numbers, or both tensors
        gain = torch.minimum(ratio * data.advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * data.advantage)
        distance, far = value_distances(self.distance, value, data.target, data.old_value, self.clip_value)
        if far is not None:
            distance = torch.maximum(distance, far)
        gain, distance = masked_mean(gain, data.mask), masked_mean(distance, data.mask)
        return SurrogateTerms(gain, distance, log_ratio.detach(), ratio.detach())


def value_distances(
    kind: str, value: Tensor, target: Tensor, old_value: Tensor | None, clip_value: float
) -> tuple[Tensor, Tensor | None]:
    """Return the distance of every value to its target, and that of the value clipped around ``old_value``.

    Args:
        kind: key of ``DISTANCES``.
        value: values, ``[*B, T]``.
        target: their targets.
        old_value: stored values; None disables clipping.
        clip_value: maximum distance of a value from the stored one, compared in their dtype. Values within this
            distance stay bitwise unchanged.

    Raises:
        ArgumentError: the key is unknown.
    """
    if kind not in DISTANCES:
        raise ArgumentError(f"The distance of a loss must be one of {sorted(DISTANCES)}, got {kind!r:.80}.")
    distance = DISTANCES[kind]
    plain = distance(value, target, reduction="none")
    if old_value is None:
        return plain, None
    # Exact within the range, where old + (value - old) would differ from the value by rounding, as old + clip_value may
    # for a value at the end of the range.
    change = value - old_value
    near = torch.where(change.abs() <= clip_value, value, old_value + change.clamp(-clip_value, clip_value))
    return plain, distance(near, target, reduction="none")
