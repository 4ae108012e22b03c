"""Base class of losses, and helpers shared by objectives: entries, states, masked means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.core.keys import MASK, NestedKey, next_key, normalize_key
from recurl.core.spans import BACKWARD, FORWARD, span
from recurl.distributed import is_global, merge_moments
from recurl.execution.explain import Explanation
from recurl.objectives.kinds import ValueEstimators
from recurl.objectives.tensor_keys import KeyedModule
from recurl.sequences.entries import Step, leaves
from recurl.sequences.mode import set_recurrent_mode

__all__ = [
    "LossModule",
    "check_network",
    "check_writes",
    "common_prefix",
    "entry",
    "masked_mean",
    "moments",
    "per_token",
    "standardized",
    "states_of",
    "total_of",
    "without_padding",
]


class LossModule(KeyedModule):
    """Base class of losses, which map a batch of sequences to a TensorDict of scalars.

    ``forward`` and ``tensors`` enter recurrent mode themselves, so recurrent modules read the batch as sequences (the
    last batch dimension is time), whatever the mode outside. They never write into the batch. Networks are looked up at
    every call, so they may be replaced, edited, copied or pickled at any time.

    Subclasses implement ``losses``, ``make_value_estimator``, ``explain``, ``in_keys`` (all entries that are read;
    select them to keep minibatches small), ``out_keys`` and ``accepted_keys``.
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the losses of a non-empty batch ``[T]`` or ``[*B, T]`` as a TensorDict of scalars."""
        return TensorDict(self.tensors(tensordict), [])

    def tensors(self, batch: Step, **networks: Any) -> dict[NestedKey, Tensor]:
        """Return the losses by name. The batch may also be ``Entries``, as ``SequenceMinibatches.entries`` yields.

        Args:
            batch: ``[T]`` or ``[*B, T]``.
            **networks: passed to ``losses``; given by faster forms of :meth:`gradients`.
        """
        if batch.batch_size.numel() == 0:
            raise ArgumentError(
                f"A loss needs a batch with at least one token, got shape {list(batch.batch_size)}: skip empty batches."
            )
        if batch.get(MASK, None) is not None:
            batch = without_padding(batch, self.in_keys)
        with set_recurrent_mode(True), self.cached_keys():
            return self.losses(batch, **networks)

    def gradients(self, batch: Step, **networks: Any) -> dict[NestedKey, Tensor]:
        """Return the losses by name, without gradients, and set the gradients of their sum.

        :func:`recurl.execution.compile` returns it in its fastest form::

            gradients = recurl.execution.compile(loss.gradients)
            for minibatch in minibatches.entries():
                losses = gradients(minibatch)
                optimizer.step()

        Args:
            batch: ``[T]`` or ``[*B, T]``.
            **networks: see :meth:`tensors`.

        Raises:
            UsageError: no loss depends on a parameter that requires gradients.
        """
        for parameter in self.parameters():
            parameter.grad = None
        with span(FORWARD):
            losses = self.tensors(batch, **networks)
        with span(BACKWARD):
            total_of(losses).backward()
        return {name: loss.detach() for name, loss in losses.items()}

    def make_value_estimator(self, value_type: ValueEstimators | str | None = None, **hyperparameters: Any) -> Self:
        """Choose the value estimator of the loss, and return the loss.

        Args:
            value_type: an estimator, such as ``ValueEstimators.TDLambda`` or ``"tdlambda"``; None for the default.
            **hyperparameters: hyperparameters of the estimator, such as ``gamma`` and ``lmbda``.

        Raises:
            ArgumentError: the loss has no such estimator, or a hyperparameter is out of range.
            ArgumentTypeError: the estimator has no such hyperparameter.
        """
        raise NotImplementedError

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the losses; called in recurrent mode."""
        raise NotImplementedError

    def explain(self) -> Explanation:
        """Explain in which form the networks run."""
        raise NotImplementedError


def total_of(losses: Mapping[NestedKey, Tensor]) -> Tensor:
    """Return the sum of those losses that have gradients.

    Raises:
        UsageError: none has.
    """
    differentiable = [loss for loss in losses.values() if loss.requires_grad]
    if not differentiable:
        raise UsageError(
            f"A loss must depend on a parameter that requires gradients, but none of {[*losses]} does: call it outside "
            "torch.no_grad(), and leave at least one parameter unfrozen. The losses alone are those of loss(batch)."
        )
    return cast(Tensor, sum(differentiable))


def without_padding(batch: Step, keys: Iterable[NestedKey]) -> Step:
    """Return a copy of a masked ``batch`` with the floating-point entries ``keys`` set to zero at padding.

    Excluding padding from a mean is not enough: its zero gradient times a non-finite value would be NaN.
    """
    padding, clean = ~per_token(MASK, batch.get(MASK), batch.batch_size), batch.copy()
    for key in keys:
        value = batch.get(key, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            clean.set(key, value.masked_fill(padding.reshape(*padding.shape, *(1,) * (value.ndim - padding.ndim)), 0.0))
    return clean


def entry(tensordict: Step, key: NestedKey, advice: str) -> Tensor:
    """Return the entry ``key``, or raise a MissingKeyError whose message ends with ``advice``."""
    value = tensordict.get(key, None)
    if value is None:
        found = sorted(str(path[0] if len(path) == 1 else path) for path, _ in leaves(tensordict))
        raise MissingKeyError(f"The batch needs an entry {key!r}, but has {found}. {advice}")
    return cast(Tensor, value)


def check_network(name: str, network: object, wrapper: str) -> None:
    """Raise ArgumentTypeError if ``network``, called ``name`` in the message, doesn't run on a TensorDict."""
    if not isinstance(network, TensorDictModuleBase):
        raise ArgumentTypeError(
            f"{name} must read and write a TensorDict, got {type(network).__name__}: wrap it in a {wrapper}."
        )


def check_writes(name: str, network: TensorDictModuleBase, key: NestedKey) -> None:
    """Raise ArgumentError if ``network``, called ``name`` in the message, doesn't write ``key``.

    Not to be called in a constructor, since :meth:`set_keys` may rename the key afterwards.
    """
    if key not in set(map(normalize_key, network.out_keys)):
        raise ArgumentError(
            f"{name} must write {key!r}, but its out_keys are {network.out_keys}: rename the output, or call set_keys "
            "of the loss or estimator."
        )


def states_of(*modules: TensorDictModuleBase) -> list[NestedKey]:
    """Return the keys of the recurrent states of ``modules``, which are read at the root and written under ``"next"``.

    Args:
        *modules: TensorDict modules.
    """
    written = {normalize_key(key) for module in modules for key in module.out_keys}
    read = dict.fromkeys(normalize_key(key) for module in modules for key in module.in_keys)
    return [key for key in read if next_key(key) in written]


def per_token(key: NestedKey, value: Tensor, batch_shape: torch.Size) -> Tensor:
    """Return ``value``, whose shape is the batch shape with or without a trailing 1, without the trailing 1.

    Raises:
        ArgumentError: ``value`` has another shape.
    """
    if value.shape == batch_shape:
        return value
    if value.shape == (*batch_shape, 1):
        return value.squeeze(-1)
    raise ArgumentError(
        f"The entry {key!r} must have one number per token, shape {(*batch_shape, 1)}, got {tuple(value.shape)}."
    )


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of ``values`` ``[...]`` where ``mask``, bool ``[...]``, is true (everywhere if None)."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def standardized(values: Tensor, mask: Tensor | None) -> Tensor:
    """Standardize ``values`` ``[...]`` to mean 0 and (biased) standard deviation 1 over the valid tokens.

    See :func:`moments`. A single non-finite value makes all of them NaN.
    """
    if values.numel() == 0:
        return values
    mean, variance = moments([values], mask)[0]
    centred = values - mean if mask is None else torch.where(mask, values - mean, 0.0)
    return centred / variance.sqrt().clamp_min(1e-8)


def moments(entries: Sequence[Tensor], mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return mean and (biased) variance of each of ``entries``, ``[...]``, over the valid tokens.

    Inside :func:`~recurl.distributed.global_statistics`, the tokens of all ranks count.
    """
    own = [_moments(values, mask) for values in entries]
    if not is_global():
        return own
    count = entries[0].numel() if mask is None else mask.sum()
    _, means, variances = merge_moments(count, *(torch.stack(column) for column in zip(*own, strict=True)))
    return list(zip(means.unbind(), variances.unbind(), strict=True))


def _moments(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask is None:
        variance, mean = torch.var_mean(values, correction=0)
        return mean, variance
    mean = masked_mean(values, mask)
    return mean, masked_mean((values - mean).square(), mask)


def common_prefix(first: list[TensorDictModuleBase], second: list[TensorDictModuleBase]) -> int:
    """Return the number of leading modules that are the same objects in both lists."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a is not b:
            break
        length += 1
    return length
