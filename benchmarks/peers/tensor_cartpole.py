"""gymnasium's CartPole as one batch of tensors, with the velocities hidden: for libraries that step many at once."""

from __future__ import annotations

import argparse

import torch
from gymnasium.envs.classic_control import CartPoleEnv
from harness import EPISODE_STEPS
from torch import Tensor


class TensorCartPole:
    """N environments, which begin a new episode in the step that ends one."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.task != "cartpole":
            raise SystemExit(f"environments of tensors are of --task cartpole, not {options.task}")
        self.one, self.limit, self.scale = CartPoleEnv(), EPISODE_STEPS["cartpole"], 0.02 if options.solve else 1.0
        self.state = torch.empty(options.num_envs, 4, dtype=torch.float64, device=options.device).uniform_(-0.05, 0.05)
        self.age = torch.zeros(options.num_envs, dtype=torch.int64, device=options.device)
        self.bounds = torch.tensor([self.one.x_threshold, self.one.theta_threshold_radians], device=options.device)
        self._finished: list[float] = []

    def observe(self) -> Tensor:
        """Return the positions, float32 ``[N, 2]``."""
        return self.state[:, 0::2].float()

    def step(self, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push to the right where ``right``, else to the left; return rewards, and what terminates and is truncated."""
        one = self.one
        _, speed, angle, turn = self.state.unbind(1)
        force = torch.where(right, one.force_mag, -one.force_mag).double()
        cos, sin = angle.cos(), angle.sin()
        push = (force + one.polemass_length * turn.square() * sin) / one.total_mass
        bend = (one.gravity * sin - cos * push) / (one.length * (4 / 3 - one.masspole * cos.square() / one.total_mass))
        pull = push - one.polemass_length * bend * cos / one.total_mass
        change = torch.stack([speed, pull, turn, bend], 1)
        self.state = self.state + one.tau * change
        self.age += 1
        terminated = (self.state[:, 0::2].abs() > self.bounds).any(1)
        truncated = self.age >= self.limit
        done = terminated | truncated
        if done.any():
            self._finished += self.age[done].tolist()
            self.state[done] = torch.empty_like(self.state[done]).uniform_(-0.05, 0.05)
            self.age[done] = 0
        return torch.full((len(done),), self.scale, device=done.device), terminated, truncated

    def finished(self) -> list[float]:
        """Return the returns of the episodes that ended since the last call."""
        ended, self._finished = self._finished, []
        return ended
