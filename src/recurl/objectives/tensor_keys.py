"""Keys of the entries that losses and value estimators read and write, and their renaming."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from tensordict.nn import TensorDictModuleBase

from recurl.core.errors import ArgumentError
from recurl.core.keys import (
    ACTION,
    ADVANTAGE,
    DONE,
    REWARD,
    STATE_VALUE,
    TERMINATED,
    VALUE_TARGET,
    NestedKey,
    next_key,
    normalize_key,
)

__all__ = ["KeyedModule", "TensorKeys"]


@dataclass(frozen=True, kw_only=True)
class TensorKeys:
    """Keys of entries, by the names that ``set_keys`` accepts.

    Reward and flags are read under ``"next"``.

    Example:
        >>> TensorKeys(reward="score").of_sequences
        (('next', 'score'), ('next', 'done'), ('next', 'terminated'))
    """

    action: NestedKey = ACTION
    action_value: NestedKey = "action_value"
    advantage: NestedKey = ADVANTAGE
    done: NestedKey = DONE
    importance_weight: NestedKey = "importance_weight"
    priority: NestedKey = "td_error"
    priority_weight: NestedKey = "priority_weight"
    reward: NestedKey = REWARD
    sample_log_prob: NestedKey = "action_log_prob"
    state_action_value: NestedKey = "state_action_value"
    terminated: NestedKey = TERMINATED
    value: NestedKey = STATE_VALUE
    value_target: NestedKey = VALUE_TARGET

    @property
    def of_sequences(self) -> tuple[NestedKey, NestedKey, NestedKey]:
        """Keys of reward, done and terminated, under ``"next"``."""
        return next_key(self.reward), next_key(self.done), next_key(self.terminated)


class KeyedModule(TensorDictModuleBase):
    """Base class of losses and value estimators, with renamable entries.

    Subclasses list the entries that they read and write in ``accepted_keys``, look keys up in ``tensor_keys`` at every
    call, and return the keys determined by their networks from ``network_keys``.
    """

    accepted_keys: ClassVar[tuple[str, ...]] = ()
    """Names of the fields of :class:`TensorKeys` that :meth:`set_keys` accepts."""

    _renamed: Mapping[str, NestedKey] = MappingProxyType({})
    _cached_keys: TensorKeys | None = None

    def network_keys(self) -> dict[str, NestedKey]:
        """Return the keys determined by the networks; :meth:`set_keys` overrides them."""
        return {}

    @property
    def tensor_keys(self) -> TensorKeys:
        """Keys of the entries read and written."""
        return self._cached_keys or self._keys(self.network_keys())

    @contextmanager
    def cached_keys(self) -> Generator[None]:
        """Look the keys up once for a block of code in which neither networks nor keys change."""
        self._cached_keys = self._keys(self.network_keys())
        try:
            yield
        finally:  # never cached beyond the block, whatever other threads do
            self._cached_keys = None

    def _keys(self, decided: Mapping[str, NestedKey]) -> TensorKeys:
        """Return the keys: those ``decided`` by networks, overridden by :meth:`set_keys`."""
        changed = {**decided, **self._renamed}
        return replace(TensorKeys(), **changed) if changed else TensorKeys()

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Rename the entries read and written.

        Args:
            **keys: new keys by name, such as ``advantage="gain"``; None for the default. ``accepted_keys`` lists the
                names. Keys of recurrent states are set by their modules. ``"is_init"`` and the entries in
                ``"collector"`` have the same names throughout recurl.

        Raises:
            ArgumentError: this loss or estimator has no such entry.
        """
        unknown = sorted(set(keys) - set(self.accepted_keys))
        if unknown:
            raise ArgumentError(
                f"{type(self).__name__} has no entries named {unknown}: set_keys takes {sorted(self.accepted_keys)}."
            )
        changed = {name: key if key is None else normalize_key(key) for name, key in keys.items()}
        self._renamed = {name: key for name, key in {**self._renamed, **changed}.items() if key is not None}
