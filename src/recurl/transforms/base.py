"""Base class of transforms, and their composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from tensordict import TensorDictBase

from recurl.errors import ArgumentTypeError, UnsupportedError
from recurl.keys import RESET, NestedKey
from recurl.lowering import Step, takes_entries
from recurl.specs import Composite

__all__ = [
    "Compose",
    "Constant",
    "Transform",
    "constants_of",
    "fill_reset",
    "keeps_memory",
    "makes_memory",
    "merge_reset",
    "reset_mask",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_MAKES_MEMORY = "_recurl_makes_memory"


def makes_memory(function: _F) -> _F:
    """Mark ``_reset`` or ``_step`` as returning new tensors that are never written to again.

    The result of an unmarked method of an environment or transform is copied, as it may be a buffer that is overwritten
    at every step. An override of a marked method needs a mark of its own.
    """
    setattr(function, _MAKES_MEMORY, True)
    return function


def keeps_memory(instance: object) -> bool:
    """Return whether the results of ``_reset`` and ``_step`` of an environment or transform must be copied."""
    methods = ("_reset", "_step")
    own = [getattr(getattr(type(instance), name), _MAKES_MEMORY, False) for name in methods]
    return not all(own) or any(name in vars(instance) for name in methods)


class Constant(NamedTuple):
    """An entry that a transform sets to one value in all rows that are reset, and to another after every step.

    Attributes:
        key: key of the entry.
        at_reset: the value in rows that are reset.
        after_step: the value under ``next``; None for what the policy wrote there.
    """

    key: NestedKey
    at_reset: float
    after_step: float | None


class Transform:
    """Base class of transforms, which change the specs of an environment and the entries of resets and steps.

    A transform holds no state of the environment (all state is in the TensorDict), so one instance may be used in
    several environments. Every hook is the identity unless overridden. Iterating over a transform yields its parts: a
    single transform yields itself.

    The results of the hooks are copied, unless the hooks are marked with :func:`makes_memory`.
    """

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the observation spec (its shape is the environment's batch size) with the entries added here."""
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Return the spec of the entries that a step reads besides the action."""
        return state_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Return the reward spec."""
        return reward_spec

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Return the spec of ``done``, ``terminated`` and ``truncated``."""
        return done_spec

    # Overrides receive TensorDicts; those marked with ``takes_entries`` may receive any ``Step``.

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        """Return the root after a reset.

        Args:
            tensordict: argument of ``reset``, with its mask under ``"_reset"`` (see :func:`reset_mask`), or None.
            tensordict_reset: root after the reset; rows that were not reset keep their values.
        """
        return tensordict_reset

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        """Return the ``next`` of a step.

        Args:
            tensordict: root that was stepped.
            next_tensordict: ``next`` as the environment and earlier transforms have filled it.
        """
        return next_tensordict

    def constants(self) -> Sequence[Constant] | None:
        """Return the entries that the hooks set, if each is a constant, or None if the hooks do anything else.

        A collector then sets them itself, in the memory of a batch. A class that overrides ``_reset`` or ``_step`` must
        override this method too for it to count.
        """
        return ()

    def forward(self, tensordict: TensorDictBase) -> NoReturn:
        """Raise UnsupportedError: a transform acts inside an environment only.

        Raises:
            UnsupportedError: always.
        """
        name = type(self).__name__
        raise UnsupportedError(
            f"{name} acts inside an environment of recurl.envs only: use TransformedEnv(env, {name}(...)). TorchRL's "
            "environments take TorchRL's transforms; prepare policies for them with recurl.interop.for_torchrl(policy)."
        )

    __call__ = forward

    def __iter__(self) -> Iterator[Transform]:
        yield self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Compose(Transform):
    """Sequence of transforms, applied in order.

    Args:
        *transforms: the transforms; a nested Compose is flattened.

    Raises:
        ArgumentTypeError: an argument is not a transform.

    Example:
        >>> from recurl.transforms import InitTracker, StepCounter
        >>> [type(t).__name__ for t in Compose(InitTracker(), StepCounter())]
        ['InitTracker', 'StepCounter']
    """

    def __init__(self, *transforms: Transform) -> None:
        self._parts: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    @property
    def transforms(self) -> list[Transform]:
        """The transforms, in order."""
        return list(self._parts)

    def append(self, transform: Transform) -> None:
        """Add ``transform`` at the end."""
        if not isinstance(transform, Transform):  # type: ignore[reportUnnecessaryIsInstance] # users
            kind = transform if isinstance(transform, type) else type(transform)
            raise ArgumentTypeError(
                f"A Transform instance is needed, got {'the class' if kind is transform else 'an instance of'} "
                f"{kind.__module__}.{kind.__name__}. Modules of recurl.modules create primers of recurl, unless "
                "recurl.interop.for_torchrl has prepared them for TorchRL."
            )
        self._parts.extend(transform)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec after all transforms."""
        for part in self._parts:
            observation_spec = part.transform_observation_spec(observation_spec)
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Return the spec after all transforms."""
        for part in self._parts:
            state_spec = part.transform_state_spec(state_spec)
        return state_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Return the spec after all transforms."""
        for part in self._parts:
            reward_spec = part.transform_reward_spec(reward_spec)
        return reward_spec

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Return the spec after all transforms."""
        for part in self._parts:
            done_spec = part.transform_done_spec(done_spec)
        return done_spec

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        for part in self._parts:
            tensordict_reset = part._reset(tensordict, tensordict_reset)
        return tensordict_reset

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        for part in self._parts:
            next_tensordict = part._step(tensordict, next_tensordict)
        return next_tensordict

    def __iter__(self) -> Iterator[Transform]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Transform:
        return self._parts[index]

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._parts))})"


def constants_of(transform: Transform) -> Sequence[Constant] | None:
    """Return :meth:`Transform.constants`; None too where a class overrides the hooks alone.

    Example:
        >>> from recurl.transforms import InitTracker, RewardSum
        >>> constants_of(InitTracker())
        [Constant(key='is_init', at_reset=True, after_step=False)]
        >>> print(constants_of(RewardSum()))
        None
    """
    names = {"_reset", "_step", "constants"}
    owner = next(cls for cls in type(transform).__mro__ if names & vars(cls).keys())
    return transform.constants() if "constants" in vars(owner) else None


def reset_mask(tensordict: Step | None) -> torch.Tensor | None:
    """Return the mask of the rows to reset, bool ``[*B, 1]``, or None for all rows."""
    if tensordict is None or RESET not in tensordict:
        return None
    mask = tensordict[RESET]
    return mask.unsqueeze(-1) if mask.ndim == tensordict.ndim else mask


def merge_reset(mask: torch.Tensor | None, fresh: torch.Tensor, tensordict: Step, key: NestedKey) -> torch.Tensor:
    """Return ``fresh`` in the rows of ``mask`` and the value of ``key`` in ``tensordict`` elsewhere.

    If ``tensordict`` lacks ``key``, all rows are ``fresh``.

    Args:
        mask: rows to reset, bool ``[*B, 1]``; None for all rows.
        fresh: new values, ``[*B, ...]``.
        tensordict: root before the reset.
        key: key of the entry.
    """
    if mask is None or key not in tensordict:
        return fresh
    return torch.where(_expand_mask(mask, fresh, tensordict), fresh, tensordict[key])


def fill_reset(
    mask: torch.Tensor | None,
    value: float,
    tensordict: Step,
    key: NestedKey,
    shape: Sequence[int],
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return ``value`` in the rows of ``mask`` and the value of ``key`` in ``tensordict`` elsewhere.

    If ``tensordict`` lacks ``key``, all rows are ``value``.

    Args:
        mask: rows to reset, bool ``[*B, 1]``; None for all rows.
        value: constant of the rows that are reset.
        tensordict: root before the reset.
        key: key of the entry.
        shape: shape of the entry after the batch dimensions.
        dtype: dtype of the entry.
    """
    if mask is None or key not in tensordict:
        return torch.full((*tensordict.batch_size, *shape), value, dtype=dtype, device=tensordict.device)
    old = tensordict[key]
    return old.masked_fill(_expand_mask(mask, old, tensordict), value)


def _expand_mask(mask: torch.Tensor, value: torch.Tensor, tensordict: Step) -> torch.Tensor:
    """Return ``mask`` with as many dimensions as ``value``."""
    if mask.ndim == value.ndim:
        return mask
    return mask.view((*tensordict.batch_size, *(1,) * (value.ndim - tensordict.ndim)))
