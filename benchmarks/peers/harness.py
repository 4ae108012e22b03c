"""Shared options, environments and timing of all peers.

A peer warms up and prints one line of JSON that describes it. It then reads commands from standard input, such as
``collect 2048`` or ``train 8192`` (environment steps), and prints the times of each as a line of JSON.

Imports only gymnasium and NumPy, in any version: each peer has its own interpreter and its own requirements.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

SOLVED, WINDOW = 475.0, 20
EPISODE_STEPS = {"cartpole": 500, "pendulum": 200}
FRAMES = "recurl-bench/Frames-v0"
TASKS = (*EPISODE_STEPS, "r2d2", "frames")
"""Masked CartPole and Pendulum with PPO; masked CartPole with R2D2 (recurl only); images with PPO."""


class System(Protocol):
    """Interface of a peer: collects batches and learns from them."""

    versions: dict[str, str]
    """Versions of the packages it uses."""
    parameters: int
    """Number of learned parameters."""

    def collect(self) -> int:
        """Collect one batch; return its environment steps."""
        ...

    def learn(self) -> None:
        """Learn from the most recent batch."""
        ...

    def finished(self) -> list[float]:
        """Return the returns of the episodes that ended since the last call."""
        ...


def parser() -> argparse.ArgumentParser:
    """Return the argument parser shared by all peers."""
    options = argparse.ArgumentParser()
    options.add_argument("--task", choices=TASKS, default="cartpole")
    options.add_argument("--variant", default="default", help="variant of the setup, if the peer has several")
    options.add_argument("--accelerate", action="store_true", help="run its networks on recurl's backends")
    options.add_argument("--device", default="cpu", help="device of the networks; rsl_rl's and skrl's environments too")
    options.add_argument("--num-envs", type=int, default=8)
    options.add_argument("--rollout-steps", type=int, default=128, help="steps per environment in a batch")
    options.add_argument("--hidden-size", type=int, default=64)
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--minibatches", type=int, default=4)
    options.add_argument("--learning-rate", type=float, default=1e-3)
    options.add_argument("--warmup", type=int, default=2048, help="environment steps before timing")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--solve", type=int, default=0, help="train until solved, for at most this number of steps")
    return options


class Masked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Hides the velocities, scales the rewards, enforces the time limit, and records the return of every episode."""

    def __init__(self, task: str, finished: list[float], reward_scale: float = 1.0) -> None:
        super().__init__({"cartpole": CartPoleEnv, "pendulum": PendulumEnv}[task]())
        self._seen = {"cartpole": [0, 2], "pendulum": [0, 1]}[task]
        self._limit = EPISODE_STEPS[task]
        self._finished, self._scale = finished, reward_scale
        space = self.env.observation_space
        self.observation_space = gymnasium.spaces.Box(space.low[self._seen], space.high[self._seen], dtype=np.float32)
        self._steps, self._return = 0, 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(**options)
        self._steps, self._return = 0, 0.0
        return observation[self._seen], info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        observation, reward, terminated, _, info = self.env.step(action)
        self._steps += 1
        self._return += float(reward)
        truncated = self._steps >= self._limit
        if terminated or truncated:
            self._finished.append(self._return)
        return observation[self._seen], float(reward) * self._scale, terminated, truncated, info


class Frames(gymnasium.Env[Any, Any]):
    """Four gray frames of 84x84 with a moving square, cheap to render; moving it to the right is rewarded."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)
    _SIDE, _LIMIT, _MOVES = 8, 200, ((-4, 0), (4, 0), (0, -4), (0, 4))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._steps, self._place = 0, self.np_random.integers(0, 84 - self._SIDE, 2)
        self._frames = np.zeros((4, 84, 84), np.uint8)
        self._draw()
        return self._frames, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        self._steps += 1
        self._place = (self._place + self._MOVES[int(action)]).clip(0, 84 - self._SIDE)
        self._draw()
        return self._frames, float(self._place[1] > 42), False, self._steps >= self._LIMIT, {}

    def _draw(self) -> None:
        row, column = self._place
        self._frames = np.roll(self._frames, -1, 0)
        self._frames[-1] = 30
        self._frames[-1, row : row + self._SIDE, column : column + self._SIDE] = 255


gymnasium.register(FRAMES, Frames)


class Environments:
    """Factory of a run's environments that collects their episode returns.

    Runs until solved use scaled rewards: with raw rewards and a shared trunk, plain PPO doesn't solve masked CartPole.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._task, self._scale = options.task, 0.02 if options.solve else 1.0
        self._finished: list[float] = []

    def make(self) -> gymnasium.Env[Any, Any]:
        """Create one environment."""
        if self._task == "frames":
            return Frames()
        return Masked(self._task, self._finished, self._scale)

    def finished(self) -> list[float]:
        """Return the returns of the episodes that ended since the last call."""
        ended, self._finished[:] = list(self._finished), []
        return ended


def run(options: argparse.Namespace, make: Callable[[argparse.Namespace], System]) -> None:
    """Warm up and time the commands from standard input; with ``--solve``, train until solved instead."""
    np.random.seed(options.seed)  # noqa: NPY002 - the generator that peers use
    system = make(options)
    if options.solve:
        say(_solve(system, options) | about(system.parameters, system.versions))
        return
    steps = 0
    while steps < options.warmup:
        steps += system.collect()
        system.learn()
    say(about(system.parameters, system.versions))
    while (order := next_order()) is not None:
        what, wanted = order
        steps, watch = 0, Stopwatch()
        while steps < wanted:
            steps += system.collect()
            if what == "train":
                system.learn()
        say(watch.read(steps))


def about(parameters: int, versions: dict[str, str]) -> dict[str, Any]:
    """Description of a peer: parameter count and versions."""
    return {"parameters": parameters, "versions": {"gymnasium": gymnasium.__version__, **versions}}


def say(found: dict[str, Any]) -> None:
    """Print a line of JSON."""
    print(json.dumps(found), flush=True)


def next_order() -> tuple[str, int] | None:
    """Wait for ``collect STEPS`` or ``train STEPS``; None at the end of the input."""
    line = sys.stdin.readline().split()
    return (line[0], int(line[1])) if line else None


class Stopwatch:
    """CPU time of this process (all threads) and wall-clock time since creation."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self, steps: int) -> dict[str, float]:
        """Return the elapsed times, once a GPU has finished, labeled with the number of environment steps."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return {
            "steps": steps,
            "cpu_s": time.process_time() - self._cpu,
            "wall_s": time.perf_counter() - self._wall,
        }


def _solve(system: System, options: argparse.Namespace) -> dict[str, float | bool]:
    """Train until the mean return of 20 episodes reaches 475."""
    returns, best = deque[float](maxlen=WINDOW), float("-inf")
    steps, watch = 0, Stopwatch()
    while steps < options.solve and best < SOLVED:
        steps += system.collect()
        for value in system.finished():
            returns.append(value)
            best = max(best, sum(returns) / WINDOW if len(returns) == WINDOW else best)
        system.learn()
    return {**watch.read(steps), "solved": best >= SOLVED}
