"""Greedy policies over action values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch.nn import functional as F

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import ACTION, OBSERVATION, NestedKey, normalize_key
from recurl.core.specs import Categorical, Composite, OneHot, TensorSpec
from recurl.sequences.entries import Step, StepT, takes_entries

__all__ = ["QValueActor", "QValueModule"]

_ACTION_VALUE = "action_value"
_CHOSEN = "chosen_action_value"
_SPACES = ("one_hot", "categorical")


class QValueModule(TensorDictModuleBase):
    """Greedy action selection: read the values of all actions, write the best action and its value.

    Ties are resolved in favor of the first action.

    Args:
        action_space: ``"one_hot"`` or ``"categorical"`` (``-`` and ``_`` are equivalent); inferred from ``spec`` if
            None.
        action_value_key: key of the values, ``[*B, n]``.
        out_keys: keys of the action, the values and the value of the action; by default ``"action"``,
            ``action_value_key`` and ``"chosen_action_value"``.
        spec: the action spec, ``OneHot`` or ``Categorical``. A ``Composite`` must contain the action's key.
        action_mask_key: key of the mask, ``[*B, n]``, nonzero where an action is allowed. The values of forbidden
            actions are written as -inf, and such actions are never chosen unless all are forbidden.

    Writes the action, int64 ``[*B, n]`` (one-hot) or ``[*B]`` (categorical), and its value, ``[*B, 1]``.

    Raises:
        ArgumentError: neither ``action_space`` nor ``spec`` is given, they contradict each other, or the space is
            neither of the two; there are not three ``out_keys``.
        MissingKeyError: when called, if the values or the mask are missing.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = QValueModule("categorical")(TensorDict({"action_value": torch.tensor([[0.0, 2.0, 1.0]])}, [1]))
        >>> td["action"], td["chosen_action_value"]
        (tensor([1]), tensor([[2.]]))
    """

    def __init__(
        self,
        action_space: str | None = None,
        action_value_key: NestedKey = _ACTION_VALUE,
        out_keys: Sequence[NestedKey] | None = None,
        spec: TensorSpec | None = None,
        action_mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        self.action_value_key = normalize_key(action_value_key)
        self.action_mask_key = None if action_mask_key is None else normalize_key(action_mask_key)
        keys = (
            [ACTION, self.action_value_key, _CHOSEN] if out_keys is None else [normalize_key(key) for key in out_keys]
        )
        if len(keys) != 3:
            raise ArgumentError(f"out_keys must name action, action values and chosen value, got {out_keys}.")
        self.action_key = keys[0]
        self.action_space = _space(action_space, spec, self.action_key)
        self.spec = spec
        self.in_keys = cast(Any, [self.action_value_key, *([self.action_mask_key] if self.action_mask_key else [])])
        self.out_keys = cast(Any, keys)

    @takes_entries
    def forward(self, tensordict: StepT) -> StepT:
        """Write the greedy action into ``tensordict`` and return it."""
        values = cast(Tensor | None, tensordict.get(self.action_value_key, None))
        if values is None:
            raise MissingKeyError(
                f"The entry {self.action_value_key!r} with the action values is missing; the entries are "
                f"{sorted(map(str, tensordict.keys()))}. Let the network write it, or set action_value_key."
            )
        if self.action_mask_key is not None:
            mask = mask_in(tensordict, self.action_mask_key, values.shape)
            values = values.masked_fill(~mask, -torch.inf)
        best = values.argmax(-1)
        action_key, values_key, chosen_key = self.out_keys
        tensordict.set(action_key, F.one_hot(best, values.shape[-1]) if self.action_space == "one_hot" else best)
        tensordict.set(values_key, values)
        return tensordict.set(chosen_key, values.gather(-1, best.unsqueeze(-1)))


class QValueActor(TensorDictSequential):
    """Greedy policy: a network that computes the value of every action, followed by the choice of the best one.

    Args:
        module: network ``[*B, F] -> [*B, n]``; or a TensorDict module, such as a sequence containing an LSTM, that
            writes ``action_value_key``.
        in_keys: entries that a plain network reads; ``["observation"]`` by default.
        spec: see :class:`QValueModule`.
        action_space: see :class:`QValueModule`.
        action_value_key: see :class:`QValueModule`.
        action_mask_key: see :class:`QValueModule`.

    For exploration, append an :class:`~recurl.modules.EGreedyModule`.

    Raises:
        ArgumentError: see :class:`QValueModule`; or ``in_keys`` is given for a TensorDict module, or such a module does
            not write ``action_value_key``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from recurl.modules import MLP
        >>> actor = QValueActor(MLP(4, 2), action_space="one-hot")
        >>> actor(TensorDict({"observation": torch.zeros(3, 4)}, [3]))["action"].shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        spec: TensorSpec | None = None,
        action_space: str | None = None,
        action_value_key: NestedKey = _ACTION_VALUE,
        action_mask_key: NestedKey | None = None,
    ) -> None:
        values_key = normalize_key(action_value_key)
        if not isinstance(module, TensorDictModuleBase):
            inputs = [OBSERVATION] if in_keys is None else [normalize_key(key) for key in in_keys]
            module = TensorDictModule(module, in_keys=cast(Any, inputs), out_keys=cast(Any, [values_key]))
        elif in_keys is not None:
            raise ArgumentError(f"A TensorDict module has its own in_keys, {module.in_keys}: leave in_keys out.")
        if values_key not in [normalize_key(key) for key in module.out_keys]:
            raise ArgumentError(f"The module must write {values_key!r}, but its out_keys are {module.out_keys}.")
        choice = QValueModule(action_space, values_key, spec=spec, action_mask_key=action_mask_key)
        super().__init__(module, choice)
        self.spec = spec
        self.action_space = choice.action_space
        self.action_value_key = values_key
        self.action_mask_key = choice.action_mask_key

    def select_subsequence(self, *args: Any, **kwargs: Any) -> TensorDictSequential:
        """Return the modules required by a subset of outputs, as a plain sequence; see tensordict's method."""
        return TensorDictSequential(*cast(Any, self.module)).select_subsequence(*args, **kwargs)


def _space(name: str | None, spec: TensorSpec | None, action_key: NestedKey) -> str:
    from_spec = None if spec is None else _SPACES[not action_choices(spec, action_key)[0]]
    space = from_spec if name is None else name.replace("-", "_")
    if space is None:
        raise ArgumentError(
            "Give the action_space, 'one_hot' or 'categorical', or the spec of the actions; got neither."
        )
    if space not in _SPACES:
        raise ArgumentError(f"action_space must be one of {', '.join(_SPACES)}, got {name!r}.")
    if from_spec not in (None, space):
        raise ArgumentError(
            f"action_space is {name!r}, but the spec's actions are {from_spec}: leave action_space out."
        )
    return space


def mask_in(tensordict: Step, key: NestedKey, shape: torch.Size) -> Tensor:
    """Return the action mask under ``key`` as bool, ``[*B, n]``.

    Raises:
        MissingKeyError: the mask is missing.
        ArgumentError: the mask has another shape.
    """
    mask = cast(Tensor | None, tensordict.get(key, None))
    if mask is None:
        raise MissingKeyError(
            f"The action mask {key!r} is missing; the entries are {sorted(map(str, tensordict.keys()))}. Let the "
            "environment write it, or leave action_mask_key out."
        )
    if mask.shape != shape:
        raise ArgumentError(f"The action mask {key!r} must have the shape {list(shape)}, got {list(mask.shape)}.")
    return mask.bool()


def action_choices(spec: TensorSpec, action_key: NestedKey) -> tuple[bool, int]:
    """Return whether actions are one-hot, and the number of actions.

    Args:
        spec: ``OneHot`` or ``Categorical``, or a ``Composite`` with such an entry.
        action_key: key of that entry.

    Raises:
        ArgumentError: the entry is missing, or of another kind.
    """
    leaf: object = spec.get(action_key) if isinstance(spec, Composite) else spec
    if not isinstance(leaf, OneHot | Categorical):
        found = f"nothing under {action_key!r}" if leaf is None else repr(leaf)
        raise ArgumentError(f"The action spec must be OneHot or Categorical, got {found}.")
    return isinstance(leaf, OneHot), leaf.n
