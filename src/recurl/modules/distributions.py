"""Action distributions. Arguments are not validated, as a check would cost a device synchronization."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor
from torch import distributions as d
from torch.distributions.utils import lazy_property, probs_to_logits
from torch.nn import functional as F

from recurl.core.autograd import custom_backward_allowed
from recurl.core.errors import ArgumentError
from recurl.core.lazy import lazy_names
from recurl.core.torch_compat import assert_async, is_compiling
from recurl.modules.tanh_normal import TanhNormal

lazy_names(__name__)
__path__: list[str] = []  # in TorchRL it is a package, whose modules' names are here

__all__ = [
    "Categorical",
    "MaskedCategorical",
    "MaskedOneHotCategorical",
    "NormalParamExtractor",
    "OneHotCategorical",
    "TanhNormal",
]

_Shape = torch.Size | list[int] | tuple[int, ...]


class Categorical(d.Categorical):
    """Categorical distribution over n choices, with integer samples.

    Args:
        logits: ``[*B, n]`` unnormalized log-probabilities. Exactly one of ``logits`` and ``probs`` must be given.
        probs: ``[*B, n]`` probabilities.
        mask: ``[*B, n]``, bool or integers, nonzero where a choice is allowed; at least one per row. A forbidden choice
            has probability zero and log-probability -inf, and doesn't contribute to the entropy or to gradients. A row
            that allows none, such as padding, is uniform and has no gradient, but can't be sampled.

    Shapes:
        samples are int64 ``[*B]``; log-probabilities and entropies ``[*B]``.

    Raises:
        ArgumentError: not exactly one of ``logits`` and ``probs`` is given; the mask has another shape; or, when
            sampling on the CPU, a probability is NaN or a row allows no choice.

    Example:
        >>> dist = Categorical(logits=torch.zeros(2, 3), mask=torch.tensor([[True, True, False], [False, True, False]]))
        >>> dist.deterministic_sample
        tensor([0, 1])
        >>> dist.entropy()
        tensor([0.6931, 0.0000])
    """

    one_hot: ClassVar[bool] = False
    """Whether samples are one-hot vectors."""
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
        return probs_to_logits(self.probs) if raw is None else F.log_softmax(raw, -1)

    def sample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw choices, ``[*sample_shape, *B]`` int64, identical to those of ``torch.multinomial``.

        A single sample is drawn in the same way, as the largest of ``probs / exponential noise``, but without the cost
        of its checks.

        Raises:
            ArgumentError: a probability is NaN (checked on the CPU; otherwise the device reports it).
        """
        probs: Any = self.probs
        on_host, compiling = probs.device.type == "cpu", is_compiling()
        if self.mask is not None and on_host and custom_backward_allowed():
            _check_choices(self.mask)
        one = not len(sample_shape) and (compiling or custom_backward_allowed())
        if not one or probs.device.type not in ("cpu", "cuda"):
            return super().sample(torch.Size(sample_shape))
        probs = probs.detach()
        largest, choice = torch.div(probs, torch.empty_like(probs).exponential_()).max(-1)
        fits = ~largest.sum().isnan()
        if compiling or not on_host:
            assert_async(fits, "The probabilities of a categorical distribution must be numbers, got NaN.")
        elif not fits.item():
            raise ArgumentError(
                f"The probabilities must be numbers, got NaN in the distribution of {list(choice.shape)} choices: "
                "look for a loss that diverged, or NaN in the observations."
            )
        return choice

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of the choices ``value``, ``[*B]`` of any dtype."""
        logits: Any = self.logits
        if value.dtype != torch.int64 or value.shape != logits.shape[:-1]:
            return super().log_prob(value)
        return _chosen(logits, value)

    def entropy(self) -> Tensor:
        """Return the entropy ``[*B]`` in nats; choices of probability zero contribute nothing."""
        return _entropy(self.logits)

    def log_prob_and_entropy(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`log_prob` of ``value`` and :meth:`entropy`."""
        return self.log_prob(value), self.entropy()

    def _index(self, value: Tensor) -> Tensor:
        return value

    @property
    def choice_log_probs(self) -> Tensor:
        """``[*B, 1, n]``, the log-probabilities of all choices, -inf for forbidden ones."""
        logits: Any = self.logits
        return logits.unsqueeze(-2)

    @property
    def choice_counts(self) -> tuple[int, ...]:
        """The number of choices, as a tuple of one."""
        return (self._num_events,)

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
    if logits is None:  # the logarithm of a forbidden choice's probability would make its gradient NaN
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


def _entropy(logits: Tensor) -> Tensor:
    safe = torch.where(torch.isneginf(logits), torch.zeros_like(logits), logits)
    return (logits.exp() * -safe).sum(-1)


def _chosen(logits: Tensor, index: Tensor) -> Tensor:
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)


class OneHotCategorical(Categorical):
    """Categorical distribution over n choices, with one-hot samples.

    Arguments and shapes are those of :class:`Categorical`, except that samples are int64 ``[*B, n]`` with a single one.

    Example:
        >>> dist = OneHotCategorical(logits=torch.tensor([0.0, 2.0]))
        >>> dist.deterministic_sample
        tensor([0, 1])
        >>> dist.log_prob(torch.tensor([0, 1]))
        tensor(-0.1269)
    """

    one_hot = True

    def sample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw one-hot vectors, ``[*sample_shape, *B, n]`` int64."""
        return F.one_hot(super().sample(torch.Size(sample_shape)), self._num_events)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of the one-hot vectors ``value``, ``[*B, n]`` of any dtype."""
        return super().log_prob(self._index(value))

    def _index(self, value: Tensor) -> Tensor:
        return value.long().argmax(-1)

    @property
    def mode(self) -> Tensor:
        """``[*B, n]``, the most probable choice."""
        return F.one_hot(super().mode, self._num_events)


class MaskedCategorical(Categorical):
    """Categorical distribution over the choices that a mask allows: a :class:`Categorical` with a required mask.

    In a policy, the mask is an entry of the TensorDict:
    ``ProbabilisticActor(net, in_keys={"logits": "logits", "mask": "action_mask"}, distribution_class=...)``. Losses,
    replay and export therefore apply the collected masks.

    Args:
        logits: ``[*B, n]``; exactly one of ``logits`` and ``probs`` must be given.
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
                f"{type(self).__name__} needs a mask; without one, use {type(self).__bases__[-1].__name__}."
            )
        super().__init__(logits, probs, mask=mask)


class MaskedOneHotCategorical(MaskedCategorical, OneHotCategorical):
    """One-hot categorical distribution over the choices that a mask allows; see :class:`MaskedCategorical`.

    Example:
        >>> mask = torch.tensor([False, True, True])
        >>> MaskedOneHotCategorical(logits=torch.tensor([3.0, 1.0, 2.0]), mask=mask).deterministic_sample
        tensor([0, 0, 1])
    """
