"""Recorded episodes: read from a folder or a Minari data set, checked, and played as environments."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from gymnasium import Space, spaces
from tensordict import TensorDict
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingDependencyError, UnsupportedError, UsageError
from recurl.core.keys import (
    ACTION,
    ACTION_MASK,
    DONE,
    DONE_KEYS,
    IS_INIT,
    NEXT,
    RESET,
    REWARD,
    TERMINATED,
    TRAJ_STEPS,
    TRUNCATED,
    NestedKey,
    dotted,
    next_key,
)
from recurl.core.messages import warn_once
from recurl.core.seeding import derive_seed
from recurl.core.specs import Categorical, Composite, TensorSpec
from recurl.data.replay_buffers.folders import load_folder
from recurl.data.replay_buffers.trajectories import below
from recurl.envs import EnvBase
from recurl.sequences.entries import Step, like, takes_entries
from recurl.sequences.index import SequenceIndex
from recurl.trainers.algorithms.environment import make_env, training_env, with_spaces
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.student import LABEL
from recurl.transforms import makes_memory

_MINARI = "minari:"
_INSTALL = "pip install 'minari[hdf5]'"


def recorded_env(config: RunConfig, source: str) -> EnvBase:
    """Return environments ``[num_envs]`` that play recorded episodes, with the inputs that the options add.

    Args:
        config: the options, whose environment determines the observations and the action.
        source: see :func:`read_episodes`.

    Raises:
        ArgumentError: see :func:`read_episodes`.
    """

    def create(config: RunConfig, num_envs: int) -> EnvBase:
        added = {"previous_action": False, "previous_reward": False, "observation_noise": 0.0, "observation_delay": 0}
        with make_env(replace(config.on_cpu(), **added), 1) as env:
            episodes, ends = read_episodes(source, env)
            spec = Composite(dict(_single(env.observation_spec)))
            return RecordedEnv(episodes, ends, spec, env.action_spec_unbatched, num_envs, config.device)

    return training_env(config, create=create)


class RecordedEnv(EnvBase):
    """Environments that play recorded episodes, whatever the actions, and show the recorded action of every step.

    Each row plays one episode after another, drawn at random. In place of the observation after an episode's last step,
    there is the one before it.

    Args:
        episodes: the steps of all episodes, one episode after another, ``[N]``: observations, :data:`LABEL`, and under
            ``"next"`` the reward and the done flags, ``[N, 1]``.
        ends: whether an episode ends with the step, bool ``[N]``.
        observation_spec: spec of the observations of one environment.
        action_spec: spec of its action.
        num_envs: number of rows.
        device: device of all tensors.
    """

    never_waits = True

    def __init__(
        self,
        episodes: TensorDict,
        ends: Tensor,
        observation_spec: Composite,
        action_spec: TensorSpec,
        num_envs: int,
        device: str,
    ) -> None:
        shown = observation_spec.clone()
        shown.set(LABEL, action_spec)
        super().__init__(observation_spec=shown, action_spec=action_spec, batch_size=[num_envs], device=device)
        self._shown = {key: episodes[key].to(self.device) for key in shown.keys(True, True)}
        self._outcomes = {key: episodes[next_key(key)].to(self.device) for key in (REWARD, *DONE_KEYS)}
        self._ends = ends.to(self.device)
        self._firsts = torch.cat((ends.new_ones(1), ends[:-1])).nonzero().squeeze(-1).to(self.device)
        self._generator = torch.Generator(self.device or "cpu")
        self._seed: int | None = None
        self._token: Tensor | None = None

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None) -> Step:
        mask = None if tensordict is None else tensordict.get(RESET, None)
        if mask is None and self._seed is not None:
            self._generator.manual_seed(derive_seed(self._seed, "RecordedEnv"))
            self._seed = None
        drawn = torch.rand(self.batch_size, dtype=torch.float64, generator=self._generator, device=self.device)
        first = self._firsts[below(len(self._firsts), drawn)]
        self._token = first if mask is None else torch.where(mask.view(self.batch_size), first, self._playing())
        return like(tensordict, self._observed(), self.batch_size, self.device)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step) -> Step:
        token = self._playing()
        outcomes = {key: value[token] for key, value in self._outcomes.items()}
        self._token = torch.where(self._ends[token], token, token + 1)
        return like(tensordict, {**self._observed(), **outcomes}, self.batch_size, self.device)

    def _observed(self) -> dict[Any, Tensor]:
        token = self._playing()
        return {key: value[token] for key, value in self._shown.items()}

    def _playing(self) -> Tensor:
        if self._token is None:
            raise UsageError("Recorded episodes have no state before the first reset: call env.reset() first.")
        return self._token

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def can_save_state(self) -> bool:
        """True: the state is the step that each row is at, and the random generator."""
        return True

    def get_state(self) -> dict[str, Any]:
        """Return the step that each row is at, the random generator, and the number of recorded steps.

        Raises:
            UsageError: called before the first reset.
        """
        steps, generator = self._playing().clone(), self._generator.get_state()
        return {"steps": steps, "generator": generator, "seed": self._seed, "recorded": len(self._ends)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`.

        Raises:
            ArgumentError: the episodes are others.
        """
        if state["recorded"] != len(self._ends):
            raise ArgumentError(
                f"A run goes on with the episodes that it began with, {state['recorded']} steps, got "
                f"{len(self._ends)}: restore them, or start a new run from this one with --init-from."
            )
        self._token = state["steps"].to(self.device, copy=True)
        self._generator.set_state(state["generator"].cpu())
        self._seed = state["seed"]


def read_episodes(source: str, env: EnvBase) -> tuple[TensorDict, Tensor]:
    """Read recorded episodes, as :class:`RecordedEnv` plays them.

    Args:
        source: ``minari:ID``, a Minari data set on this machine; or a folder with a memory-mapped TensorDict ``[N]`` or
            ``[*B, T]`` of whole episodes, as ``recurl evaluate --save-episodes``, or ``memmap`` of a rollout, writes
            it: observations, ``action``, and under ``"next"`` the flags ``done`` or ``terminated`` and ``truncated``,
            and possibly the ``reward``, which is 0 otherwise.
        env: an environment, which determines the observations and the action to read.

    Returns:
        The steps, ``[N]``, and whether an episode ends with each, bool ``[N]``.

    Raises:
        ArgumentError: there are no such episodes, they can't be read, or they don't fit the environment.
        MissingDependencyError: Minari isn't installed.
        UnsupportedError: the environment has no Gymnasium spaces to read a Minari data set with.
    """
    is_minari = source.startswith(_MINARI)
    data = _read_minari(source.removeprefix(_MINARI), env) if is_minari else _read_folder(source)
    if not data.batch_size.numel() or not data.batch_dims:
        raise ArgumentError(
            f"--episodes {source} has no episodes: it must hold steps, [N] or [*B, T], got shape "
            f"{list(data.batch_size)}."
        )
    flat, ends = _whole_episodes(data, source)
    has = ", ".join(dotted(key) for key in flat.keys(True, True) if key not in (ACTION, IS_INIT) and key[0] != NEXT)
    found: dict[NestedKey, Tensor] = {}
    for key, spec in _single(env.observation_spec):
        value = flat.get(key, None)
        if value is None:
            raise ArgumentError(
                f"The environment observes {dotted(key)}, which the episodes in {source} lack: they have {has}. Leave "
                f"it out with --drop-observations {dotted(key)}, or record episodes of this environment."
            )
        found[key] = _fitting(dotted(key), value, spec, source)
    if ACTION not in flat:
        raise ArgumentError(f"The episodes in {source} must have an action, which is what is learned: they have {has}.")
    found[LABEL] = _label(flat[ACTION], env.action_spec_unbatched, source)
    _check_allowed(found, env.action_spec_unbatched, source)
    for key in (REWARD, TERMINATED, TRUNCATED, DONE):
        found[next_key(key)] = flat[next_key(key)]
    steps = TensorDict({}, flat.batch_size)
    for key, value in found.items():
        steps.set(key, value)
    return steps, ends


def _read_folder(source: str) -> TensorDict:
    try:
        return load_folder(Path(source))[0]
    except ArgumentError as error:
        raise ArgumentError(f"--episodes {source} can't be read: {error}") from error


def _single(spec: Composite) -> Iterator[tuple[NestedKey, TensorSpec]]:
    """Yield the keys and the specs of the observations of one environment, given those of several, ``[*B]``."""
    for key, leaf in spec.items(include_nested=True, leaves_only=True):
        single = leaf.clone()
        single.shape = leaf.shape[len(spec.shape) :]
        yield key, single


def _whole_episodes(data: TensorDict, source: str) -> tuple[TensorDict, Tensor]:
    """Return the steps of whole episodes, flat ``[N]``, with reward and flags ``[N, 1]``, and where episodes end."""
    shape = data.batch_size
    given = {key: data.get((NEXT, key), None) for key in DONE_KEYS}
    flags = {key: _per_step(key, value, shape) != 0 for key, value in given.items() if value is not None}
    if not flags:
        raise ArgumentError(
            f"The episodes in {source} must have a flag under 'next' that is true at their last steps, 'done' or "
            "'terminated' and 'truncated': they have none."
        )
    done = torch.stack([*flags.values()]).any(0)
    index = SequenceIndex.of(data.select(IS_INIT, "collector", strict=False), done=done)
    terminated = flags.get(TERMINATED, torch.zeros_like(done)).reshape(-1) & index.ends
    reward = data.get((NEXT, REWARD), None)
    reward = torch.zeros(shape) if reward is None else _per_step(REWARD, reward, shape).float()
    flat = data.exclude(NEXT).reshape(-1)
    outcomes = {REWARD: reward.reshape(-1), TERMINATED: terminated, TRUNCATED: index.ends & ~terminated}
    for key, value in {**outcomes, DONE: index.ends}.items():
        flat.set(next_key(key), value.unsqueeze(-1))
    cut = index.starts & _goes_on(data)
    if not cut.any():
        return flat, index.ends
    kept = ~cut[index.start_index]
    if not kept.any():
        raise ArgumentError(
            f"The episodes in {source} all begin in the middle, where the memory of what was before is missing: record "
            "whole episodes, from their first steps."
        )
    warn_once(f"{int(cut.sum())} of the {int(index.num_segments)} episodes in {source} begin in the middle: left out.")
    return flat[kept], index.ends[kept]


def _goes_on(data: TensorDict) -> Tensor:
    """Return the steps that are known not to be the first of their episodes, bool ``[N]``."""
    shape, begins, steps = data.batch_size, data.get(IS_INIT, None), data.get(TRAJ_STEPS, None)
    if steps is not None:
        return _per_step("traj_steps", steps, shape).reshape(-1) > 0
    return torch.zeros(shape, dtype=torch.bool).reshape(-1) if begins is None else ~begins.reshape(-1).bool()


def _per_step(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    if value.shape not in (shape, torch.Size([*shape, 1])):
        raise ArgumentError(f"{name} of recorded episodes must have shape {list(shape)}, got {list(value.shape)}.")
    return value.reshape(shape)


def _fitting(name: str, value: Tensor, spec: TensorSpec, source: str) -> Tensor:
    """Return recorded values with the dtype of their spec."""
    shape, dtype = [len(value), *spec.shape], cast(torch.dtype, spec.dtype)
    if list(value.shape) != shape or not torch.can_cast(value.dtype, dtype):
        raise ArgumentError(
            f"The environment has {name} of shape {list(spec.shape)} and dtype {dtype}, and the episodes in {source} "
            f"have it of shape {list(value.shape[1:])} and dtype {value.dtype}: record episodes of this environment."
        )
    if not value.isfinite().all():
        raise ArgumentError(f"{name} must be finite in all steps, but isn't in {source}: leave these episodes out.")
    converted = value.to(dtype)
    if not dtype.is_floating_point and (converted != value).any():
        raise ArgumentError(
            f"{name} must be in the range of {dtype}, but isn't in {source}: record it with that dtype."
        )
    return converted


def _label(action: Any, spec: TensorSpec, source: str) -> Tensor:
    """Return recorded actions, which may be one-hot, as the policy takes them."""
    if not isinstance(action, Tensor) or isinstance(spec, Composite):
        raise UnsupportedError(f"Distillation needs actions of one part, got {spec}.")
    if isinstance(spec, Categorical) and not spec.shape and action.shape[1:] == (spec.n,):
        one = ((action == 0) | (action == 1)).all() and (action.sum(-1) == 1).all()
        action = action.argmax(-1) if one else action
    label = _fitting(ACTION, action, spec, source)
    if not spec.expand(len(label), *spec.shape).is_in(label):
        raise ArgumentError(
            f"The actions of the episodes in {source} must be in the environment's action space, {spec}, but are "
            f"from {label.min().item():g} to {label.max().item():g}: rescale them, or clip them to it."
        )
    return label


def _check_allowed(found: Mapping[NestedKey, Tensor], spec: TensorSpec, source: str) -> None:
    """Raise if a choice was made that its action mask doesn't allow."""
    mask, label = found.get(ACTION_MASK), found[LABEL]
    if mask is None or mask.dtype != torch.bool or not isinstance(spec, Categorical) or spec.shape:
        return
    wrong = ~mask.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    if wrong.any():
        raise ArgumentError(
            f"The action_mask of a step must allow its action, but doesn't in {int(wrong.sum())} steps of {source}: "
            "correct the masks, or ignore them with --action-mask none."
        )


def _read_minari(name: str, env: EnvBase) -> TensorDict:
    """Return the steps of a Minari data set, flat ``[N]``, as the environment's tensors."""
    try:
        minari: Any = importlib.import_module("minari")
    except ImportError as error:
        raise MissingDependencyError(f"--episodes {_MINARI}{name} needs Minari: {_INSTALL}") from error
    inner = with_spaces(env)
    if inner is None:
        raise UnsupportedError(
            f"--episodes {_MINARI}{name} needs an environment with Gymnasium spaces, got {env}: save the episodes as a "
            "memory-mapped TensorDict instead."
        )
    try:
        data_set = minari.load_dataset(name)
        episodes = list(data_set.iterate_episodes())
    except Exception as error:  # Minari raises anything, from FileNotFoundError to ImportError
        raise ArgumentError(
            f"--episodes {_MINARI}{name} can't be read, {type(error).__name__}: {error} (minari list local shows what "
            f"is there, minari download {name} gets it)"
        ) from error
    observations, actions = inner.readers
    parts: list[Any] = []
    for episode in episodes:
        steps = len(episode.rewards)
        part = TensorDict({IS_INIT: torch.arange(steps) == 0}, [steps])
        try:
            seen = observations.rebatched([steps + 1]).read(episode.observations)
        except ArgumentError as error:
            raise ArgumentError(
                f"--episodes {_MINARI}{name} has the observations {data_set.observation_space}, and the environment "
                f"{observations.space}: use the environment of the data set, or one like it."
            ) from error
        for key, value in seen.items():
            part.set(key, value[:-1])
        part.set(ACTION, _choices(episode.actions, actions.space))
        flags = {TERMINATED: episode.terminations, TRUNCATED: episode.truncations}
        for key, value in {REWARD: episode.rewards, **flags}.items():
            part.set((NEXT, key), torch.as_tensor(value))
        parts.append(part)
    return cast(TensorDict, torch.cat(parts)) if parts else TensorDict({}, [0])


def _choices(actions: Any, space: Space[Any]) -> Any:
    """Return Gymnasium actions as tensors, in which choices begin at 0."""
    if isinstance(actions, Mapping | tuple):
        raise UnsupportedError(f"Distillation needs actions of one part, got {space}.")
    start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
    return torch.as_tensor(actions - start)
