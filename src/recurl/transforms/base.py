"""Base class of transforms, and composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError
from recurl.core.keys import RESET, NestedKey, normalize_key
from recurl.core.specs import Composite
from recurl.sequences.entries import Step, takes_entries

__all__ = [
    "HOOKS",
    "Compose",
    "Constant",
    "Transform",
    "constants_of",
    "fill_reset",
    "makes_memory",
    "merge_reset",
    "needs_copy",
    "reset_mask",
    "rewrites",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_MAKES_MEMORY = "_recurl_makes_memory"
HOOKS = ("_reset", "_step", "_call", "_apply_transform")
"""Names of the hooks that run at resets and steps."""
_ACTION_ADVICE = (
    "actions stay as the policy chose them: convert them in the environment, for instance with "
    "gymnasium.wrappers.TransformAction"
)
_SPEC_ADVICE = "override transform_observation_spec, transform_state_spec, transform_reward_spec or transform_done_spec"
_STATE_ADVICE = "keep the state of a transform in the TensorDict, as an entry that _reset sets and _step updates"
_UNUSED_HOOKS = {
    "_inv_call": _ACTION_ADVICE,
    "_inv_apply_transform": _ACTION_ADVICE,
    "inv": _ACTION_ADVICE,
    "transform_action_spec": _ACTION_ADVICE,
    "transform_input_spec": _SPEC_ADVICE,
    "transform_output_spec": _SPEC_ADVICE,
    "transform_env_batch_size": _SPEC_ADVICE,
    "transform_env_device": _SPEC_ADVICE,
    "_reset_env_preprocess": "override _reset, which gets the argument of the reset and its result",
    "_reset_func": "override _reset, which gets the argument of the reset and its result",
    "reset": "override _reset, which gets the argument of the reset and its result",
    "step": "override _step, which gets the root that was stepped and the result of the step",
    "init": _STATE_ADVICE,
}
"""Methods of TorchRL's transforms that recurl never calls, and their replacements."""


_NO_MODULE = "a transform isn't a torch.nn.Module: assign tensors and modules, on the environment's device"
_NO_PARENT = (
    "a transform doesn't know its environment: the specs are the arguments of transform_observation_spec and others, "
    "and the batch size and device those of the TensorDict"
)
_ABSENT_ATTRIBUTES = {
    **dict.fromkeys(("parent", "container"), _NO_PARENT),
    **dict.fromkeys(
        ("register_buffer", "register_parameter", "to", "state_dict", "load_state_dict", "parameters", "buffers"),
        _NO_MODULE,
    ),
}
"""Attributes of TorchRL's transforms that recurl's lack, and what to write instead."""


def makes_memory(function: _F) -> _F:
    """Mark ``_reset`` or ``_step`` as returning new tensors that are never written to again.

    The result of an unmarked method of an environment or transform is copied, because it may be a buffer that is
    overwritten at every step. An override of a marked method must be marked again.
    """
    setattr(function, _MAKES_MEMORY, True)
    return function


def needs_copy(instance: object) -> bool:
    """Return whether the results of an environment's or transform's ``_reset`` and ``_step`` must be copied."""
    methods = [name for name in HOOKS if hasattr(type(instance), name)]
    own = [getattr(getattr(type(instance), name), _MAKES_MEMORY, False) for name in methods]
    return not all(own) or any(name in vars(instance) for name in methods)


def rewrites(transform: Transform) -> bool:
    """Return whether a transform has hooks that compute entries from other entries and ignore the reset mask."""
    return any(getattr(type(transform), name) is not getattr(Transform, name) for name in ("_call", "_apply_transform"))


class Constant(NamedTuple):
    """Entry that a transform sets to one constant in rows that are reset, and to another after every step.

    Attributes:
        key: key of the entry.
        at_reset: value in rows that are reset.
        after_step: value under ``next``; None keeps the value written by the policy.
    """

    key: NestedKey
    at_reset: float
    after_step: float | None


class Transform:
    """Base class of transforms, which change an environment's specs and the entries of its resets and steps.

    A transform holds no environment state (all state is in the TensorDict), so one instance may be used in several
    environments. Every hook is the identity unless overridden. Iterating over a transform yields its parts; a single
    transform yields itself.

    A subclass overrides the spec methods for the entries that it changes, and one of

    * :meth:`_apply_transform`, a function of one tensor, applied to each of ``in_keys`` at resets and steps;
    * :meth:`_call`, a function of one TensorDict, and :meth:`_reset`, as in TorchRL: ``_call`` receives the ``next`` of
      every step, and ``_reset`` handles resets, usually with ``return self._call(tensordict_reset)``;
    * :meth:`_step` and :meth:`_reset`, which also receive the previous TensorDict.

    After a partial reset, the results of ``_call`` and ``_apply_transform`` are used only in the rows that were reset.
    Inverse transforms of actions are not supported. Defining a class with a TorchRL transform method that recurl never
    calls raises an error.

    The results of the hooks are copied, unless the hooks are marked with :func:`makes_memory`.

    Args:
        in_keys: entries that :meth:`_apply_transform` reads; a reward is read at steps only.
        out_keys: entries that :meth:`_apply_transform` writes; ``in_keys`` when None.
        in_keys_inv: must be empty, because recurl has no inverse transforms.
        out_keys_inv: likewise.

    Raises:
        ArgumentError: ``in_keys`` and ``out_keys`` differ in length.
        UnsupportedError: inverse keys are given, or a class is defined with a method that is never called.

    Example:
        >>> from recurl.envs import GymEnv, TransformedEnv
        >>> class Halved(Transform):
        ...     def _apply_transform(self, value):
        ...         return value / 2
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), Halved(in_keys=["reward"]))
        >>> env.rollout(3)["next", "reward"].squeeze(-1)
        tensor([0.5000, 0.5000, 0.5000])
    """

    in_keys: Sequence[NestedKey] = ()
    out_keys: Sequence[NestedKey] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reject a class with a hook that is never called."""
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            advice = _UNUSED_HOOKS.get(name)
            if advice is None and name.startswith("transform_") and name.endswith("_spec"):
                advice = None if hasattr(Transform, name) else _SPEC_ADVICE
            if advice is not None:
                raise UnsupportedError(f"{cls.__name__}.{name} would never be called by recurl: {advice}.")
        if cls._call is not Transform._call and Transform._reset is cls._reset and Transform._step is cls._step:
            raise UnsupportedError(
                f"{cls.__name__} overrides _call, which transforms the results of steps, and must also handle resets: "
                "define _reset(self, tensordict, tensordict_reset) too, returning self._call(tensordict_reset), or "
                "tensordict_reset if a reset needs no change, as for a reward."
            )

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
    ) -> None:
        if in_keys_inv or out_keys_inv:
            raise UnsupportedError(
                f"{type(self).__name__} got in_keys_inv={in_keys_inv} and out_keys_inv={out_keys_inv}, but recurl has "
                f"no inverse transforms: {_ACTION_ADVICE}."
            )
        self.in_keys = _keys("in_keys", in_keys)
        self.out_keys = self.in_keys if out_keys is None else _keys("out_keys", out_keys)
        if len(self.in_keys) != len(self.out_keys):
            raise ArgumentError(
                f"{type(self).__name__} needs one out_key for each in_key, got in_keys={self.in_keys} and "
                f"out_keys={self.out_keys}."
            )

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the observation spec (whose shape is the environment's batch size) with this transform's entries."""
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Return the spec of the entries other than the action that a step reads."""
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
        """Transform the root after a reset.

        Args:
            tensordict: argument of ``reset``, with its mask under ``"_reset"`` (see :func:`reset_mask`), or None.
            tensordict_reset: root after the reset; rows that were not reset keep their values.
        """
        return self._applied(tensordict_reset, at_step=False)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        """Transform the ``next`` of a step.

        Args:
            tensordict: root that was stepped.
            next_tensordict: ``next`` as the environment and earlier transforms have filled it.
        """
        return self._call(next_tensordict)

    @takes_entries
    @makes_memory
    def _call(self, next_tensordict: Any) -> Any:
        """Apply :meth:`_apply_transform` to each of ``in_keys`` in the ``next`` of a step.

        Args:
            next_tensordict: ``next`` as the environment and earlier transforms have filled it.
        """
        return self._applied(next_tensordict, at_step=True)

    @takes_entries
    @makes_memory
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value of an ``out_key`` given the value of its ``in_key``."""
        return value

    def _applied(self, tensordict: Step, *, at_step: bool) -> Step:
        """Transform the entries ``in_keys``. At a reset, some may be missing, such as the reward."""
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = tensordict.get(in_key, None)
            if value is not None:
                tensordict.set(out_key, self._apply_transform(value))
            elif at_step:
                raise MissingKeyError(f"{self!r} transforms the entry {in_key!r}, which the step did not return.")
        return tensordict

    def constants(self) -> Sequence[Constant] | None:
        """Return the entries that the hooks set, if all are constants, or None if the hooks do anything else.

        A collector then writes the constants into batch memory itself. This method is ignored if a subclass overrides
        one of the hooks without overriding this method too.
        """
        return ()

    def forward(self, tensordict: TensorDictBase) -> Any:
        """Raise UnsupportedError: a transform works only inside an environment, unless a subclass overrides this.

        Raises:
            UnsupportedError: always.
        """
        name = type(self).__name__
        raise UnsupportedError(
            f"{name} works only inside an environment of recurl.envs: use TransformedEnv(env, {name}(...)). TorchRL's "
            "environments take TorchRL's transforms; prepare policies for them with "
            "recurl.modules.interop.for_torchrl(policy)."
        )

    def __call__(self, tensordict: TensorDictBase) -> Any:
        """Call :meth:`forward`."""
        return self.forward(tensordict)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError for a name that is missing, with advice for those of TorchRL's transforms."""
            inherited = getattr(super(), "__getattr__", None)  # of a subclass that is a torch.nn.Module, too
            if inherited is not None:
                return inherited(name)
            advice = f": {_ABSENT_ATTRIBUTES[name]}." if name in _ABSENT_ATTRIBUTES else ""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=self)

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
        """Append ``transform``."""
        if not isinstance(transform, Transform):  # type: ignore[reportUnnecessaryIsInstance] # users
            kind = transform if isinstance(transform, type) else type(transform)
            raise ArgumentTypeError(
                f"A Transform instance is required, got {'the class' if kind is transform else 'an instance of'} "
                f"{kind.__module__}.{kind.__name__}. Modules of recurl.modules create recurl primers, unless "
                "recurl.modules.interop.for_torchrl has prepared them for TorchRL."
            )
        for part in transform:
            kind = type(part)
            applies = kind._apply_transform is not Transform._apply_transform and kind._call is Transform._call
            if applies and kind._step is Transform._step and not part.in_keys:
                raise ArgumentError(
                    f"{kind.__name__}._apply_transform is applied to the entries in_keys, which is empty: name the "
                    "entries, super().__init__(in_keys=['observation'])."
                )
            self._parts.append(part)

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
    """Return :meth:`Transform.constants`, or None if a subclass overrides hooks but not ``constants``.

    Example:
        >>> from recurl.transforms import InitTracker, RewardSum
        >>> constants_of(InitTracker())
        [Constant(key='is_init', at_reset=True, after_step=False)]
        >>> print(constants_of(RewardSum()))
        None
    """
    names = {*HOOKS, "constants"}
    owner = next(cls for cls in type(transform).__mro__ if names & vars(cls).keys())
    return transform.constants() if "constants" in vars(owner) else None


def _keys(name: str, keys: Any) -> list[NestedKey]:
    """Return keys as a list; reject a single string, which would be split into characters."""
    if isinstance(keys, str):
        raise ArgumentTypeError(f"{name} must be a list of keys, got {keys!r}: write [{keys!r}].")
    return [normalize_key(key) for key in keys or ()]


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
    """Return ``mask`` with the number of dimensions of ``value``."""
    if mask.ndim == value.ndim:
        return mask
    return mask.view((*tensordict.batch_size, *(1,) * (value.ndim - tensordict.ndim)))
