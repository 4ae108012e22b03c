"""A trained policy, one step at a time: NumPy in and out."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurl.envs import PreviousAction
from recurl.envs.gym_masks import value_at
from recurl.errors import ArgumentError, ArgumentTypeError, MissingArgumentError, NonFiniteError, UsageError
from recurl.keys import ACTION_MASK, IS_INIT, PREVIOUS_ACTION, PREVIOUS_REWARD, dotted
from recurl.ranges import checked_seed
from recurl.seeding import derive_seed
from recurl.specs import choice_counts, rows_without_choice
from recurl.trainers.policies.compiled_policy import CompiledPolicy
from recurl.trainers.policies.converter import Batch, Converter
from recurl.trainers.policies.steps import Entry, Step, Tensors

PolicyState: TypeAlias = dict[str, NDArray[Any]]
"""What a policy carries from step to step: hidden states and, if it reads it, the previous action."""


class Policy:
    """A trained policy that acts one step at a time, as :func:`recurl.load` returns it.

    Args:
        step: what computes a step.
        converter: what converts observations and actions.
        name: where it comes from, for messages.

    Attributes:
        observation_space: observations of one environment.
        action_space: actions of one environment.
    """

    def __init__(self, step: Step, converter: Converter, name: str) -> None:
        self.observation_space: gym.Space[Any] = converter.observation_space
        self.action_space: gym.Space[Any] = converter.action_space
        self._step = step
        self._converter = converter
        self._name = name
        self._random: Tensor | None = None
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
        """Choose the action of a step.

        Args:
            observation: one observation, or a batch of them as a vector environment returns it; the number of
                dimensions decides.
            state: what the last call returned; None where all episodes begin.
            episode_start: whether the observation is the first of an episode, bool, or ``[n]`` for a batch: there the
                state counts as fresh. None where no episode begins.
            deterministic: choose the best action. Otherwise act as in training: draw from the distribution, or explore
                (DQN and R2D2: with the checkpoint's probability of a random action); see :meth:`set_seed`.
            reward: what the last action was rewarded with, a number or ``[n]``; read by a policy that was trained with
                the previous reward, others leave it aside.
            action_mask: which actions are allowed, bool or 0 and 1, for a policy that was trained with masks; by
                default the entry ``action_mask`` of the observation.

        Returns:
            The action, as ``env.step`` takes it, and the new state, arrays of the program's own: they can be copied,
            edited, pickled and saved. ``state`` isn't changed.

        Raises:
            ArgumentError: an argument has another shape or dtype, or belongs to another batch or policy.
            ArgumentTypeError: ``state`` is no state.
            MissingArgumentError: the policy reads the reward or the mask, and it isn't given.
            NonFiniteError: an observation or a reward isn't finite.
            UnsupportedError: ``deterministic=False`` of an exported file.
            UsageError: a mask allows no action.
        """
        batch, entries = self._converter.observe(observation)
        rows = batch[0] if batch else 1
        start = _starts(state, episode_start, batch)
        entries[IS_INIT] = torch.from_numpy(start).unsqueeze(-1)
        entries |= self._stored(state, batch, start)
        if PREVIOUS_REWARD in self._step.reads:
            entries[PREVIOUS_REWARD] = self._rewarded(reward, batch, start)
        if ACTION_MASK in self._step.reads:
            mask = value_at(observation, self._converter.mask_path) if action_mask is None else action_mask
            entries[ACTION_MASK] = self._masked(mask, batch)
        elif action_mask is not None:
            raise ArgumentError(f"action_mask= is for a policy that was trained with masks, and {self._name} was not.")
        with self._drawing(deterministic):
            action, after = self._step(entries, rows, deterministic=deterministic)
        if self._previous is not None:
            after[PREVIOUS_ACTION] = self._previous.encode(action, [rows])
        return self._converter.act(action, batch), {
            name: np.array(after[key].numpy() if batch else after[key][0].numpy())
            for name, (key, _) in self._carried.items()
        }

    def compiled(self) -> CompiledPolicy:
        """Return the greedy policy of one environment as one call of the C++ library, arrays in and out.

        Raises:
            UnsupportedError: it can't be; the message says why.
        """
        return CompiledPolicy(self._step, self._converter)

    def set_seed(self, seed: int) -> None:
        """Seed the draws of ``deterministic=False``, which from now on leave torch's global generator alone.

        Raises:
            ArgumentError: ``seed`` is negative or not an integer.
        """
        self._random = torch.Generator().manual_seed(derive_seed(checked_seed(seed), "actions")).get_state()

    @contextmanager
    def _drawing(self, deterministic: bool) -> Generator[None]:
        if deterministic or self._random is None:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
            self._random = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)

    def _stored(self, state: Mapping[str, NDArray[Any]] | None, batch: Batch, start: NDArray[np.bool_]) -> Tensors:
        """Return the entries that the policy carries; the previous action is zero where an episode begins."""
        rows = len(start)
        if state is None:
            return {key: torch.zeros(rows, *entry.shape, dtype=entry.dtype) for key, entry in self._carried.values()}
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
            raise ArgumentTypeError(
                f"state must be what predict returned, or None where episodes begin, got {type(state).__name__}."
            )
        if state.keys() != self._carried.keys():
            raise ArgumentError(
                f"state must be what predict of the same policy returned, with {list(self._carried) or 'no entries'}, "
                f"got {list(state) or 'no entries'}."
            )
        entries = {key: _tensor(state[name], batch, entry, name) for name, (key, entry) in self._carried.items()}
        if PREVIOUS_ACTION in entries and start.any():
            entries[PREVIOUS_ACTION][torch.from_numpy(start)] = 0
        return entries

    def _rewarded(self, reward: Any, batch: Batch, start: NDArray[np.bool_]) -> Tensor:
        """Return the previous reward, zero where an episode begins."""
        entry = self._step.reads[PREVIOUS_REWARD]
        if reward is None:
            if not start.all():
                raise MissingArgumentError(
                    f"{self._name} reads the previous reward: give what env.step returned, predict(..., reward=reward)."
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

    def _masked(self, mask: Any, batch: Batch) -> Tensor:
        if mask is None:
            raise MissingArgumentError(
                f"{self._name} was trained with action masks: give the one of this step, "
                "predict(..., action_mask=info['action_mask'])."
            )
        allowed = self._converter.mask(mask, batch)
        empty = rows_without_choice(allowed, choice_counts(self._converter.action_spec)).nonzero()[:, 0].tolist()
        if empty:
            where = f" in rows {empty}" if batch else ""
            raise UsageError(f"action_mask must allow an action wherever one is to be taken, but allows none{where}.")
        return allowed

    def __repr__(self) -> str:
        return f"Policy({self._name}, {self.observation_space} -> {self.action_space})"


def _starts(state: object, episode_start: Any, batch: Batch) -> NDArray[np.bool_]:
    """Return where episodes begin, ``[n]``."""
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
            f"The state of {of} must hold {name} of shape {list(expected)}, got {list(found.shape)}: give the state "
            "that belongs to these observations, or None where episodes begin."
        )
    tensor = torch.from_numpy(np.array(found)).to(entry.dtype)
    return tensor if batch else tensor.unsqueeze(0)
