"""What every objective shares: recurrent mode, segments of a batch, and means over the tokens that count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl.entries import Entries, leaves
from recurl.errors import ArgumentError, MissingKeyError, UsageError
from recurl.keys import IS_INIT, MASK, STORED, NestedKey, next_key, normalize_key
from recurl.mode import set_recurrent_mode

__all__ = [
    "Batch",
    "LossModule",
    "check_states",
    "common_prefix",
    "entry",
    "from_entries",
    "masked_mean",
    "modules_in_order",
    "per_token",
    "standardized",
    "states_of",
    "subset",
    "without_padding",
]

Batch: TypeAlias = TensorDictBase | Entries

_SEQUENCE_FORWARDS = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)


class LossModule(TensorDictModuleBase):
    """Base of all losses: a module from a batch of sequences to a TensorDict of scalars.

    ``forward`` and ``tensors`` enter recurrent mode themselves, so recurrent modules read the batch as sequences (its
    last batch dimension is time) whatever the mode outside. They never write into the batch. Subclasses implement
    ``losses`` and set ``in_keys`` (all that is read: select these to keep minibatches small) and ``out_keys``.
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the losses of a batch ``[T]`` or ``[*B, T]``, not empty, as a TensorDict of scalars."""
        return TensorDict(self.tensors(tensordict), [])

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Return the same losses by name; the batch may also be ``Entries``, as ``SequenceMinibatches`` makes them."""
        if batch.batch_size.numel() == 0:
            raise ArgumentError(
                f"A loss is a mean over tokens, but the batch, of shape {list(batch.batch_size)}, has none: skip it."
            )
        if batch.get(MASK, None) is not None:
            batch = without_padding(batch, self.in_keys)
        with set_recurrent_mode(True):
            return self.losses(batch)

    def make_value_estimator(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise: there are no estimators inside losses."""
        raise UsageError(
            "There is no make_value_estimator(): advantages are computed before the loss, batch = GAE(gamma, lmbda, "
            "critic)(batch); gamma and n_steps are arguments of DQNLoss."
        )

    def set_keys(self, **keys: object) -> NoReturn:
        """Raise: the names of entries are fixed."""
        raise UsageError(
            "There is no set_keys(): the entries that are read, in in_keys, have the names that recurl writes. Rename "
            "those of a batch of your own: batch.rename_key_(old, new)."
        )

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the losses; called in recurrent mode."""
        raise NotImplementedError


def without_padding(batch: Batch, keys: Iterable[NestedKey]) -> Batch:
    """Return ``batch``, or where it has a mask a copy with zeros for the numbers among ``keys`` that don't count.

    To leave such tokens out of a mean is not enough: their gradient of zero times what isn't finite is NaN.
    """
    mask = batch.get(MASK, None)
    if mask is None:
        return batch
    padding, clean = ~per_token(MASK, mask, batch.batch_size), batch.copy()
    for key in keys:
        value = batch.get(key, None)
        if value is not None and value.is_floating_point():
            clean.set(key, value.masked_fill(padding.reshape(*padding.shape, *(1,) * (value.ndim - padding.ndim)), 0.0))
    return clean


def entry(tensordict: Batch, key: NestedKey, advice: str) -> Tensor:
    """Return the entry ``key``, or raise a MissingKeyError that ends with ``advice``."""
    value = tensordict.get(key, None)
    if value is None:
        found = sorted(str(path[0] if len(path) == 1 else path) for path, _ in leaves(tensordict))
        raise MissingKeyError(f"The batch needs an entry {key!r}, but has {found}. {advice}")
    return cast(Tensor, value)


def states_of(network: TensorDictModuleBase) -> list[NestedKey]:
    """Return the recurrent states of ``network``: what it reads at the root and writes under ``"next"``."""
    written = {normalize_key(key) for key in network.out_keys}
    return [key for key in map(normalize_key, network.in_keys) if next_key(key) in written]


def check_states(batch: Batch, states: Iterable[NestedKey]) -> None:
    """Refuse sequences that begin in the middle of episodes without the recurrent ``states`` to start from.

    Raises:
        MissingKeyError: ``batch`` was cut into sequences, by a buffer or by ``SequenceMinibatches``, and lacks a state.
    """
    missing = [key for key in states if batch.get(key, None) is None]
    if missing and batch.get((*STORED, IS_INIT), None) is not None:
        raise MissingKeyError(
            f"The sequences of this batch begin in the middle of episodes, but the states {missing} to start from are "
            "not in it, so a network would forget what came before. Keep them in the batch; those of a critic come "
            "from collection with it: Collector(env, TensorDictSequential(actor, critic), ...)."
        )


def per_token(key: NestedKey, value: Tensor, batch_shape: torch.Size) -> Tensor:
    """Return ``value``, of the batch shape with or without a trailing 1, without it.

    Raises:
        ArgumentError: another shape.
    """
    if value.shape == batch_shape:
        return value
    if value.shape == (*batch_shape, 1):
        return value.squeeze(-1)
    raise ArgumentError(
        f"The entry {key!r} must have one number per token, shape {(*batch_shape, 1)}, got {tuple(value.shape)}."
    )


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of ``values`` ``[...]`` where the bool ``mask`` ``[...]`` is true (everywhere without one), a scalar."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def standardized(values: Tensor, mask: Tensor | None) -> Tensor:
    """Shift and scale ``values`` ``[...]`` to mean 0 and (biased) standard deviation 1 over the tokens that count.

    One of these that isn't finite makes all of them NaN, for they share a mean.
    """
    if values.numel() == 0:
        return values
    if mask is None:
        variance, mean = torch.var_mean(values, correction=0)
        return (values - mean) / variance.sqrt().clamp_min(1e-8)
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return centred / masked_mean(centred.square(), mask).sqrt().clamp_min(1e-8)


def subset(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDict:
    """Return a new TensorDict with those of ``keys`` that exist.

    What a module writes into it, nested entries included, doesn't reach ``tensordict``; the tensors are shared.
    """
    entries = {key: value for key in keys if (value := tensordict.get(key, None)) is not None}
    return from_entries(cast(dict[NestedKey, Tensor], entries), tensordict.batch_size, tensordict.device)


def from_entries(
    entries: Mapping[NestedKey, Tensor], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Make a TensorDict of ``entries``, whose keys may be nested."""
    result = TensorDict({}, batch_size, device=device)
    for key, value in entries.items():
        result.set(key, value)
    return result


def modules_in_order(module: TensorDictModuleBase) -> list[TensorDictModuleBase]:
    """Return the modules that ``module`` runs one after the other, with nested sequences opened.

    A sequence that selects its outputs, has hooks, or overrides ``forward`` without declaring ``runs_in_order`` stays
    as it is.
    """
    if not isinstance(module, TensorDictSequential):
        return [module]
    in_order = type(module).forward in _SEQUENCE_FORWARDS or getattr(module, "runs_in_order", False)
    hooks = module._forward_hooks or module._forward_pre_hooks  # type: ignore[reportPrivateUsage] # torch has no other
    if not in_order or hooks or module.inplace is not None or module.out_keys != module.out_keys_source:
        return [module]
    return [leaf for child in cast(Any, module.module) for leaf in modules_in_order(child)]


def common_prefix(first: list[TensorDictModuleBase], second: list[TensorDictModuleBase]) -> int:
    """Return how many modules at the beginning of both lists are the same objects."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a is not b:
            break
        length += 1
    return length
