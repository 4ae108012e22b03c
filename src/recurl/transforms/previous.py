"""Transforms that add the previous action and reward to the observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.keys import ACTION, PREVIOUS_ACTION, PREVIOUS_REWARD, REWARD, NestedKey
from recurl.core.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
    choice_counts,
)
from recurl.sequences.entries import Step, takes_entries
from recurl.transforms.base import Transform, fill_reset, makes_memory, reset_mask

_Encode: TypeAlias = Callable[[Tensor, int], Tensor]
"""Encoder of a leaf: maps values and their number of batch dimensions to ``[*B, width]``."""


class PreviousAction(Transform):
    """Transform that adds the previous action as an observation, ``"previous_action"``; zeros when an episode starts.

    Integers are encoded as concatenated one-hot vectors, and bits stay bits: int8 ``[*B, width]`` in {0, 1}. If any
    part of the action is real-valued, everything is float32. The leaves of a nested action are concatenated in the
    order of the spec. No discrete action is encoded as all zeros, so zeros mark the start.

    TorchRL has no equivalent transform.

    Args:
        action_spec: action spec of one environment, ``env.action_spec_unbatched``.
        out_key: name of the entry.

    Attributes:
        width: size of an encoded action.
        dtype: dtype of an encoded action.

    Raises:
        ArgumentTypeError: ``action_spec`` is not an action spec.
        ArgumentError: the environment already has an entry of this name.

    Example:
        >>> from recurl.envs import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> env = env.append_transform(PreviousAction(env.action_spec_unbatched))
        >>> env.reset()["previous_action"]
        tensor([0, 0], dtype=torch.int8)
        >>> step = env.rand_step()
        >>> bool((step["next", "previous_action"] == step["action"]).all())
        True
    """

    def __init__(self, action_spec: TensorSpec, out_key: str = PREVIOUS_ACTION) -> None:
        if not isinstance(action_spec, TensorSpec):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentTypeError(
                f"PreviousAction takes the action spec of one environment, env.action_spec_unbatched, got "
                f"{type(action_spec).__name__}."
            )
        self.out_key = out_key
        leaves = action_spec.items(True, True) if isinstance(action_spec, Composite) else [(None, action_spec)]
        encoders = [(key, *_encoder(spec)) for key, spec in leaves]
        self._leaves: list[tuple[NestedKey | None, _Encode]] = [(key, encode) for key, encode, _, _ in encoders]
        self.width = sum(width for _, _, width, _ in encoders)
        self.dtype = torch.float32 if any(real for *_, real in encoders) else torch.int8

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the encoded action: ``Binary``, or ``Unbounded`` if a part is real-valued."""
        shape, device = (*observation_spec.shape, self.width), observation_spec.device
        if self.dtype == torch.int8:
            return _with_entry(observation_spec, self.out_key, Binary(shape, device, self.dtype))
        return _with_entry(observation_spec, self.out_key, Unbounded(*shape, device=device, dtype=self.dtype))

    def encode(self, action: Any, batch_size: Sequence[int]) -> Tensor:
        """Encode an action as it appears in the next observation, ``[*B, width]``.

        Args:
            action: action ``[*B, ...]``, in any encoding that the environment accepts; a TensorDict if nested.
            batch_size: batch size ``[*B]``.

        Example:
            >>> from recurl.data import MultiCategorical
            >>> PreviousAction(MultiCategorical([2, 3])).encode(torch.tensor([[0, 1], [1, 2]]), [2])
            tensor([[1, 0, 0, 1, 0],
                    [0, 1, 0, 0, 1]], dtype=torch.int8)
        """
        dims = len(batch_size)
        found = [encode(action if key is None else action[key], dims) for key, encode in self._leaves]
        return (found[0] if len(found) == 1 else torch.cat(found, -1)).to(self.dtype, copy=True)

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask = reset_mask(tensordict)
        value = fill_reset(mask, 0, tensordict_reset, self.out_key, (self.width,), self.dtype)
        return tensordict_reset.set(self.out_key, value)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        return next_tensordict.set(self.out_key, self.encode(tensordict[ACTION], tensordict.batch_size))

    def __repr__(self) -> str:
        return f"PreviousAction(width={self.width}, dtype={self.dtype})"


class PreviousReward(Transform):
    """Transform that adds the previous reward as an observation, ``"previous_reward"``; 0 when an episode starts.

    The entry is float32 ``[*B, 1]``: the reward as returned by the environment, before any scaling by a trainer.

    TorchRL has no equivalent transform.

    Args:
        out_key: name of the entry.

    Raises:
        ArgumentError: the environment already has an entry of this name.

    Example:
        >>> from recurl.envs import GymEnv
        >>> env = GymEnv("CartPole-v1").append_transform(PreviousReward())
        >>> env.rollout(3)["previous_reward"].squeeze(-1)
        tensor([0., 1., 1.])
    """

    def __init__(self, out_key: str = PREVIOUS_REWARD) -> None:
        self.out_key = out_key

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the reward."""
        spec = Unbounded(*observation_spec.shape, 1, device=observation_spec.device, dtype=torch.float32)
        return _with_entry(observation_spec, self.out_key, spec)

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask = reset_mask(tensordict)
        value = fill_reset(mask, 0.0, tensordict_reset, self.out_key, (1,), torch.float32)
        return tensordict_reset.set(self.out_key, value)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        reward = next_tensordict.get(REWARD, None)
        if reward is None:
            raise MissingKeyError("PreviousReward needs the reward of the step, which the environment did not return.")
        return next_tensordict.set(self.out_key, reward.to(torch.float32, copy=True))


def _with_entry(observation_spec: Composite, key: str, entry: TensorSpec) -> Composite:
    if key in observation_spec:
        raise ArgumentError(f"The environment already has an entry {key!r}: choose another name with out_key=...")
    spec = observation_spec.clone()
    spec.set(key, entry)
    return spec


def _encoder(spec: TensorSpec) -> tuple[_Encode, int, bool]:
    """Return the encoder of a leaf, its width, and whether it is real-valued."""
    if isinstance(spec, OneHot | Categorical | MultiCategorical):
        counts = choice_counts(spec)
        return _one_hot(counts, len(spec.shape) - isinstance(spec, OneHot)), sum(counts), False
    if isinstance(spec, Binary | Bounded | Unbounded):
        return _flat, spec.shape.numel(), not isinstance(spec, Binary)
    raise ArgumentTypeError(f"PreviousAction can't encode actions of {spec}: use another action spec.")


def _flat(value: Tensor, dims: int) -> Tensor:
    return value.flatten(dims) if value.ndim > dims else value.unsqueeze(-1)


def _one_hot(sizes: Sequence[int], ndim: int) -> _Encode:
    """Return the encoder of ``ndim``-dimensional integers, the i-th below ``sizes[i]``; one-hot input is accepted."""
    counts = torch.tensor(sizes)
    which = torch.arange(len(sizes)).repeat_interleave(counts)
    numbers = torch.cat([torch.arange(size) for size in sizes])
    tables = {which.device: (which, numbers)}  # cached, because a copy at every step would wait for the device

    def encode(value: Tensor, dims: int) -> Tensor:
        if value.ndim != dims + ndim:  # already one-hot
            return _flat(value, dims)
        if value.device not in tables:
            tables[value.device] = which.to(value.device), numbers.to(value.device)
        owners, levels = tables[value.device]
        return _flat(value, dims).index_select(-1, owners) == levels

    return encode
