"""Environments with the parallel API of PettingZoo."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.core.importing import how_to_install, load_object
from recurl.core.keys import ACTION_MASK, OBSERVATION, NestedKey, normalize_key
from recurl.core.messages import nearest
from recurl.core.specs import choice_counts
from recurl.envs.gym_spaces import ActionReader, MaskReader, find_in_info, find_mask, missing_mask_error
from recurl.envs.multi_agent import AgentsReset, AgentsStep, MultiAgentEnv, check_equal_spaces, each_tensor, entries_of
from recurl.envs.tasks.dynamics import check_count

__all__ = ["PettingZooEnv"]

_EachEnv = Sequence[Mapping[Any, Any]]
_PROTOCOL = ("possible_agents", "observation_space", "action_space", "reset", "step")
_PAD = "wrap the environment, for instance with SuperSuit's pad_observations_v0 and pad_action_space_v0"
_CONVERT = (
    "name one with the parallel API, pass a function parallel_env, or convert the environment with "
    "pettingzoo.utils.conversions.aec_to_parallel, or turn_based_aec_to_parallel if agents take turns"
)


class PettingZooEnv(MultiAgentEnv):
    """Environments with PettingZoo's parallel API; every agent is a row.

    The batch size is ``[num_envs * n_agents]``; see :class:`~recurl.envs.MultiAgentEnv`. Rows are those of
    ``possible_agents``, which must have equal spaces. An agent that isn't in ``agents`` takes no part: its row waits,
    with ``"agent_mask"`` False, until it appears there, or until ``agents`` is empty and the environment begins anew.
    Agents may die, be truncated, appear and return singly. Observations, actions and action masks, in observations or
    in ``infos``, are converted as in :class:`~recurl.envs.GymEnv`. Where the mask of an agent allows nothing, the agent
    waits for its turn: all choices are allowed, and the environment must ignore them, as that of
    ``turn_based_aec_to_parallel`` does. Environment ``e`` gets the seed of its first row, ``seed + e * n_agents``.

    Args:
        task: function that creates a parallel environment, such as ``multiwalker_v9.parallel_env``; or the id of one of
            PettingZoo's, such as ``"sisl/multiwalker_v9"``, or the function as ``"module:function"``, such as
            ``"mpe2.simple_spread_v3:parallel_env"``; or, for one environment, the environment itself.
        num_envs: number of environments, stepped one after the other.
        agents_leave: whether agents may leave an environment that goes on, or appear in it. If not, there is no
            ``"agent_mask"``.
        action_mask: name of the action mask in the observation (of a ``Dict`` space; a nested key, or parts joined by
            dots) or in the agent's info. ``"action_mask"`` need not exist, any other name must. None: there is no mask.
        agent_ids: see :class:`~recurl.envs.MultiAgentEnv`.
        return_state: likewise.
        device: likewise.
        **kwargs: arguments of the function.

    Attributes:
        envs: the environments.

    Raises:
        MissingDependencyError: PettingZoo 1.27, for an id, or what the environment needs, is not installed.
        ArgumentTypeError: an environment doesn't have the parallel API.
        ArgumentError: there is no such environment, the agents have different spaces, or the function returns the same
            environment twice; or an agent that took part in a step has no observation, reward or flags, or one that
            takes part in the next step no observation.

    Example:
        >>> import numpy as np
        >>> from gymnasium import spaces
        >>> class Pair:  # of a cat, and of a mouse that escapes after two steps
        ...     possible_agents = ["cat", "mouse"]
        ...     def observation_space(self, agent):
        ...         return spaces.Box(0, np.inf, (1,), np.float32)
        ...     def action_space(self, agent):
        ...         return spaces.Discrete(2)
        ...     def reset(self, seed=None, options=None):
        ...         self.agents, self.count = ["cat", "mouse"], 0
        ...         return {agent: np.zeros(1, np.float32) for agent in self.agents}, {}
        ...     def step(self, actions):
        ...         self.count += 1
        ...         ends = {agent: self.count >= (2 if agent == "mouse" else 4) for agent in self.agents}
        ...         seen = {agent: np.full(1, self.count, np.float32) for agent in self.agents}
        ...         self.agents = [agent for agent in self.agents if not ends[agent]]
        ...         return seen, dict.fromkeys(ends, 1.0), ends, dict.fromkeys(ends, False), {}
        >>> env = PettingZooEnv(Pair)
        >>> env.rollout(5, break_when_any_done=False)["collector", "mask"]
        tensor([[ True,  True,  True,  True,  True],
                [ True,  True, False, False,  True]])
    """

    _simulation = ("envs",)

    def __init__(
        self,
        task: Callable[..., Any] | str | Any,
        num_envs: int = 1,
        *,
        agents_leave: bool = True,
        action_mask: NestedKey | None = ACTION_MASK,
        agent_ids: bool = False,
        return_state: bool = False,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        check_count("num_envs", num_envs, minimum=1)
        create = _named(task) if isinstance(task, str) else task
        is_env = not isinstance(create, type) and hasattr(create, "possible_agents")
        if not is_env and not callable(create):
            raise ArgumentTypeError(
                f"A task must be a function that creates an environment, or a name, got {_name(create)}: {_CONVERT}."
            )
        if is_env and (num_envs > 1 or kwargs):
            raise ArgumentError(
                f"Several environments, or arguments, need a function that creates an environment, got "
                f"{_name(create)} itself: pass the function, PettingZooEnv(lambda: ..., num_envs={num_envs})."
            )
        self.envs: list[Any] = [create] if is_env else [create(**kwargs) for _ in range(num_envs)]
        if len({*map(id, self.envs)}) < num_envs:
            raise ArgumentError("A function that creates an environment must create a new one at every call.")
        first = self.envs[0]
        _check_protocol(first)
        self._keys: list[Any] = list(first.possible_agents)
        agents = list(map(str, self._keys))
        observed = {name: first.observation_space(agent) for name, agent in zip(agents, self._keys, strict=True)}
        acting = {name: first.action_space(agent) for name, agent in zip(agents, self._keys, strict=True)}
        check_equal_spaces("observation", observed, _PAD)
        check_equal_spaces("action", acting, _PAD)
        self._options: dict[str, Any] = {
            "agents_leave": agents_leave,
            "action_mask": action_mask,
            "agent_ids": agent_ids,
            "return_state": return_state,
            "device": device,
        }
        options, space = {**self._options}, observed[agents[0]]
        self._action_reader = ActionReader(acting[agents[0]], [], True)
        in_info = None if action_mask is None else self._find_in_info(space, action_mask)
        if in_info is not None:
            options["action_mask"] = mask = ".".join(in_info)
            choices = spaces.MultiBinary(sum(choice_counts(self._action_reader.spec)))
            space = spaces.Dict({**entries_of(space).spaces, mask: choices})
        super().__init__(
            agents,
            num_envs,
            observation_space=space,
            action_space=acting[agents[0]],
            **options,
        )
        self._is_dict = isinstance(observed[agents[0]], spaces.Dict)
        self._reader = self._own.rebatched([])
        zeros = self._reader.spec.zero()
        self._zeros: dict[NestedKey, Tensor] = {key: zeros.get(key) for key in self._reader.spec.keys(True, True)}
        self._mask: MaskReader | None = None
        if self.mask_path is not None:
            path, source = (self.mask_path, "observation") if in_info is None else (in_info, "info")
            self._mask = MaskReader(path, source, self._action_reader.spec, [], _name(first))
            self._zeros[normalize_key(self.mask_path)] = self._mask.spec.zero()

    def _find_in_info(self, space: gym.Space[Any], name: NestedKey) -> tuple[str, ...] | None:
        """Return the path of the action mask in the infos of agents, or None if it isn't there."""
        first, spec = self.envs[0], self._action_reader.spec
        if find_mask(space, name, spec, _name(first)) is not None or not choice_counts(spec):
            return None
        infos = first.reset()[1].values()
        path = next((path for info in infos if (path := find_in_info(info, name)) is not None), None)
        if path is None and normalize_key(name) != ACTION_MASK:
            raise missing_mask_error(name, space, next(iter(infos), {}), spec, _name(first))
        return path

    def _simulators(self) -> Iterable[object]:
        return [part for env in self.envs for part in (env, getattr(env, "unwrapped", None))]

    def _trial_env(self) -> MultiAgentEnv:
        """Return a single environment: each is stepped for itself."""
        return PettingZooEnv(copy.deepcopy(self.envs[0]), **self._options)

    def _reset_envs(self, envs: Tensor, seed: int | None) -> AgentsReset:
        seen: list[Mapping[str, Any]] = [{}] * self.num_envs
        infos: list[Mapping[str, Any]] = [{}] * self.num_envs
        for index in envs.nonzero().flatten().tolist():
            own = None if seed is None else seed + index * self.n_agents  # the same in several worker processes
            seen[index], infos[index] = self.envs[index].reset(seed=own)
            self._check_complete(index, "reset", "observation", self.envs[index].agents, seen[index])
        agents = [env.agents for env in self.envs]
        return AgentsReset(self._stacked(seen, infos, agents), self._listed(agents))

    def _step_envs(self, actions: Any) -> AgentsStep:
        host, before = each_tensor(actions, Tensor.cpu), self.active.tolist()
        outcomes: list[Any] = []
        for index, (env, active) in enumerate(zip(self.envs, before, strict=True)):
            acting = {agent: a for a, agent in enumerate(self._keys) if active[a]}
            chosen = {agent: self._action_reader.read(_chosen(host, index, a)) for agent, a in acting.items()}
            outcome = env.step(chosen)
            for what, values in zip(("observation", "reward", "termination", "truncation"), outcome, strict=False):
                wanted = [*acting, *env.agents] if what == "observation" else acting
                self._check_complete(index, "step", what, wanted, values)
            outcomes.append(outcome)
        seen, rewards, terminated, truncated, infos = zip(*outcomes, strict=True)
        agents = [env.agents for env in self.envs]
        cut = [
            [agent for agent, flag in each.items() if flag and not ended.get(agent)]
            for each, ended in zip(truncated, terminated, strict=True)
        ]
        masked = [[*listed, *others] for listed, others in zip(agents, cut, strict=True)]
        return AgentsStep(
            self._stacked(seen, infos, masked),
            torch.tensor([[float(each.get(agent, 0.0)) for agent in self._keys] for each in rewards]),
            torch.tensor([[bool(each.get(agent, False)) for agent in self._keys] for each in terminated]),
            torch.tensor([[bool(each.get(agent, False)) for agent in self._keys] for each in truncated]),
            active=self._listed(agents),
        )

    def _check_complete(
        self, index: int, method: str, what: str, agents: Iterable[Any], values: Mapping[Any, Any]
    ) -> None:
        """Raise if a method of an environment returned no value for some of ``agents``."""
        missing = [agent for agent in self._keys if agent in agents and agent not in values]
        if missing:
            raise ArgumentError(
                f"{_name(self.envs[index])}.{method} must return the {what} of all agents that act, or act next, but "
                f"{missing} have none: fix the environment."
            )

    def _listed(self, agents: list[list[Any]]) -> Tensor:
        """Return which agents are listed by each environment, bool ``[n, A]``."""
        unknown = {agent for names in agents for agent in names} - {*self._keys}
        if unknown:
            raise ArgumentError(
                f"Agents must be among possible_agents, {self._keys}, but {sorted(unknown, key=str)} aren't."
            )
        return torch.tensor([[agent in names for agent in self._keys] for names in agents])

    def _stacked(self, seen: _EachEnv, infos: _EachEnv, masked: Sequence[Collection[Any]]) -> dict[NestedKey, Tensor]:
        """Return observations as tensors ``[n, A, ...]``, with zeros for those that are missing.

        Args:
            seen: observations by agent, of each environment.
            infos: infos by agent, of each environment.
            masked: agents of each environment that must have a mask, if there are masks.
        """
        rows = [
            self._tensors(each[agent], info.get(agent), agent in needed) if agent in each else self._zeros
            for each, info, needed in zip(seen, infos, masked, strict=True)
            for agent in self._keys
        ]
        shape = (self.num_envs, self.n_agents)
        return {key: torch.stack([row[key] for row in rows]).unflatten(0, shape) for key in self._zeros}

    def _tensors(self, observation: Any, info: Any, masked: bool) -> Mapping[NestedKey, Tensor]:
        found = self._reader.read(observation if self._is_dict else {OBSERVATION: observation})
        if self._mask is not None and self.mask_path is not None:
            source = observation if self._mask.source == "observation" else info
            mask = self._mask.read(source, np.asarray(masked))
            waits = masked and not mask.any()  # for its turn
            found[normalize_key(self.mask_path)] = torch.ones_like(mask) if waits else mask
        return found

    def _close(self) -> None:
        for env in self.envs:
            close = getattr(env, "close", None)
            if callable(close):
                close()


def _chosen(actions: Any, env: int, agent: int) -> Any:
    """Return the action of one agent as an ActionReader reads it, with the parts of a tuple by number."""
    if isinstance(actions, tuple):
        actions = {str(number): part for number, part in enumerate(cast("tuple[Any, ...]", actions))}
    if isinstance(actions, dict):
        parts = cast("dict[str, Any]", actions)
        return {name: _chosen(part, env, agent) for name, part in parts.items()}
    return actions[env, agent]


def _named(name: str) -> Callable[..., Any]:
    """Return the function that creates an environment: one of PettingZoo's by id, or ``module:function``."""
    if ":" in name:
        return load_object("PettingZooEnv", name, "function")
    try:
        pettingzoo: Any = importlib.import_module("pettingzoo")
        failure: Any = importlib.import_module("pettingzoo.env_registry.exceptions").PettingZooRegistryError
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{name!r} needs PettingZoo 1.27 or newer: pip install -U 'pettingzoo>=1.27'."
        ) from error
    try:
        pettingzoo.spec("parallel", name)
    except failure as error:
        raise ArgumentError(_why_unknown(pettingzoo, failure, name)) from error
    return partial(_make, pettingzoo, failure, name)


def _make(pettingzoo: Any, failure: Any, name: str, **kwargs: Any) -> Any:
    try:
        return pettingzoo.make("parallel", name, **kwargs)
    except failure as error:
        missing = getattr(error.__cause__, "name", None)
        if not isinstance(error.__cause__, ModuleNotFoundError) or not missing:
            raise
        group = name.partition("/")[0]
        ours = str(pettingzoo.spec("parallel", name).entry_point).startswith(f"pettingzoo.{group}.")
        how = f"pip install 'pettingzoo[{group}]'" if ours else how_to_install(missing)
        raise MissingDependencyError(f"PettingZoo's {name!r} needs the module {missing!r}: {how}.") from error


def _why_unknown(pettingzoo: Any, failure: Any, name: str) -> str:
    with suppress(failure):
        pettingzoo.spec("aec", name)
        return f"The agents of PettingZoo's {name!r} act in turn: {_CONVERT}."
    ids = [known.replace("-v", "_v") for known in pettingzoo.parallel_registry]
    hint = nearest(name, ids) or f" There are {', '.join(ids)}."
    return (
        f"PettingZoo has no parallel environment {name!r}; others are named module:function, such as "
        f"mpe2.simple_spread_v3:parallel_env.{hint}"
    )


def _check_protocol(env: Any) -> None:
    lacking = [name for name in _PROTOCOL if not hasattr(env, name)]
    in_turn = hasattr(env, "agent_iter")  # agent_selection only exists after a reset
    if lacking or in_turn:
        why = "is an AECEnv, whose agents act in turn" if in_turn else f"lacks {', '.join(lacking)}"
        raise ArgumentTypeError(
            f"An environment must have the parallel API of PettingZoo, but {_name(env)} {why}: {_CONVERT}."
        )


def _name(env: Any) -> str:
    return type(env).__name__
