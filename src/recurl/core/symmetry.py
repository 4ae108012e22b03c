"""Symmetries of environments: transformations of observations and actions that change neither dynamics nor rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.keys import ACTION, ACTION_MASK, PREVIOUS_ACTION, NestedKey, is_within, normalize_key
from recurl.core.specs import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded

__all__ = ["SignedPermutation", "Symmetry", "Transformation", "number_of_choices"]

Transformation: TypeAlias = Callable[[Tensor], Tensor]
"""Function from values ``[..., *shape]`` to transformed values of the same shape and dtype."""
_LIKE_ACTIONS = (PREVIOUS_ACTION, ACTION_MASK)


class SignedPermutation:
    """Transformation of vectors ``[..., n]`` that permutes their components and changes signs.

    Component ``i`` of the result is ``signs[i] * value[order[i]]``.

    Args:
        signs: n numbers, each 1 or -1.
        order: the component that each component of the result is taken from; by default the same.

    Raises:
        ArgumentError: a sign is neither 1 nor -1, ``order`` isn't a permutation of 0, ..., n - 1; or, when called, the
            last dimension isn't n, or negative signs meet a dtype without negative numbers.

    Example:
        >>> SignedPermutation([1, 1, -1], order=[1, 0, 2])(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[ 2.,  1., -3.]])
    """

    def __init__(self, signs: Sequence[float], order: Sequence[int] | None = None) -> None:
        self.signs = [float(sign) for sign in signs]
        if not self.signs or any(sign not in (1.0, -1.0) for sign in self.signs):
            raise ArgumentError(f"Signs must be 1 or -1, one for each component, got {list(signs)}.")
        self.order = list(range(len(self.signs))) if order is None else [int(place) for place in order]
        if sorted(self.order) != list(range(len(self.signs))):
            raise ArgumentError(
                f"The order must be a permutation of 0 to {len(self.signs) - 1}, one for each of the signs, got "
                f"{list(order or ())}."
            )
        self._negates = -1.0 in self.signs
        self._permutes = self.order != list(range(len(self.order)))
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}  # a copy would wait

    def __call__(self, value: Tensor) -> Tensor:
        """Transform ``value``, ``[..., n]``."""
        if value.ndim == 0 or value.shape[-1] != len(self.signs):
            raise ArgumentError(
                f"A signed permutation of {len(self.signs)} components takes values [..., {len(self.signs)}], got "
                f"{list(value.shape)}."
            )
        if self._negates and value.dtype in (torch.bool, torch.uint8):
            raise ArgumentError(f"Negative signs need a dtype with negative numbers, got {value.dtype}.")
        kind = value.device, value.dtype
        if kind not in self._tensors:
            signs = torch.tensor(self.signs, dtype=torch.float64).to(value.dtype)
            self._tensors[kind] = signs.to(value.device), torch.tensor(self.order, device=value.device)
        signs, order = self._tensors[kind]
        moved = value.index_select(-1, order) if self._permutes else value
        return moved * signs if self._negates else moved

    def __repr__(self) -> str:
        return f"SignedPermutation({[int(sign) for sign in self.signs]}, order={self.order})"


class Symmetry:
    """A symmetry of an environment: if a policy acts in a transformed episode, nothing but the transformation differs.

    Args:
        observations: transformation of each observation that changes, by key; others stay as they are. The previous
            action and the action mask are transformed like the action unless they are named.
        action: transformation of the action, if it changes: of real numbers ``[..., *shape]``, or, for n choices, of a
            vector of one number for each choice, such as their probabilities, ``[..., n]``.

    Example:
        >>> from recurl.objectives import SignedPermutation
        >>> flip = SignedPermutation([-1, -1])
        >>> mirror = Symmetry({"observation": flip}, action=SignedPermutation([1, 1], order=[1, 0]))
        >>> mirror.transform("observation", torch.tensor([0.5, 2.0]))
        tensor([-0.5000, -2.0000])
        >>> mirror.action(torch.tensor([0.25, 0.75]))
        tensor([0.7500, 0.2500])
    """

    def __init__(self, observations: Mapping[NestedKey, Transformation], action: Transformation | None = None) -> None:
        functions = [*observations.values(), *([] if action is None else [action])]
        wrong = next((function for function in functions if not callable(function)), None)
        if wrong is not None:
            raise ArgumentTypeError(
                f"A symmetry takes transformations, functions of a tensor such as SignedPermutation, got {wrong!r}."
            )
        self.observations = {normalize_key(key): function for key, function in observations.items()}
        self._action = action

    def action(self, value: Tensor) -> Tensor:
        """Transform actions, or one number for each of n choices, ``[..., n]``."""
        return value if self._action is None else self._action(value)

    def transform(self, key: NestedKey, value: Tensor) -> Tensor:
        """Transform the observation ``key``, ``[..., *shape]``."""
        if key in self.observations:
            return self.observations[key](value)
        if key in _LIKE_ACTIONS and self._action is not None:
            whole = not value.is_floating_point()
            return self._action(value.float()).to(value.dtype) if whole else self._action(value)
        return value

    def without(self, names: Iterable[NestedKey]) -> Symmetry:
        """Return this symmetry for an environment that lacks some observations; nested keys may have dots."""
        dropped = list(names)
        kept = {key: function for key, function in self.observations.items() if not is_within(key, dropped)}
        return Symmetry(kept, self._action)

    def check(self, observation_spec: Composite, action_spec: TensorSpec) -> None:
        """Check that this may be a symmetry of an environment.

        Args:
            observation_spec: spec of its observations, ``[*B]``.
            action_spec: spec of the action of one environment.

        Raises:
            ArgumentError: there is no such observation; a result has another shape or dtype; or an action leaves the
                range of actions, or choices aren't permuted.
            UnsupportedError: the action is neither a tensor of real numbers nor one choice.
        """
        lead = len(observation_spec.shape)
        leaves = dict(observation_spec.items(include_nested=True, leaves_only=True))
        for key in self.observations:
            if key not in leaves:
                raise ArgumentError(f"The symmetry transforms {key!r}, but the observations are {list(leaves)}.")
            leaf = leaves[key]
            values = torch.ones(2, *leaf.shape[lead:], dtype=leaf.dtype)
            _check_result(key, values, self.transform(key, values))
        choices = number_of_choices(action_spec)
        if choices is not None:
            values = torch.eye(choices)
            found = self.action(values)
            _check_result(ACTION, values, found)
            if not torch.equal(found.sort(-1).values, values.sort(-1).values) or (found.sum(0) != 1).any():
                raise ArgumentError(f"The symmetry must permute the {choices} choices, but maps them to {found}.")
            return
        values = torch.ones(2, *action_spec.shape, dtype=action_spec.dtype)
        _check_result(ACTION, values, self.action(values))
        if isinstance(action_spec, Bounded):
            low, high = (bound.cpu().expand(action_spec.shape) for bound in (action_spec.low, action_spec.high))
            one, other = self.action(low), self.action(high)
            if not (torch.allclose(torch.minimum(one, other), low) and torch.allclose(torch.maximum(one, other), high)):
                raise ArgumentError(
                    f"The symmetry must map the range of actions to itself, but maps {low.tolist()} and "
                    f"{high.tolist()} to {one.tolist()} and {other.tolist()}."
                )


def number_of_choices(action_spec: TensorSpec) -> int | None:
    """Return the number of choices of a discrete action, or None for real numbers.

    Raises:
        UnsupportedError: the action is of another kind.
    """
    if isinstance(action_spec, Categorical | OneHot) and (isinstance(action_spec, OneHot) or not action_spec.shape):
        return int(action_spec.n)
    real = action_spec.dtype is not None and action_spec.dtype.is_floating_point
    if isinstance(action_spec, Bounded | Unbounded) and real:
        return None
    raise UnsupportedError(
        f"A symmetry is of an action that is one choice or a tensor of real numbers, got {action_spec}."
    )


def _check_result(key: NestedKey, value: Tensor, found: object) -> None:
    if not isinstance(found, Tensor) or found.shape != value.shape or found.dtype != value.dtype:
        got = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise ArgumentError(
            f"The symmetry must keep shape and dtype of {key!r}, {list(value.shape)} {value.dtype}, got {got}."
        )
