"""Environments of VMAS: several agents, simulated by torch for a whole batch."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from recurl.core.devices import checked_device
from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.importing import how_to_install
from recurl.core.keys import ACTION_MASK, OBSERVATION, NestedKey
from recurl.core.messages import nearest
from recurl.core.seeding import derive_seed
from recurl.envs.multi_agent import AgentsReset, AgentsStep, MultiAgentEnv, check_equal_spaces
from recurl.envs.tasks.dynamics import check_count, check_flag

__all__ = ["VmasEnv"]

_MAX_SEED = 2**31


class VmasEnv(MultiAgentEnv):
    """Environments of VMAS, the vectorized simulator of multi-robot tasks; every agent is a row.

    The batch size is ``[num_envs * n_agents]``; see :class:`~recurl.envs.MultiAgentEnv`. A scenario ends for all of its
    agents at once. Positive rewards may be shared by the agents or not, as the scenario says.

    All agents must have the same actions. Each environment has random numbers of its own, seeded by
    :meth:`~recurl.envs.EnvBase.set_seed`, unlike those of VMAS, which all environments of a process share; on a GPU
    they come from torch's global generator there. Continuous actions are clamped to their range.

    Source: Bettini et al., "VMAS: A Vectorized Multi-Agent Simulator for Collective Robot Learning" (2022).

    Args:
        scenario: name of the scenario, such as ``"balance"``, or a ``vmas.simulator.scenario.BaseScenario``.
        num_envs: number of environments.
        max_steps: number of steps after which an environment is truncated; None for never.
        continuous_actions: real-valued actions, rather than integers.
        pad_observations: pad the observations of agents that observe fewer numbers than others with zeros.
        action_mask: see :class:`~recurl.envs.MultiAgentEnv`.
        agent_ids: likewise.
        return_state: likewise.
        device: likewise; the simulation runs there.
        **kwargs: arguments of the scenario, such as ``n_agents=3``.

    Attributes:
        simulator: the environment of VMAS.

    Raises:
        MissingDependencyError: VMAS is not installed.
        ArgumentError: there is no such scenario, or its agents have different spaces.

    Example:
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, n_agents=3)
        >>> env.reset(seed=0)["observation"].shape
        torch.Size([12, 16])
        >>> env.rollout(2)["next", "reward"].shape
        torch.Size([12, 2, 1])
    """

    _simulation = ("simulator", "_random")
    _trial_steps = 4  # enough for tensors, of which a simulator consists; a step takes milliseconds

    def __init__(
        self,
        scenario: Any,
        num_envs: int = 1,
        *,
        max_steps: int | None = None,
        continuous_actions: bool = True,
        pad_observations: bool = False,
        action_mask: NestedKey | None = ACTION_MASK,
        agent_ids: bool = False,
        return_state: bool = False,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        vmas: Any = _import("vmas")
        device = checked_device(device)
        if isinstance(scenario, str):
            _check_scenario(vmas, scenario)
        self.simulator: Any = vmas.make_env(
            scenario,
            num_envs=check_count("num_envs", num_envs, minimum=1),
            device=device or torch.get_default_device(),
            max_steps=max_steps,
            continuous_actions=check_flag("continuous_actions", continuous_actions),
            clamp_actions=True,
            terminated_truncated=True,
            seed=None,
            **kwargs,
        )
        names = [agent.name for agent in self.simulator.agents]
        observed = dict(zip(names, map(_gymnasium, self.simulator.observation_space), strict=True))
        self._widest = _widest(observed) if check_flag("pad_observations", pad_observations) else None
        observation_space = next(iter(observed.values())) if self._widest is None else _box(self._widest)
        if self._widest is None:
            check_equal_spaces("observation", observed, "pad them with pad_observations=True")
        acting = dict(zip(names, map(_gymnasium, self.simulator.action_space), strict=True))
        check_equal_spaces("action", acting, "give them equal actions in the scenario")
        super().__init__(
            names,
            num_envs,
            observation_space=observation_space,
            action_space=acting[names[0]],
            action_mask=action_mask,
            agent_ids=agent_ids,
            return_state=return_state,
            device=device,
        )
        self._random: list[Any] = list(self.simulator.vmas_random_state)
        with self._own_random():
            entropy = cast(int, np.random.SeedSequence().entropy)  # as in Gymnasium, until it is seeded
            self.simulator.seed(derive_seed(entropy, "VmasEnv") % _MAX_SEED)

    @contextmanager
    def _own_random(self) -> Generator[None]:
        """Replace the state of VMAS's random generators, one for the process, by that of this environment."""
        shared = self.simulator.vmas_random_state
        before, shared[:] = list(shared), self._random
        try:
            yield
        finally:
            self._random, shared[:] = list(shared), before

    def _simulators(self) -> Iterable[object]:
        return [self.simulator, self.simulator.scenario]

    def _reset_envs(self, envs: Tensor, seed: int | None) -> AgentsReset:
        with self._own_random():
            if bool(envs.all()):
                observations = self.simulator.reset(seed=None if seed is None else seed % _MAX_SEED)
            else:
                for index in envs.nonzero().flatten().tolist():
                    self.simulator.reset_at(index, return_observations=False)
                (observations,) = self.simulator.get_from_scenario(
                    get_observations=True, get_rewards=False, get_infos=False, get_dones=False
                )
        return AgentsReset(self._stacked(observations))

    def _step_envs(self, actions: Tensor) -> AgentsStep:
        with self._own_random():
            observations, rewards, terminated, truncated, _ = self.simulator.step(list(actions.unbind(1)))
        paid = torch.stack([reward.reshape(self.num_envs) for reward in rewards], 1)  # some scenarios return [N, 1]
        return AgentsStep(self._stacked(observations), paid, terminated, truncated)

    def _stacked(self, observations: Sequence[Any]) -> dict[NestedKey, Tensor]:
        found = [dict(_leaves(observation)) for observation in observations]
        if self._widest is not None:
            found = [{key: F.pad(v, (0, self._widest - v.shape[-1])) for key, v in each.items()} for each in found]
        return {key: torch.stack([each[key] for each in found], 1) for key in found[0]}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise MissingDependencyError(f"VmasEnv needs the module {missing!r}: {how_to_install(missing)}.") from error


def _check_scenario(vmas: Any, name: str) -> None:
    names = [*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios]
    if name not in names:
        hint = nearest(name, names) or f" There are {', '.join(names)}."
        raise ArgumentError(f"VMAS has no scenario {name!r}.{hint}")


def _leaves(observation: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[NestedKey, Tensor]]:
    if isinstance(observation, Mapping):
        for name, value in cast("Mapping[str, Any]", observation).items():
            yield from _leaves(value, (*path, name))
    else:
        yield (OBSERVATION if not path else path[0] if len(path) == 1 else path), observation


def _gymnasium(space: Any) -> gym.Space[Any]:
    """Return a space of gym, which VMAS uses, as one of Gymnasium."""
    kind = type(space).__name__
    if kind == "Dict":
        return spaces.Dict({name: _gymnasium(child) for name, child in space.spaces.items()})
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    return spaces.Box(space.low, space.high, dtype=space.dtype.type)


def _box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


def _widest(observed: Mapping[str, gym.Space[Any]]) -> int:
    """Return the largest number of values that an agent observes."""
    for name, space in observed.items():
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ArgumentError(f"Only vectors can be padded, but the observation of {name} is {space}.")
    return max(cast(spaces.Box, space).shape[0] for space in observed.values())
