"""Environments of several agents, with every agent a row.

A recurrent network over agents must not confuse agents with time or with environments: each agent has its own memory,
which begins anew when its own episode does. Everything in recurl already treats rows that way, so the agents of
an environment are rows: ``n`` environments with ``A`` agents have batch size ``[n * A]``, and the row of agent ``a`` of
environment ``e`` is ``e * A + a``. A step of all rows is one step of the environments. What TorchRL stores at
``("agents", "observation")``, ``[n, A, ...]``, is the entry ``"observation"``, ``[n * A, ...]``. Collectors, modules,
advantages, losses and minibatches then need no special case: a policy shared by the agents runs all rows in one call.

* A row is ``done`` where the agent's own episode ends. Its next root is that of the agent's next episode, if the agent
  takes part again at once, or else a root of zeros that waits, with ``"agent_mask"`` False. The waiting ends, with
  ``done``, when the agent takes part again. Rows of agents that take no part are masked everywhere: collectors
  write ``("collector", "mask")`` from ``"agent_mask"``.
* An environment begins anew once none of its agents takes part.
* ``"state"``, for a central critic (MAPPO), is the concatenation of the observations of all agents of the environment,
  with zeros for agents that take no part.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from recurl.core.devices import checked_device
from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.core.keys import (
    ACTION,
    ACTION_MASK,
    AGENT_ID,
    AGENT_MASK,
    DONE,
    OBSERVATION,
    RESET,
    REWARD,
    STATE,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    dotted,
    normalize_key,
)
from recurl.core.seeding import preserved_rng
from recurl.core.specs import Binary, TensorSpec, choice_counts
from recurl.envs.base import EnvBase
from recurl.envs.device_actions import read_on_device
from recurl.envs.gym_spaces import ActionReader, ObservationReader, find_mask, missing_mask_error, without
from recurl.envs.tasks.dynamics import check_count, check_flag
from recurl.sequences.entries import Step, like, takes_entries

__all__ = ["AgentsReset", "AgentsStep", "MultiAgentEnv"]

Observed = Tensor | Mapping[NestedKey, Tensor]
"""Observations of all agents ``[n, A, ...]``: one tensor, or several by key."""
_Entries = dict[NestedKey, Tensor]
_FLAGS = ("active", "_present", "_ended", "_over", "_current", "_seed")  # what resets and steps change


class AgentsReset(NamedTuple):
    """State of all agents after a reset.

    Attributes:
        observation: observations of the agents, ``[n, A, ...]``.
        active: whether each agent takes part in the first step, bool ``[n, A]``; all do when None.
    """

    observation: Observed
    active: Tensor | None = None


class AgentsStep(NamedTuple):
    """Outcome of a step for all agents. Values of agents that took no part in the step are ignored.

    Attributes:
        observation: observations after the step, ``[n, A, ...]``; of an agent whose episode ended, the last one. All
            results may be memory that the next step overwrites.
        reward: rewards, ``[n, A]``.
        terminated: whether the episode of each agent terminated, bool ``[n, A]``, or ``[n]`` for all agents alike.
        truncated: likewise, whether it was cut off.
        active: whether each agent takes part in the next step, bool ``[n, A]``. By default those whose episodes go on.
            An environment without active agents begins anew.
        begins: observations of the agents that begin a new episode in a running environment, ``[n, A, ...]``;
            ``observation`` when None.
    """

    observation: Observed
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    active: Tensor | None = None
    begins: Observed | None = None


class MultiAgentEnv(EnvBase):
    """Base class of environments of several agents with equal spaces, of which every agent is a row.

    The batch size is ``[num_envs * n_agents]``, with the agents of an environment next to each other. All entries are
    those of an environment with one agent: ``"observation"``, ``"action"``, ``("next", "reward")``. One policy for all
    agents needs no changes; :class:`~recurl.modules.SeparateAgents` has one for each agent. Two entries are optional:

    * ``"agent_id"``, the one-hot index of the agent, float32 ``[n_agents]``,
    * ``"state"``, the observations of all agents, which a central critic reads (MAPPO):
      ``PPO(critic_observations=("state",), ...)``.

    If observations have a mask of the choices of a discrete action, it becomes the entry ``"action_mask"``, bool
    ``[choices]``, as in :class:`~recurl.envs.GymEnv`. It isn't part of ``"state"``, and allows everything in rows of
    absent agents.

    If agents may leave an environment that goes on, or return to it, the rows of absent agents have zeros, and
    ``"agent_mask"``, bool ``[1]``, is False there. Collectors and rollouts copy it to ``("collector", "mask")``, so
    losses, advantages and normalizations ignore these steps. A new episode of an agent begins with ``is_init`` in its
    row alone; a new environment in the rows of all of its agents.

    A subclass implements :meth:`_reset_envs` and :meth:`_step_envs`, which see all agents as ``[num_envs, n_agents]``.
    The attributes that it sets are the state of the running episodes (:meth:`get_state`).

    Args:
        agents: names of the agents.
        num_envs: number of environments, n.
        observation_space: Gymnasium space of the observations of one agent, the same for all; the entries of a ``Dict``
            keep their names.
        action_space: Gymnasium space of the actions of one agent, the same for all.
        agents_leave: whether agents may leave an environment that goes on, and return.
        action_mask: name of the action mask in the observation, of a ``Dict`` space (a nested key, or parts joined by
            dots). ``"action_mask"`` need not exist, any other name must. None: there is no mask.
        agent_ids: add ``"agent_id"``.
        return_state: add ``"state"``.
        device: device of all tensors; torch's default when None.

    Attributes:
        agents: names of the agents.
        num_envs: number of environments.
        n_agents: number of agents of each environment.
        active: whether each agent takes part in the next step, bool ``[num_envs, n_agents]``.
        readers: converters from NumPy observations to tensors, and from action tensors to NumPy.
        mask_path: path of the action mask in an observation; None if there is no mask.

    Raises:
        ArgumentError: there is no agent, or a name is given twice; ``num_envs`` is below 1, or a flag isn't a bool; an
            observation has the name of an optional entry, or isn't of numbers and ``return_state`` is set; a mask is
            named that isn't there, or the action has no choices; or, at a step, actions or results have wrong shapes, a
            mask has other values than 0 and 1, or an agent leaves whose episode hasn't ended.
        UsageError: some rows of a running environment are reset, but not all of its agents; or a mask allows no choice
            where an action is taken.

    Example:
        >>> import numpy as np
        >>> from gymnasium import spaces
        >>> from recurl.envs import AgentsReset, AgentsStep
        >>> class Counters(MultiAgentEnv):  # agent a counts to a + 2
        ...     def _reset_envs(self, envs, seed):
        ...         old = getattr(self, "count", torch.zeros(self.num_envs, self.n_agents))
        ...         self.count = torch.where(envs[:, None], 0.0, old)
        ...         return AgentsReset(self.count[..., None])
        ...     def _step_envs(self, actions):
        ...         self.count = self.count + self.active
        ...         ended = self.count >= torch.arange(self.n_agents) + 2
        ...         return AgentsStep(self.count[..., None], self.count, ended, torch.zeros_like(ended))
        >>> box, choice = spaces.Box(0, np.inf, (1,), np.float32), spaces.Discrete(2)
        >>> env = Counters(["a", "b"], 1, observation_space=box, action_space=choice, agents_leave=True)
        >>> steps = env.rollout(4, break_when_any_done=False)
        >>> steps["observation"].squeeze(-1)
        tensor([[0., 1., 0., 0.],
                [0., 1., 2., 0.]])
        >>> steps["collector", "mask"]
        tensor([[ True,  True, False,  True],
                [ True,  True,  True,  True]])
    """

    def __init__(
        self,
        agents: Sequence[str],
        num_envs: int,
        *,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        agents_leave: bool = False,
        action_mask: NestedKey | None = ACTION_MASK,
        agent_ids: bool = False,
        return_state: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        given = {*vars(self)}
        self.agents = list(agents)
        if not self.agents or len({*self.agents}) < len(self.agents):
            raise ArgumentError(f"An environment needs at least one agent, and different names, got {self.agents}.")
        self.num_envs, self.n_agents = check_count("num_envs", num_envs, minimum=1), len(self.agents)
        self.rows_per_env = self.n_agents
        self._agents_leave, self._seed = check_flag("agents_leave", agents_leave), cast("int | None", None)
        rows, name = num_envs * self.n_agents, type(self).__name__
        actions = ActionReader(action_space, [rows], True)
        self.mask_path = None if action_mask is None else _find_mask(observation_space, action_mask, actions.spec, name)
        masked = [] if self.mask_path is None else [ACTION_MASK]
        if self.mask_path is not None:
            observation_space = without(observation_space, self.mask_path)
        own = entries_of(observation_space).spaces
        self._own = ObservationReader(spaces.Dict(own), [rows], name)
        self._specs: dict[NestedKey, Any] = dict(self._own.spec.items(True, True))
        added: dict[str, gym.Space[Any]] = (
            {AGENT_ID: spaces.Discrete(self.n_agents)} if check_flag("agent_ids", agent_ids) else {}
        )
        if check_flag("return_state", return_state):
            numbers = self.n_agents * sum(self._size(key) for key in self._own.spec.keys(True, True))
            added[STATE] = spaces.Box(-np.inf, np.inf, (numbers,), np.float32)
        for key in (*added, AGENT_MASK, *masked):
            if key in own:
                raise ArgumentError(f"The observation {key!r} of {name} has the name of an optional entry: rename it.")
        self.readers = (
            ObservationReader(spaces.Dict({**own, **added}) if added else observation_space, [rows], name),
            actions,
        )
        spec = self.readers[0].spec.clone()
        for key in masked:
            self._specs[key] = Binary((sum(choice_counts(actions.spec)),), dtype=torch.bool)
            spec.set(key, self._specs[key])
        if agents_leave:
            spec.set(AGENT_MASK, Binary((1,), dtype=torch.bool))
        device = checked_device(device)
        super().__init__(observation_spec=spec, action_spec=self.readers[1].spec, batch_size=[rows], device=device)
        self._ids = torch.eye(self.n_agents, device=device).repeat(num_envs, 1) if agent_ids else None
        self._returns_state = return_state
        self._shape = (num_envs, self.n_agents)
        none = torch.zeros(self._shape, dtype=torch.bool, device=device)
        self.active = none  # agents that take part in the next step
        self._present = none  # rows whose root is that of an agent that takes part
        self._ended, self._over = none, none[:, 0]  # rows that the last step ended, and environments
        self._current: _Entries = {}  # observations from which agents act next
        self._tried, self._obstacle = False, cast("str | None", None)  # a trial of saved states, and its result
        self._fixed = {*vars(self), "_fixed", "full_resets"} - given

    def _size(self, key: NestedKey) -> int:
        spec: Any = self._own.spec[key]
        if not spec.dtype.is_floating_point:
            raise ArgumentError(
                f"return_state=True concatenates observations of floating-point numbers, but {dotted(key)!r} of "
                f"{type(self).__name__} is {spec.dtype}: convert it, or let the observation include a state."
            )
        return spec.shape.numel()

    # -- for subclasses to implement

    @abstractmethod
    def _reset_envs(self, envs: Tensor, seed: int | None) -> AgentsReset:
        """Reset the environments selected by ``envs``, bool ``[n]``, and return the state of all agents.

        Args:
            envs: which environments to reset. Values of the others are ignored.
            seed: seed of the random numbers, given with a reset of all environments after :meth:`set_seed`.
        """

    @abstractmethod
    def _step_envs(self, actions: Any) -> AgentsStep:
        """Step all environments.

        Args:
            actions: actions of all agents, a tensor ``[n, A, ...]``: integers, int64, or numbers; a dict or tuple of
                tensors for such a space. Those of agents that take no part (:attr:`active`) are arbitrary.
        """

    # -- rows

    @takes_entries
    def _reset(self, tensordict: Step | None) -> Step:
        mask = None if tensordict is None else tensordict.get(RESET, None)
        if mask is None:
            rows = torch.ones_like(self.active)
            self._begin(torch.ones_like(self._over))
        else:
            rows = mask.view(self._shape)
            self._check_began("partial reset")
            restart = self._to_restart(rows)
            if bool(restart.any()):
                self._begin(restart)
        self._present = torch.where(rows, self.active, self._present)
        self._ended = self._ended & ~rows
        entries = self._entries(self._current, self.active, self._current)
        return like(tensordict, entries, self.batch_size, self.device)

    def _check_began(self, what: str) -> None:
        if not self._current:
            raise UsageError(f"A {what} of {type(self).__name__} needs a reset of all rows first: call env.reset().")

    def _to_restart(self, rows: Tensor) -> Tensor:
        """Return the environments to begin anew, bool ``[n]``, if ``rows`` are reset."""
        others = self._present & ~self._ended & ~rows  # agents that go on
        cut = (rows & ~self._ended & self._present).any(-1)
        restart = (self._over & rows.any(-1)) | cut
        unfit = restart & (others.any(-1) | (self._over & ~rows.all(-1)))
        if bool(unfit.any()):
            raise UsageError(
                f"All agents of an environment begin anew together, but only some rows of the environments "
                f"{unfit.nonzero().flatten().tolist()} are reset: reset rows e * {self.n_agents} to "
                f"e * {self.n_agents} + {self.n_agents - 1} of environment e."
            )
        return restart

    def _begin(self, envs: Tensor) -> None:
        whole = bool(envs.all())
        seed, self._seed = (self._seed, None) if whole else (None, self._seed)
        observation, active = self._reset_envs(envs, seed)
        active = self._flags("active", torch.ones_like(self.active) if active is None else active)
        if not bool(active[envs].any(-1).all()):
            raise ArgumentError(f"An agent of every environment of {type(self).__name__} must be active after a reset.")
        fresh = self._read(observation)
        self.active = torch.where(envs.unsqueeze(-1), active, self.active)
        self._current = fresh if whole or not self._current else _where(envs, fresh, self._current)
        self._current = _where(self.active, self._current, None)
        self._over = self._over & ~envs

    @takes_entries
    def _step(self, tensordict: Step) -> Step:
        self._check_began("step")
        actions = read_on_device(self.readers[1].space, self.batch_size, tensordict[ACTION])
        outcome = self._step_envs(each_tensor(actions, lambda value: value.unflatten(0, self._shape)))
        present, name = self._present, type(self).__name__
        ends = {key: self._flags(key, value) for key, value in (("terminated", outcome[2]), ("truncated", outcome[3]))}
        terminated, truncated = ends["terminated"] & self.active, ends["truncated"] & self.active
        stays = self.active & ~(terminated | truncated)
        active = stays if outcome.active is None else self._flags("active", outcome.active)
        over = ~active.any(-1)
        if bool((stays & ~active).any()):
            raise ArgumentError(
                f"{name}: an agent that takes no part in the next step must be terminated or truncated, but agents "
                f"{self._named(stays & ~active)} are neither."
            )
        if not self._agents_leave and bool((~active & ~over.unsqueeze(-1)).any()):
            raise ArgumentError(
                f"{name} has agents_leave=False, but agents {self._named(~active & ~over.unsqueeze(-1))} left an "
                "environment that goes on: pass agents_leave=True."
            )
        seen = self._read(outcome.observation)
        last = _where(self.active, seen, None)
        begins = seen if outcome.begins is None else self._read(outcome.begins)
        goes_on = active & stays
        self._current = _where(active, _where(goes_on, last, begins), None)
        joins = ~present & (active | over.unsqueeze(-1))
        terminated, truncated = terminated & present, (truncated & present) | joins
        reward = torch.as_tensor(outcome.reward, device=self.device)
        if tuple(reward.shape) != self._shape:
            raise ArgumentError(f"The reward of {name} must have shape {list(self._shape)}, got {list(reward.shape)}.")
        shared = _where(over, last, self._current)
        entries = self._entries(_where(present, last, None), present, shared)
        entries[REWARD] = torch.where(present, reward, 0.0).to(torch.float32).reshape(-1, 1)
        done = terminated | truncated
        flags = {TERMINATED: terminated, TRUNCATED: truncated, DONE: done}
        entries |= {key: value.reshape(-1, 1) for key, value in flags.items()}
        self.active, self._ended, self._over = active, done, over
        return like(tensordict, entries, self.batch_size, self.device)

    def _flags(self, name: str, value: Any) -> Tensor:
        """Return flags ``[n]`` or ``[n, A]`` as ``[n, A]``, in memory that the environments don't write to."""
        flags = torch.as_tensor(value, device=self.device)
        wanted = [self._shape] if name == "active" else [self._shape, self._shape[:1]]
        if flags.dtype != torch.bool or tuple(flags.shape) not in wanted:
            raise ArgumentError(
                f"{name} of {type(self).__name__} must be bool of shape {' or '.join(str(list(s)) for s in wanted)}, "
                f"got {flags.dtype} of shape {list(flags.shape)}."
            )
        return (flags if flags.ndim == len(self._shape) else flags.unsqueeze(-1).expand(self._shape)).clone()

    def _named(self, flags: Tensor) -> list[str]:
        return [name for name, any_ in zip(self.agents, flags.any(0).tolist(), strict=True) if any_]

    def _read(self, observed: Observed) -> _Entries:
        """Return observations by key, ``[n, A, ...]``, checked."""
        given = {OBSERVATION: observed} if isinstance(observed, Tensor) else dict(observed)
        mask = None if self.mask_path is None else normalize_key(self.mask_path)
        found = {ACTION_MASK if key == mask else key: value for key, value in given.items()}
        if found.keys() != self._specs.keys():
            wanted = [mask if mask is not None and key == ACTION_MASK else key for key in self._specs]
            raise ArgumentTypeError(
                f"The observations of {type(self).__name__} must be {wanted}, as in its observation_space, got "
                f"{[*given]}."
            )
        for key, value in found.items():
            shape = (*self._shape, *self._specs[key].shape)
            if tuple(value.shape) != shape:
                raise ArgumentError(
                    f"The observation {dotted(key)!r} of {type(self).__name__} must have shape {list(shape)}, got "
                    f"{list(value.shape)}."
                )
        if mask is not None:
            _check_mask(found[ACTION_MASK], type(self).__name__)
        return {key: value.to(self.device, self._specs[key].dtype) for key, value in found.items()}

    def _entries(self, own: _Entries, present: Tensor, shared: _Entries) -> dict[Any, Tensor]:
        """Return the entries of all rows.

        Args:
            own: observations of the agent of each row, ``[n, A, ...]``.
            present: whether it takes part, bool ``[n, A]``.
            shared: observations of the agents as the other agents' states have them, ``[n, A, ...]``.
        """
        entries: dict[Any, Tensor] = {key: value.flatten(0, 1) for key, value in own.items()}
        if self.mask_path is not None:
            entries[ACTION_MASK] = entries[ACTION_MASK] | ~present.reshape(-1, 1)
        if self._ids is not None:
            entries[AGENT_ID] = self._ids
        if self._returns_state:
            entries[STATE] = self._all_observations(own, shared)
        if self._agents_leave:
            entries[AGENT_MASK] = present.reshape(-1, 1)
        return entries

    def _all_observations(self, own: _Entries, shared: _Entries) -> Tensor:
        """Return the observations of all agents, ``[n * A, A * size]``; in each row, its agent's are its own."""
        keys = [*self._own.spec.keys(True, True)]
        mine, all_ = (torch.cat([found[key].flatten(2) for key in keys], -1) for found in (own, shared))
        n, agents, size = mine.shape
        is_own = torch.eye(agents, dtype=torch.bool, device=mine.device)[:, :, None]
        state = torch.where(is_own, mine.unsqueeze(2), all_.unsqueeze(1))
        return state.reshape(n * agents, agents * size)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    # -- saved states

    _simulation: ClassVar[tuple[str, ...] | None] = None
    """Names of the attributes that hold the state of the environments; None: all that a subclass sets."""
    _trial_steps: ClassVar[int] = 20  # number of steps in the trial of a saved state

    @property
    def _names(self) -> list[str]:
        """Names of the attributes that resets and steps change."""
        own = self._simulation
        return [*_FLAGS, *([name for name in vars(self) if name not in self._fixed] if own is None else own)]

    def _simulators(self) -> Iterable[object]:
        """Return objects whose packages have the classes of what a state may contain."""
        return [self]

    def _trial_env(self) -> MultiAgentEnv:
        """Return environments like these, for a trial of their state."""
        return copy.deepcopy(self)

    @property
    def can_save_state(self) -> bool:
        """Whether the state of the running episodes can be saved; if not, :attr:`state_obstacle` gives the reason."""
        return self.state_obstacle is None

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state can't be saved; None if it can: a trial with two copies compares them once."""
        if not self._tried:
            from recurl.envs import state_trial  # noqa: PLC0415 - imported where it is used

            self._tried, self._obstacle = True, state_trial.obstacle(self._trial_env, self._trial_steps)
        return self._obstacle

    def get_state(self) -> dict[str, Any]:
        """Return the state of the running episodes, including random generators.

        It consists of the attributes of the environment: numbers, strings, arrays, tensors, containers, random
        generators, and objects of its package.

        Raises:
            UnsupportedError: the environment can't save its state.
        """
        from recurl.envs import multi_agent_state  # noqa: PLC0415 - as above

        if self._obstacle is None:
            return {"agents": multi_agent_state.save(self, self._names, self.num_envs), "shape": list(self._shape)}
        return super().get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`, on an environment constructed the same way.

        Raises:
            ArgumentError: the state is that of another environment.
        """
        from recurl.envs import multi_agent_state  # noqa: PLC0415 - as above

        if state.get("shape") != list(self._shape):
            found = f"{sorted(state)} of shape {state['shape']}" if "shape" in state else sorted(state)
            raise ArgumentError(f"{self!r} restores only states saved by equal environments, got {found}.")
        with preserved_rng():
            self.reset()  # creates what an environment creates at its first reset
        multi_agent_state.restore(self, self._names, self._simulators(), state["agents"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, agents={self.agents}, device={self.device})"


def _where(flags: Tensor, values: _Entries, others: _Entries | None) -> _Entries:
    """Return ``values`` where ``flags``, bool ``[n]`` or ``[n, A]``, is true, and ``others``, or zeros, elsewhere."""
    chosen: _Entries = {}
    for key, value in values.items():
        mask = flags.reshape(*flags.shape, *(1,) * (value.ndim - flags.ndim))
        chosen[key] = torch.where(mask, value, value.new_zeros(()) if others is None else others[key])
    return chosen


def each_tensor(actions: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of actions: one, or those in a dict or tuple."""
    if isinstance(actions, dict):
        parts = cast("dict[str, Any]", actions)
        return {name: each_tensor(part, function) for name, part in parts.items()}
    if isinstance(actions, tuple):
        return tuple(each_tensor(part, function) for part in cast("tuple[Any, ...]", actions))
    return function(actions)


def entries_of(space: gym.Space[Any]) -> spaces.Dict:
    """Return the space of an agent's observations as a ``Dict``, in which a single one is called ``"observation"``."""
    return space if isinstance(space, spaces.Dict) else spaces.Dict({OBSERVATION: space})


def _find_mask(space: gym.Space[Any], name: NestedKey, action: TensorSpec, owner: str) -> tuple[str, ...] | None:
    """Return the path of the action mask in observations, or None if there is none."""
    path = find_mask(space, name, action, owner)
    if path is None and normalize_key(name) != ACTION_MASK:
        raise missing_mask_error(name, space, {}, action, owner)
    return path


def _check_mask(mask: Tensor, owner: str) -> None:
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ArgumentError(f"The action mask of {owner} must hold zeros and ones, or bools, got {mask.dtype}.")


def check_equal_spaces(what: str, found: Mapping[str, gym.Space[Any]], advice: str) -> None:
    """Raise if the spaces of agents differ.

    Args:
        what: ``"observation"`` or ``"action"``.
        found: spaces by the name of the agent.
        advice: end of the message.

    Raises:
        ArgumentError: they differ.
    """
    first = next(iter(found.values()))
    if any(space != first for space in found.values()):
        raise ArgumentError(
            f"All agents must have the same {what} space, as they are rows of one batch, but they have "
            f"{', '.join(f'{space} ({name})' for name, space in found.items())}: {advice}."
        )
