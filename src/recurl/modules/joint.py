"""Distributions of actions with several components: integers, bits, real numbers, and named parts of mixed kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as d

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import NestedKey, path_of
from recurl.core.specs import (
    Binary,
    Bounded,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
    choice_counts,
    split_choices,
)
from recurl.core.specs import Categorical as CategoricalSpec
from recurl.modules.distributions import Categorical, NormalParamExtractor, TanhNormal

__all__ = ["ActionDistribution", "ActionPart", "IndependentCategorical", "IndependentNormal", "action_parts"]

_Shape = torch.Size | list[int] | tuple[int, ...]


class IndependentCategorical(d.Distribution):
    """Distribution of several independent integers, the i-th with ``counts[i]`` choices.

    Args:
        logits: ``[*B, sum(counts)]``, the unnormalized log-probabilities of all choices, one integer after another.
        counts: number of choices of each integer.
        mask: ``[*B, sum(counts)]``, nonzero where a choice is allowed; see :class:`~recurl.modules.Categorical`.
        shape: shape of one sample; ``(len(counts),)`` if None.
        kind: distribution of one integer.

    Shapes:
        samples are int64 ``[*B, *shape]``; log-probabilities and entropies ``[*B]``, sums over the integers.

    Example:
        >>> dist = IndependentCategorical(torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0]), counts=(2, 3))
        >>> dist.deterministic_sample
        tensor([1, 0])
        >>> dist.log_prob(torch.tensor([1, 0])).exp()
        tensor(0.5753)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}  # type: ignore[override] # a property in torch's stub only

    def __init__(
        self,
        logits: Tensor,
        counts: Sequence[int],
        mask: Tensor | None = None,
        *,
        shape: Sequence[int] | None = None,
        kind: type[Categorical] = Categorical,
    ) -> None:
        if logits.shape[-1] != sum(counts):
            raise ArgumentError(
                f"The logits must end with {sum(counts)} choices, for counts {tuple(counts)}, got {list(logits.shape)}."
            )
        self.choice_counts = tuple(counts)
        allowed = None if mask is None else split_choices(mask.bool(), counts, False)
        self.choices = kind(logits=split_choices(logits, counts, -torch.inf), mask=allowed)
        super().__init__(logits.shape[:-1], torch.Size((len(counts),) if shape is None else shape), validate_args=False)

    def sample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw integers, ``[*sample_shape, *B, *shape]``."""
        return self._to_event_shape(self.choices.sample(torch.Size(sample_shape)))

    @property
    def mode(self) -> Tensor:
        """``[*B, *shape]``, the most probable integers."""
        return self._to_event_shape(self.choices.mode)

    @property
    def deterministic_sample(self) -> Tensor:
        """The same as ``mode``."""
        return self.mode

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of the integers ``value``, ``[*B, *shape]`` of any dtype."""
        return self.choices.log_prob(self._flat(value)).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy ``[*B]`` in nats."""
        return self.choices.entropy().sum(-1)

    def log_prob_and_entropy(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`log_prob` of ``value`` and :meth:`entropy`, with a joint backward pass."""
        log_prob, entropy = self.choices.log_prob_and_entropy(self._flat(value))
        return log_prob.sum(-1), entropy.sum(-1)

    @property
    def choice_log_probs(self) -> Tensor:
        """``[*B, k, n]``, the log-probabilities of all choices of all integers, -inf if forbidden or nonexistent."""
        logits: Any = self.choices.logits
        return logits

    def _to_event_shape(self, flat: Tensor) -> Tensor:
        return flat.reshape((*flat.shape[:-1], *self.event_shape))

    def _flat(self, value: Tensor) -> Tensor:
        batch = value.shape[: value.ndim - len(self.event_shape)]
        return value.reshape(*batch, -1).long()


class IndependentNormal(d.Independent):
    """Normal distribution with independent components, for actions without bounds.

    Args:
        loc: ``[*B, *A]``, the mean.
        scale: ``[*B, *A]``, the standard deviation, positive.
        event_dims: number of trailing dimensions of one action; log-probabilities are summed over them.

    Raises:
        ArgumentError: ``scale`` is missing.

    Example:
        >>> IndependentNormal(torch.zeros(5, 2), torch.ones(5, 2)).log_prob(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(self, loc: Tensor, scale: Tensor | None, *, event_dims: int = 1) -> None:
        if scale is None:
            raise ArgumentError(
                "IndependentNormal needs a scale; end the network with a NormalParamExtractor to create one."
            )
        super().__init__(d.Normal(loc, scale, validate_args=False), event_dims, validate_args=False)

    @torch.no_grad()
    def sample(self, sample_shape: _Shape = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw values ``[*sample_shape, *B, *A]``, without reading the scale back from the device as torch's does."""
        return self.rsample(torch.Size(sample_shape))

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Draw differentiable values ``[*B, *A]``, and return them with their log-densities, ``[*B]``."""
        value = self.rsample()
        return value, self.log_prob(value)

    @property
    def log_half_range(self) -> Tensor:
        """``[*B]``, 0 as there are no bounds; see :class:`~recurl.modules.TanhNormal`."""
        return self.mean.new_zeros(self.batch_shape)

    @property
    def deterministic_sample(self) -> Tensor:
        """``[*B, *A]``, the mean."""
        return self.mean


@dataclass(frozen=True, eq=False)
class ActionPart:
    """An action, or one part of it, which maps outputs of a network to a distribution.

    Args:
        spec: spec of one environment's action: ``Categorical``, ``MultiCategorical``, ``Binary``, or a floating-point
            ``Bounded`` or ``Unbounded``.
        kind: distribution of one integer.

    Raises:
        UnsupportedError: the spec is of another kind.

    Example:
        >>> from recurl.data import MultiCategorical
        >>> part = ActionPart(MultiCategorical([2, 3]))
        >>> part.parameters, part.choices
        (5, 5)
        >>> part.distribution(torch.zeros(4, 5)).sample().shape
        torch.Size([4, 2])
    """

    spec: TensorSpec
    kind: type[Categorical] = Categorical
    _bounds: tuple[Tensor, Tensor] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        reason = _why_unsupported(self.spec)
        if reason is not None:
            raise UnsupportedError(reason)
        if isinstance(self.spec, Bounded):  # created here, as tensors created in compiled code must not be kept
            object.__setattr__(self, "_bounds", (self.spec.low, self.spec.high))

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of choices of each integer; empty for real numbers, and for bits, which can't be masked."""
        return choice_counts(self.spec)

    @property
    def choices(self) -> int:
        """Size of the mask."""
        return sum(self.counts)

    @property
    def parameters(self) -> int:
        """Number of network outputs that parameterize the distribution."""
        if self.counts:
            return self.choices
        return self.spec.shape.numel() * (1 if isinstance(self.spec, Binary) else 2)

    def distribution(self, outputs: Tensor, mask: Tensor | None = None) -> d.Distribution:
        """Return the distribution for ``outputs``, ``[*B, parameters]``, restricted to ``mask``, ``[*B, choices]``.

        Outputs are logits for integers, logits of a 1 for bits, and location and scale for real numbers. Bounded real
        numbers are squashed by a :class:`~recurl.modules.TanhNormal`.
        """
        shape = self.spec.shape
        if isinstance(self.spec, Binary):
            logits = torch.stack([torch.zeros_like(outputs), outputs], -1).flatten(-2)
            return IndependentCategorical(logits, (2,) * shape.numel(), shape=shape, kind=self.kind)
        if self.counts:
            return IndependentCategorical(outputs, self.counts, mask, shape=shape, kind=self.kind)
        loc, scale = (value.reshape((*value.shape[:-1], *shape)) for value in _NORMAL(outputs))
        if self._bounds is not None:
            low, high = self._bounds
            return TanhNormal(loc, scale, low=low, high=high, event_dims=len(shape))
        return IndependentNormal(loc, scale, event_dims=len(shape))

    def encoded(self, value: Tensor) -> Tensor:
        """Return a sample in the dtype of the spec."""
        return value.to(self.spec.dtype) if isinstance(self.spec, Binary) else value


_NORMAL = NormalParamExtractor()


def _why_unsupported(spec: TensorSpec) -> str | None:
    if isinstance(spec, OneHot):
        return f"An action must be an integer here, got {spec}: set categorical_action_encoding=True."
    known = isinstance(spec, CategoricalSpec | MultiCategorical | Binary | Bounded | Unbounded)
    if not known or not spec.shape.numel():
        return f"A part of an action must be Discrete, MultiDiscrete, MultiBinary or Box, not empty, got {spec}."
    if isinstance(spec, Bounded | Unbounded) and spec.dtype is not None and not spec.dtype.is_floating_point:
        return f"A Box of integers is not supported as an action space, got {spec}: use MultiDiscrete (with start=)."
    if not isinstance(spec, Bounded):
        return None
    low, high = spec.low, spec.high
    if not (high - low).isfinite().all():
        return (
            "A Box of actions must have two finite bounds for every number, high - low finite too, or none for all, "
            f"got {spec}: clip or squash the others in a wrapper, such as gymnasium.wrappers.TransformAction, or add "
            "bounds."
        )
    return None if (low < high).all() else f"A Box of actions must have low < high, got {spec}: drop constants."


def action_parts(
    spec: TensorSpec, kind: type[Categorical] = Categorical, key: NestedKey = "action"
) -> dict[NestedKey, ActionPart]:
    """Return the parts of an action by key, in the order of its mask: a single part, or those of a ``Composite``.

    Raises:
        UnsupportedError: a part has no distribution; the message names it.

    Example:
        >>> from recurl.data import Bounded, Categorical, Composite
        >>> list(action_parts(Composite({"move": Categorical(4), "aim": Bounded(-1.0, 1.0, (2,))})))
        [('action', 'move'), ('action', 'aim')]
    """
    if isinstance(spec, Composite):
        path = path_of(key)
        parts = (action_parts(child, kind, (*path, str(name))) for name, child in spec.items())
        return {name: part for found in parts for name, part in found.items()}
    try:
        return {key: ActionPart(spec, kind)}
    except UnsupportedError as error:
        raise UnsupportedError(f"{key!r}: {error}") from error


class ActionDistribution(d.Distribution):
    """Joint distribution of the parts of an action.

    As ``distribution_class`` of a :class:`~recurl.modules.ProbabilisticActor` with one out key per part, it writes one
    entry per part and a joint log-probability, ``"action_log_prob"``.

    Args:
        outputs: ``[*B, n]``, the outputs of a network for all parts, concatenated.
        mask: ``[*B, m]``, nonzero where a choice is allowed, for all parts that have choices.
        parts: the parts, see :func:`action_parts`.

    Shapes:
        a sample is a tuple of one tensor ``[*B, ...]`` per part, or a tensor if there is a single part;
        log-probabilities and entropies ``[*B]``, sums over the parts.

    Raises:
        ArgumentError: the outputs or the mask have the wrong size.

    Example:
        >>> from recurl.data import Categorical, Composite, Unbounded
        >>> from recurl.modules import action_parts
        >>> parts = action_parts(Composite({"move": Categorical(4), "aim": Unbounded(2)})).values()
        >>> dist = ActionDistribution(torch.zeros(3, 8), parts=tuple(parts))
        >>> move, aim = dist.sample()
        >>> move.shape, aim.shape, dist.log_prob(move, aim).shape
        (torch.Size([3]), torch.Size([3, 2]), torch.Size([3]))
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}  # type: ignore[override] # a property in torch's stub only

    def __init__(self, outputs: Tensor, mask: Tensor | None = None, *, parts: Sequence[ActionPart]) -> None:
        sizes = [part.parameters for part in parts]
        widths = [part.choices for part in parts]
        if outputs.shape[-1] != sum(sizes) or (mask is not None and mask.shape[-1] != sum(widths)):
            got = f"{list(outputs.shape)} and {None if mask is None else list(mask.shape)}"
            raise ArgumentError(
                f"The parts of an action need {sum(sizes)} outputs and {sum(widths)} choices, got {got}."
            )
        masks = [None] * len(parts) if mask is None else mask.split(widths, -1)
        self._parts = tuple(parts)
        self.distributions: list[Any] = [
            part.distribution(values, allowed)
            for part, values, allowed in zip(parts, outputs.split(sizes, -1), masks, strict=True)
        ]
        super().__init__(outputs.shape[:-1], validate_args=False)

    def sample(self, sample_shape: _Shape = torch.Size()) -> Any:  # noqa: B008 - as in torch
        """Draw an action: one tensor ``[*sample_shape, *B, ...]`` per part."""
        return self._pack(dist.sample(torch.Size(sample_shape)) for dist in self.distributions)

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Draw an action with a single, real part; see :class:`~recurl.modules.TanhNormal`."""
        return self._single.rsample_with_log_prob()

    @property
    def log_half_range(self) -> Tensor:
        """``[*B]``, for a single, real part; see :class:`~recurl.modules.TanhNormal`."""
        return self._single.log_half_range

    @property
    def choice_log_probs(self) -> Tensor:
        """``[*B, k, n]``, for a single part; see :class:`IndependentCategorical`."""
        return self._single.choice_log_probs

    @property
    def choice_counts(self) -> tuple[int, ...]:
        """The number of choices of every integer."""
        return self._single.choice_counts

    @property
    def _single(self) -> Any:
        (only,) = self.distributions
        return only

    @property
    def deterministic_sample(self) -> Any:
        """The deterministic sample of every part."""
        return self._pack(dist.deterministic_sample for dist in self.distributions)

    @property
    def mode(self) -> Any:
        """The same as ``deterministic_sample``."""
        return self.deterministic_sample

    def _pack(self, values: Any) -> Any:
        encoded = tuple(part.encoded(value) for part, value in zip(self._parts, values, strict=True))
        return encoded[0] if len(encoded) == 1 else encoded

    def log_prob(self, *values: Tensor) -> Tensor:  # type: ignore[override] # one value for each part
        """Return the log-probability ``[*B]`` of an action, given as one tensor per part."""
        pairs = zip(self.distributions, values, strict=True)
        return torch.stack([dist.log_prob(value) for dist, value in pairs]).sum(0)

    def entropy(self) -> Tensor:
        """Return the entropy ``[*B]`` in nats."""
        return torch.stack([dist.entropy() for dist in self.distributions]).sum(0)

    def log_prob_and_entropy(self, *values: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`log_prob` of an action and :meth:`entropy`."""
        pairs = [_log_prob_and_entropy(dist, value) for dist, value in zip(self.distributions, values, strict=True)]
        log_probs, entropies = zip(*pairs, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


def _log_prob_and_entropy(dist: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    fused = getattr(dist, "log_prob_and_entropy", None)
    return (dist.log_prob(value), dist.entropy()) if fused is None else fused(value)
