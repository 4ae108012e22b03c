"""Action distributions. None of them validates its arguments: a check would cost a device synchronisation."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, cast

import numpy as np
import torch
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor
from torch import distributions as d
from torch.distributions.utils import lazy_property, probs_to_logits
from torch.nn import functional as F

from recurl._torch import assert_async
from recurl.autograd import differentiate_again, first_derivatives_do, gradients_have_derivatives
from recurl.errors import ArgumentError

__all__ = [
    "Categorical",
    "MaskedCategorical",
    "MaskedOneHotCategorical",
    "NormalParamExtractor",
    "OneHotCategorical",
    "TanhNormal",
]

_Shape = torch.Size | list[int] | tuple[int, ...]
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_QUADRATURE_NODES = 32


class Categorical(d.Categorical):
    """One of n choices, as an integer.

    Args:
        logits: ``[*B, n]`` unnormalised log-probabilities. Exactly one of ``logits`` and ``probs`` is given.
        probs: ``[*B, n]`` probabilities.
        mask: ``[*B, n]``, bool or integers, nonzero where a choice is allowed; at least one per row. A forbidden choice
            has probability zero, log-probability -inf, and no part in the entropy or in a gradient. A row that allows
            none, such as padding, is uniform and has no gradient, but can't be sampled.

    Shapes:
        samples are int64 ``[*B]``; log-probabilities and entropies ``[*B]``.

    Raises:
        ArgumentError: not exactly one of ``logits`` and ``probs`` is given; the mask has another shape; or, at a sample
            on the CPU, a probability is NaN or a row allows no choice.

    Example:
        >>> dist = Categorical(logits=torch.zeros(2, 3), mask=torch.tensor([[True, True, False], [False, True, False]]))
        >>> dist.deterministic_sample
        tensor([0, 1])
        >>> dist.entropy()
        tensor([0.6931, 0.0000])
    """

    _raw: Tensor | None = None
    mask: Tensor | None = None

    def __init__(
        self, logits: Tensor | None = None, probs: Tensor | None = None, *, mask: Tensor | None = None
    ) -> None:
        if (logits is None) == (probs is None):
            raise ArgumentError("Give exactly one of logits and probs to a categorical distribution.")
        if mask is not None:
            self.mask = mask = mask.bool()
            logits, probs = _masked(logits, probs, mask), None
        if logits is None or logits.ndim == 0:
            super().__init__(probs=probs, logits=logits, validate_args=False)
            return
        self._raw = self._param = logits
        self._num_events = logits.shape[-1]
        d.Distribution.__init__(self, logits.shape[:-1], validate_args=False)

    @lazy_property
    def logits(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] - lazy, as torch's
        """``[*B, n]``, the log-probabilities of all choices."""
        raw = self._raw
        return probs_to_logits(self.probs) if raw is None else _normalized(raw)

    def sample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw choices, ``[*sample_shape, *B]`` int64: those that ``torch.multinomial`` draws.

        One choice each is drawn as there, the largest of ``probs / exponential noise``, for less than its checks cost.

        Raises:
            ArgumentError: a probability is NaN (looked for on the CPU; elsewhere the device reports it).
        """
        probs: Any = self.probs
        on_host = probs.device.type == "cpu"
        if self.mask is not None and on_host and first_derivatives_do():
            _check_choices(self.mask)
        if len(sample_shape) or probs.device.type not in ("cpu", "cuda") or not first_derivatives_do():
            return super().sample(torch.Size(sample_shape))
        probs = probs.detach()
        largest, choice = torch.div(probs, torch.empty_like(probs).exponential_()).max(-1)
        fits = ~largest.sum().isnan()
        if not on_host:
            assert_async(fits, "The probabilities of a categorical distribution must be numbers, got NaN.")
        elif not fits.item():
            raise ArgumentError(
                f"The probabilities must be numbers, got NaN in the distribution of {list(choice.shape)} choices: "
                "look for a loss that diverged, or NaN in the observations."
            )
        return choice

    def log_prob(self, value: Tensor) -> Tensor:
        """``[*B]``, the log-probability of the choices ``value``, ``[*B]`` of any dtype."""
        logits: Any = self.logits
        if value.dtype != torch.int64 or value.shape != logits.shape[:-1]:
            return super().log_prob(value)
        return _chosen(logits, value)

    def entropy(self) -> Tensor:
        """``[*B]``, in nats; choices of probability zero count nothing."""
        return _entropy(self.logits)

    def log_prob_and_entropy(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`log_prob` of ``value`` and :meth:`entropy`, whose derivatives are then taken together."""
        raw, index = self._raw, self._index(value)
        if raw is None or index.dtype != torch.int64 or index.shape != raw.shape[:-1] or not first_derivatives_do():
            return self.log_prob(value), self.entropy()
        return cast("tuple[Tensor, Tensor]", _LogProbAndEntropy.apply(raw, index))

    def _index(self, value: Tensor) -> Tensor:
        return value

    @property
    def mode(self) -> Tensor:
        """``[*B]``, the most probable choice."""
        return self.logits.argmax(-1)  # type: ignore[union-attr] # a lazy property in torch

    @property
    def deterministic_sample(self) -> Tensor:
        """The same as ``mode``."""
        return self.mode


def _masked(logits: Tensor | None, probs: Tensor | None, mask: Tensor) -> Tensor:
    """Return logits that are -inf where ``mask`` is False; 0 in rows without a True."""
    given = probs if logits is None else logits
    assert given is not None
    if mask.shape != given.shape:
        raise ArgumentError(
            f"The mask must have the shape of the logits or probs, {list(given.shape)}, got {list(mask.shape)}."
        )
    if logits is None:  # the logarithm of a forbidden choice would make its gradient NaN
        logits = torch.log(torch.where(mask, given, 1.0))
    empty = ~mask.any(-1, keepdim=True)
    return logits.masked_fill(~mask, -torch.inf).masked_fill(empty, 0.0)


def _check_choices(mask: Tensor) -> None:
    empty = ~mask.any(-1)
    if empty.any():
        raise ArgumentError(
            f"At least one choice of every row must be allowed, but the mask {list(mask.shape)} allows none in rows "
            f"{empty.flatten().nonzero().flatten().tolist()}: reset the environments that ended."
        )


def _normalized(raw: Tensor) -> Tensor:
    return F.log_softmax(raw, -1)


def _entropy(logits: Tensor) -> Tensor:
    safe = torch.where(torch.isneginf(logits), torch.zeros_like(logits), logits)
    return (logits.exp() * -safe).sum(-1)


class _LogProbAndEntropy(torch.autograd.Function):
    """(unnormalised logits ``[*B, n]``, choices ``[*B]``) -> log-probability and entropy, ``[*B]`` each."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        logits = _normalized(raw)
        entropy = _entropy(logits)
        ctx.save_for_backward(raw, index, logits, entropy)
        ctx.set_materialize_grads(False)
        return _chosen(logits, index), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        raw, index, logits, entropy = ctx.saved_tensors
        of_log_prob, of_entropy = grads
        if gradients_have_derivatives(grads):

            def again(raw: Tensor) -> tuple[Tensor, Tensor]:
                logits = _normalized(raw)
                return _chosen(logits, index), _entropy(logits)

            zeros = raw.new_zeros(index.shape)
            return differentiate_again(again, [raw], [zeros if grad is None else grad for grad in grads])[0], None
        gradient = torch.zeros_like(raw)
        if of_log_prob is not None:
            gradient.scatter_(-1, index.unsqueeze(-1), of_log_prob.unsqueeze(-1))
            gradient.addcmul_(logits.exp(), of_log_prob.unsqueeze(-1), value=-1.0)
        if of_entropy is not None:
            # Choices of probability zero: 0 instead of 0 * -inf.
            surprise = torch.nan_to_num(logits, nan=torch.nan, neginf=0.0) + entropy.unsqueeze(-1)
            gradient.addcmul_(logits.exp() * surprise, of_entropy.unsqueeze(-1), value=-1.0)
        return gradient, None


def _chosen(logits: Tensor, index: Tensor) -> Tensor:
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)


class OneHotCategorical(Categorical):
    """One of n choices, as a one-hot vector.

    Arguments and shapes are those of :class:`Categorical`, but samples are int64 ``[*B, n]`` with a single one.

    Example:
        >>> dist = OneHotCategorical(logits=torch.tensor([0.0, 2.0]))
        >>> dist.deterministic_sample
        tensor([0, 1])
        >>> dist.log_prob(torch.tensor([0, 1]))
        tensor(-0.1269)
    """

    def sample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw one-hot vectors, ``[*sample_shape, *B, n]`` int64."""
        return F.one_hot(super().sample(torch.Size(sample_shape)), self._num_events)

    def log_prob(self, value: Tensor) -> Tensor:
        """``[*B]``, the log-probability of the one-hot vectors ``value``, ``[*B, n]`` of any dtype."""
        return super().log_prob(self._index(value))

    def _index(self, value: Tensor) -> Tensor:
        return value.long().argmax(-1)

    @property
    def mode(self) -> Tensor:
        """``[*B, n]``, the most probable choice."""
        return F.one_hot(super().mode, self._num_events)


class MaskedCategorical(Categorical):
    """One of the choices that a mask allows, as an integer; see :class:`Categorical`, whose mask is required here.

    In a policy, the mask is an entry of the TensorDict:
    ``ProbabilisticActor(net, in_keys={"logits": "logits", "mask": "action_mask"}, distribution_class=...)``. So losses,
    replay and export apply the collected masks.

    Args:
        logits: ``[*B, n]``; exactly one of ``logits`` and ``probs`` is given.
        probs: ``[*B, n]``.
        mask: ``[*B, n]``, bool or integers, nonzero where a choice is allowed.

    Example:
        >>> dist = MaskedCategorical(logits=torch.zeros(3), mask=torch.tensor([True, False, True]))
        >>> dist.probs, dist.log_prob(torch.tensor(1))
        (tensor([0.5000, 0.0000, 0.5000]), tensor(-inf))
    """

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None, *, mask: Tensor) -> None:
        if mask is None:  # pyright: ignore[reportUnnecessaryComparison] - users
            raise ArgumentError(
                f"{type(self).__name__} needs a mask; without one, take {type(self).__bases__[-1].__name__}."
            )
        super().__init__(logits, probs, mask=mask)


class MaskedOneHotCategorical(MaskedCategorical, OneHotCategorical):
    """One of the choices that a mask allows, as a one-hot vector; see :class:`MaskedCategorical`.

    Example:
        >>> mask = torch.tensor([False, True, True])
        >>> MaskedOneHotCategorical(logits=torch.tensor([3.0, 1.0, 2.0]), mask=mask).deterministic_sample
        tensor([0, 0, 1])
    """


class TanhNormal(d.Distribution):
    """A normal squashed by tanh and stretched to the interval (low, high): the last dimension is one action.

    ``value = low + (high - low) / 2 * (1 + tanh(u))`` with ``u ~ Normal(loc, scale)``. The log-density adds the
    change of variables ``-log(1 - tanh(u)^2) - log((high - low) / 2)``, with ``log(1 - tanh(u)^2)`` computed as
    ``2 * (log 2 - u - softplus(-2 u))``, which neither overflows nor cancels (Haarnoja et al., "Soft actor-critic",
    2018, appendix C). The log-probability is always that of the value as stored: a value on a bound is taken
    as the last representable one inside.

    Args:
        loc: ``[*B, A]``, mean of the normal.
        scale: ``[*B, A]``, its standard deviation, positive.
        upscale: bound of the location when ``tanh_loc`` is set.
        low: lower bound, a number or a tensor that broadcasts to ``[*B, A]``.
        high: upper bound, likewise.
        event_dims: how many trailing dimensions make one action; log-probabilities are summed over them.
        tanh_loc: squash the location first, ``loc = upscale * tanh(loc / upscale)``, so that it can't saturate.

    Shapes:
        samples ``[*B, A]``, log-probabilities and entropies ``[*B]``.

    Raises:
        ArgumentError: ``scale`` is missing; numbers with ``low >= high``.

    Example:
        >>> dist = TanhNormal(torch.zeros(1), torch.ones(1), low=-2.0, high=2.0)
        >>> dist.deterministic_sample
        tensor([0.])
        >>> dist.log_prob(torch.zeros(1))
        tensor(-1.6121)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}  # type: ignore[override] # a property in torch's stub only
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | None,
        upscale: float = 5.0,
        low: float | Tensor = -1.0,
        high: float | Tensor = 1.0,
        event_dims: int = 1,
        tanh_loc: bool = False,
    ) -> None:
        if scale is None:
            raise ArgumentError("TanhNormal needs a scale; end the network with a NormalParamExtractor to make one.")
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low >= high:
            raise ArgumentError(f"TanhNormal needs low < high, got low={low} and high={high}.")
        if tanh_loc:
            loc = upscale * torch.tanh(loc / upscale)
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        self.low = _as_tensor(low, self.loc)
        self.half_range = 0.5 * (_as_tensor(high, self.loc) - self.low)
        self._event_dims = event_dims
        split = self.loc.ndim - event_dims
        super().__init__(self.loc.shape[:split], self.loc.shape[split:], validate_args=False)

    def rsample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw values that carry gradients to loc and scale, ``[*sample_shape, *B, A]``."""
        noise = torch.randn((*sample_shape, *self.loc.shape), dtype=self.loc.dtype, device=self.loc.device)
        return self._squash(self.loc + self.scale * noise)

    @property
    def deterministic_sample(self) -> Tensor:
        """``[*B, A]``, the squashed location: the median of every component."""
        return self._squash(self.loc)

    @property
    def mode(self) -> Tensor:
        """The same as ``deterministic_sample``; the density itself may peak elsewhere, or at the bounds."""
        return self.deterministic_sample

    def log_prob(self, value: Tensor) -> Tensor:
        """``[*B]``, the log-density of ``value``, ``[*B, A]``."""
        limit = 1.0 - torch.finfo(self.loc.dtype).eps
        u = torch.atanh(((value - self.low) / self.half_range - 1.0).clamp(-limit, limit))
        z = (u - self.loc) / self.scale
        density = -0.5 * z * z - self.scale.log() - _HALF_LOG_2PI - _log_slope(u) - self.half_range.log()
        return self._sum_event(density)

    def entropy(self) -> Tensor:
        """``[*B]``, in nats: that of the normal plus the mean log-slope of the squashing.

        The mean has no closed form; it is taken by Gauss-Hermite quadrature with 32 nodes, so it is deterministic.
        The error is below 1e-7 nats for scales up to 1, 2e-4 at 2, 0.03 at 5 and 0.4 at 20.
        """
        quadrature = _quadrature.__wrapped__ if torch.compiler.is_compiling() else _quadrature
        nodes, weights = quadrature(self.loc.dtype, self.loc.device)
        u = self.loc.unsqueeze(-1) + self.scale.unsqueeze(-1) * nodes
        slope = (_log_slope(u) * weights).sum(-1)
        return self._sum_event(self.scale.log() + (0.5 + _HALF_LOG_2PI) + slope + self.half_range.log())

    def _squash(self, u: Tensor) -> Tensor:
        return torch.addcmul(self.low + self.half_range, self.half_range, torch.tanh(u))

    def _sum_event(self, x: Tensor) -> Tensor:
        return x.sum(tuple(range(-self._event_dims, 0))) if self._event_dims else x


def _log_slope(u: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)``."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


def _as_tensor(bound: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(bound, dtype=like.dtype, device=like.device)


@functools.cache
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the mean over a standard normal, ``[32]`` each."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
    with torch.inference_mode(False):  # they are kept, and may serve gradients later
        kept = torch.from_numpy(np.stack([nodes, weights / weights.sum()])).to(device, dtype)
        return kept[0], kept[1]
