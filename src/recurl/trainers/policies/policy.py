"""Step-by-step inference with a trained policy on NumPy arrays."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingArgumentError, NonFiniteError, UsageError
from recurl.core.keys import ACTION_MASK, IS_INIT, PREVIOUS_ACTION, PREVIOUS_REWARD, dotted
from recurl.core.ranges import checked_seed
from recurl.core.seeding import derive_seed
from recurl.core.specs import choice_counts, rows_without_choice
from recurl.envs import PreviousAction
from recurl.envs.gym_spaces import value_at
from recurl.trainers.policies.compiled_policy import CompiledPolicy
from recurl.trainers.policies.converter import Batch, Converter
from recurl.trainers.policies.steps import Entry, PolicyStep, Tensors

PolicyState: TypeAlias = dict[str, NDArray[Any]]
"""State that a policy carries between steps: hidden states and, if the policy reads it, the previous action."""


class Policy:
    """A trained policy that acts one step at a time; returned by :func:`recurl.load`.

    Args:
        step: the step function of the policy.
        converter: converts observations and actions.
        name: source of the policy, for messages.

    Attributes:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
    """

    def __init__(self, step: PolicyStep, converter: Converter, name: str) -> None:
        self.observation_space: gym.Space[Any] = converter.observation_space
        self.action_space: gym.Space[Any] = converter.action_space
        self._step = step
        self._converter = converter
        self._name = name
        self._rng_state: Tensor | None = None
        self._previous = PreviousAction(converter.action_spec) if PREVIOUS_ACTION in step.reads else None
        carried = [*step.states, *(key for key in (PREVIOUS_ACTION,) if key in step.reads)]
        self._carried = {dotted(key): (key, step.reads[key]) for key in carried}

    def predict(
        self,
        observation: Any,
        state: Mapping[str, NDArray[Any]] | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
        *,
        reward: Any = None,
        action_mask: Any = None,
    ) -> tuple[Any, PolicyState]:
        """Choose the action of one step.

        Args:
            observation: one observation, or a batch of them as returned by a vector environment. The number of
                dimensions determines which.
            state: the state returned by the previous call; None if all episodes begin.
            episode_start: whether the observation is the first of an episode, a bool, or ``[n]`` for a batch. The state
                is reset there. None if no episode begins.
            deterministic: choose the greedy action. Otherwise act as in training: sample from the distribution, or
                explore (DQN and R2D2: with the checkpoint's probability of a random action); see :meth:`set_seed`.
            reward: reward of the previous action, a number or ``[n]``. Required by policies trained with the previous
                reward and ignored by others.
            action_mask: allowed actions, bool or 0 and 1, for a policy trained with masks; by default the observation's
                entry ``action_mask``.

        Returns:
            The action, as ``env.step`` expects it, and the new state. The state's arrays are copies, which may be
            edited, pickled and saved. The argument ``state`` is not modified.

        Raises:
            ArgumentError: an argument has another shape or dtype, or belongs to another batch or policy.
            ArgumentTypeError: ``state`` is not a mapping.
            MissingArgumentError: the policy reads the reward or the mask, and it isn't given.
            NonFiniteError: an observation or a reward isn't finite.
            UnsupportedError: ``deterministic=False`` for an exported file.
            UsageError: a mask allows no action.
        """
        batch, entries = self._converter.observe(observation)
        rows = batch[0] if batch else 1
        start = _episode_starts(state, episode_start, batch)
        entries[IS_INIT] = torch.from_numpy(start).unsqueeze(-1)
        entries |= self._carry(state, batch, start)
        if PREVIOUS_REWARD in self._step.reads:
            entries[PREVIOUS_REWARD] = self._reward_entry(reward, batch, start)
        if ACTION_MASK in self._step.reads:
            mask = value_at(observation, self._converter.mask_path) if action_mask is None else action_mask
            entries[ACTION_MASK] = self._mask_entry(mask, batch)
        elif action_mask is not None:
            raise ArgumentError(f"action_mask= is for a policy that was trained with masks, and {self._name} was not.")
        with self._seeded_sampling(deterministic):
            action, after = self._step(entries, rows, deterministic=deterministic)
        if self._previous is not None:
            after[PREVIOUS_ACTION] = self._previous.encode(action, [rows])
        return self._converter.act(action, batch), {
            name: np.array(after[key].numpy() if batch else after[key][0].numpy())
            for name, (key, _) in self._carried.items()
        }

    def compiled(self) -> CompiledPolicy:
        """Return the greedy policy for one environment, compiled to one call of the C++ library.

        Raises:
            UnsupportedError: the policy can't be compiled; the message states the reason.
        """
        return CompiledPolicy(self._step, self._converter)

    def set_seed(self, seed: int) -> None:
        """Seed the sampling of ``deterministic=False``, which afterwards no longer uses torch's global generator.

        Raises:
            ArgumentError: ``seed`` is negative or not an integer.
        """
        self._rng_state = torch.Generator().manual_seed(derive_seed(checked_seed(seed), "actions")).get_state()

    @contextmanager
    def _seeded_sampling(self, deterministic: bool) -> Generator[None]:
        if deterministic or self._rng_state is None:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._rng_state)
        try:
            yield
            self._rng_state = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)

    def _carry(self, state: Mapping[str, NDArray[Any]] | None, batch: Batch, start: NDArray[np.bool_]) -> Tensors:
        """Return the carried entries; the previous action is zero where an episode begins."""
        rows = len(start)
        if state is None:
            return {key: torch.zeros(rows, *entry.shape, dtype=entry.dtype) for key, entry in self._carried.values()}
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
            raise ArgumentTypeError(
                f"state must be a state returned by predict, or None where episodes begin, got {type(state).__name__}."
            )
        if state.keys() != self._carried.keys():
            raise ArgumentError(
                f"state must be a state returned by predict of the same policy, with "
                f"{list(self._carried) or 'no entries'}, got {list(state) or 'no entries'}."
            )
        entries = {key: _tensor(state[name], batch, entry, name) for name, (key, entry) in self._carried.items()}
        if PREVIOUS_ACTION in entries and start.any():
            entries[PREVIOUS_ACTION][torch.from_numpy(start)] = 0
        return entries

    def _reward_entry(self, reward: Any, batch: Batch, start: NDArray[np.bool_]) -> Tensor:
        """Return the previous reward, zero where an episode begins."""
        entry = self._step.reads[PREVIOUS_REWARD]
        if reward is None:
            if not start.all():
                raise MissingArgumentError(
                    f"{self._name} reads the previous reward: pass the one from env.step, predict(..., reward=reward)."
                )
            return torch.zeros(len(start), *entry.shape, dtype=entry.dtype)
        found = np.asarray(reward)
        if found.shape != batch or found.dtype.kind not in "fiub":
            wanted = f"numbers of shape {list(batch)}" if batch else "a number"
            raise ArgumentError(f"reward must be {wanted}, got {found.dtype} of shape {list(found.shape)}.")
        found = np.where(start, 0, found)
        if not np.isfinite(found).all():
            raise NonFiniteError(f"reward must be finite, got {found}.")
        return torch.from_numpy(found).to(entry.dtype).reshape(len(start), *entry.shape)

    def _mask_entry(self, mask: Any, batch: Batch) -> Tensor:
        if mask is None:
            raise MissingArgumentError(
                f"{self._name} was trained with action masks: pass the mask of this step, "
                "predict(..., action_mask=info['action_mask'])."
            )
        allowed = self._converter.mask(mask, batch)
        empty = rows_without_choice(allowed, choice_counts(self._converter.action_spec)).nonzero()[:, 0].tolist()
        if empty:
            where = f" in rows {empty}" if batch else ""
            raise UsageError(f"action_mask must allow at least one action, but allows none{where}.")
        return allowed

    def __repr__(self) -> str:
        return f"Policy({self._name}, {self.observation_space} -> {self.action_space})"


def _episode_starts(state: object, episode_start: Any, batch: Batch) -> NDArray[np.bool_]:
    """Return the rows in which an episode begins, ``[n]``."""
    rows = batch[0] if batch else 1
    if state is None:
        return np.ones(rows, np.bool_)
    if episode_start is None:
        return np.zeros(rows, np.bool_)
    found = np.asarray(episode_start)
    if found.shape not in ({batch, (rows,)}) or not np.isin(found, (0, 1)).all():
        raise ArgumentError(
            f"episode_start must be {f'bools of shape {list(batch)}' if batch else 'a bool'}, got {found.dtype} of "
            f"shape {list(found.shape)}."
        )
    return found.astype(np.bool_).reshape(rows)


def _tensor(value: Any, batch: Batch, entry: Entry, name: str) -> Tensor:
    """Return an entry of the state as a new tensor, ``[n, ...]``."""
    found = np.asarray(value)
    expected = (*batch, *entry.shape)
    if found.shape != expected:
        of = f"a batch of {batch[0]}" if batch else "one environment"
        raise ArgumentError(
            f"The state of {of} must hold {name} of shape {list(expected)}, got {list(found.shape)}: pass the state "
            "that belongs to these observations, or None where episodes begin."
        )
    tensor = torch.from_numpy(np.array(found)).to(entry.dtype)
    return tensor if batch else tensor.unsqueeze(0)
