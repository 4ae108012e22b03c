"""Environments of several agents that don't interact, and one of their episodes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from recurl.envs import AgentsReset, AgentsStep, MultiAgentEnv

ACTIONS = {"box": spaces.Box(-1, 1, (2,), np.float32), "discrete": spaces.Discrete(3)}
LIMIT = 11
"""Steps after which an environment is truncated."""


def observe(agent: Any, time: Any, place: Tensor) -> Tensor:
    """Observation of an agent: its place, and its clock."""
    return torch.stack([place, torch.cos(0.7 * time + agent)], -1).float()


def move(place: Tensor, action: Tensor) -> Tensor:
    push = action.float() - 1 if action.dtype == torch.int64 else action.sum(-1)
    return 0.9 * place + 0.3 * push + 0.1


class Walkers(MultiAgentEnv):
    """Agent ``a`` dies after ``lives[a]`` steps, and returns ``waits[a]`` steps later; None is never.

    With a wait of 0, its next episode begins at once. Environments are truncated at step ``LIMIT``, or at ``limits``.
    """

    def __init__(self, num_envs: int = 2, lives=(3, None, 5), waits=(2, None, 0), action="box", limits=None, **options):
        self.lives = torch.tensor([1e9 if life is None else life for life in lives])
        self.waits = torch.tensor([1e9 if wait is None else wait for wait in waits])
        space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        super().__init__(
            [f"agent_{a}" for a in range(len(lives))],
            num_envs,
            observation_space=space,
            action_space=ACTIONS[action],
            **{"agents_leave": True, **options},
        )
        self.limits = torch.full((num_envs,), LIMIT) if limits is None else torch.tensor(limits)
        self.index = torch.arange(self.n_agents).float()
        shape = num_envs, self.n_agents
        self.clock, self.place, self.gone = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        self.steps = torch.zeros(num_envs)
        self.resets: list[list[int]] = []
        self.seeds: list[int | None] = []

    def _reset_envs(self, envs, seed):
        self.resets.append(envs.nonzero().flatten().tolist())
        self.seeds.append(seed)
        for values in (self.clock, self.place, self.gone, self.steps):
            values[envs] = 0
        return AgentsReset(observe(self.index, self.clock, self.place))

    def _step_envs(self, actions):
        alive = self.active
        self.clock += alive
        self.steps += 1
        self.place = torch.where(alive, move(self.place, actions), self.place)
        last, reward = observe(self.index, self.clock, self.place), self.place * 2
        terminated = alive & (self.clock >= self.lives)
        over = self.steps >= self.limits
        self.gone = torch.where(alive & ~terminated, 0, self.gone + 1)
        returns = (self.gone > self.waits) & ~over[:, None]
        self.clock, self.place = (torch.where(returns, 0, values) for values in (self.clock, self.place))
        active = ((alive & ~terminated) | returns) & ~over[:, None]
        garbage = torch.where(alive[..., None], last, torch.nan)  # values of absent agents are arbitrary
        begins = observe(self.index, self.clock, self.place)
        return AgentsStep(garbage, reward, terminated, alive & over[:, None] & ~terminated, active, begins)


def alone(agent: int, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the observations ``[n + 1, 2]`` and rewards ``[n]`` of one episode of an agent, given its actions."""
    place, observations, rewards = torch.zeros(()), [], []
    for time, action in enumerate(actions):
        observations.append(observe(torch.tensor(float(agent)), torch.tensor(float(time)), place))
        place = move(place, action)
        rewards.append(place * 2)
    observations.append(observe(torch.tensor(float(agent)), torch.tensor(float(len(actions))), place))
    return torch.stack(observations), torch.stack(rewards)
