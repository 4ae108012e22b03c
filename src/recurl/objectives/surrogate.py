"""Terms of the PPO objective with hand-written derivatives, and distances between values and targets."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from recurl.core.autograd import custom_backward_allowed, double_backward, needs_double_backward
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
        """Return the terms for the current log-probabilities and values, ``[*B, T]`` each.

        Their first derivatives are hand-written: a dozen operations instead of three dozen in autograd's graph. If
        ``data`` requires gradients too, autograd differentiates instead.
        """
        if custom_backward_allowed() and not any(value is not None and value.requires_grad for value in data):
            return SurrogateTerms(*_SurrogateMeans.apply(log_prob, value, self, data))
        return self.means(log_prob, value, data)

    def means(self, log_prob: Tensor, value: Tensor, data: SurrogateInputs) -> SurrogateTerms:
        """Return the same terms, differentiated by autograd."""
        log_ratio = log_prob - data.log_prob
        if data.mask is not None:  # the ratio of padding may overflow, and 0 * inf is NaN
            log_ratio = torch.where(data.mask, log_ratio, 0.0)
        ratio = log_ratio.exp()
        gain = torch.minimum(*self.gains(ratio, data.advantage))
        distance, far = self.distances(value, data)
        if far is not None:
            distance = torch.maximum(distance, far)
        gain, distance = masked_mean(gain, data.mask), masked_mean(distance, data.mask)
        return SurrogateTerms(gain, distance, log_ratio.detach(), ratio.detach())

    def gains(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gain of every token, unclipped and clipped."""
        epsilon: Any = self.clip_epsilon  # both ends are numbers, or both tensors
        return ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage

    def distances(self, value: Tensor, data: SurrogateInputs) -> tuple[Tensor, Tensor | None]:
        """Return the distance of every value to its target, and with clipping that of the clipped value."""
        return value_distances(self.distance, value, data.target, data.old_value, self.clip_value)

    def slope(self, difference: Tensor) -> Tensor:
        """Return the derivative of the distance with respect to the value, for ``difference = value - target``."""
        match self.distance:
            case "l2":
                return 2.0 * difference
            case "l1":
                return difference.sign()
            case _:
                return difference.clamp(-1.0, 1.0)


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
    """
    distance = DISTANCES[kind]
    plain = distance(value, target, reduction="none")
    if old_value is None:
        return plain, None
    # Exact within the range, where old + (value - old) would differ from the value by rounding, as old + clip_value may
    # for a value at the end of the range.
    change = value - old_value
    near = torch.where(change.abs() <= clip_value, value, old_value + change.clamp(-clip_value, clip_value))
    return plain, distance(near, target, reduction="none")


class _SurrogateMeans(torch.autograd.Function):
    """:meth:`Surrogate.means` with a hand-written backward pass."""

    @staticmethod
    def forward(
        ctx: Any, log_prob: Tensor, value: Tensor, surrogate: Surrogate, data: SurrogateInputs
    ) -> SurrogateTerms:
        terms = surrogate.means(log_prob, value, data)
        ctx.surrogate, ctx.data, ctx.ratio = surrogate, data, terms.ratio
        ctx.save_for_backward(log_prob, value)
        ctx.mark_non_differentiable(terms.log_ratio, terms.ratio)
        ctx.set_materialize_grads(False)
        return terms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gain, distance = grads[:2]
        surrogate, data, (log_prob, value) = ctx.surrogate, ctx.data, ctx.saved_tensors
        if needs_double_backward(grads):
            zero = log_prob.new_zeros(())
            wanted = [zero if grad is None else grad for grad in (gain, distance)]
            grad_inputs = double_backward(lambda *x: surrogate.means(*x, data)[:2], (log_prob, value), wanted)
            return (*grad_inputs, None, None)
        needs_log_prob, needs_value, *_ = ctx.needs_input_grad
        grad_log_prob = grad_value = None
        count = value.numel() if data.mask is None else data.mask.sum().clamp_min(1)
        if gain is not None and needs_log_prob:
            plain, clipped = surrogate.gains(ctx.ratio, data.advantage)
            grad_log_prob = _select(plain <= clipped, data.mask, plain) * (gain / count)
        if distance is not None and needs_value:
            slope = surrogate.slope(value - data.target)
            nearer = None
            if data.old_value is not None:
                plain, far = surrogate.distances(value, data)
                nearer = plain >= cast(Tensor, far)
            slope = _select(nearer, data.mask, slope)
            grad_value = slope * (distance / count)
        return grad_log_prob, grad_value, None, None


def _select(chosen: Tensor | None, mask: Tensor | None, values: Tensor) -> Tensor:
    """Return ``values`` where both flags are true (or None) and 0 elsewhere."""
    if chosen is None:
        chosen, mask = mask, None
    if chosen is None:
        return values
    return torch.where(chosen if mask is None else chosen & mask, values, 0.0)
