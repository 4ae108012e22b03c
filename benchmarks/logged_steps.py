"""An environment that logs executed steps, and checks of the delivered ones."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from pathlib import Path

import gymnasium as gym
import numpy as np
from tensordict import TensorDict

from recurl.envs import GymWrapper


class Logged(gym.Env):
    """Environment that observes its id and its step count, and appends both to a file. Episodes have seven steps.

    Args:
        file: the file.
        seconds: duration of a step.
        dies_if: file whose existence makes the process kill itself at its next step.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, file: Path, seconds: float = 0.0, dies_if: Path | None = None) -> None:
        self._log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._seconds = seconds
        self._dies_if = dies_if
        self._number = random.SystemRandom().randrange(2**24)  # exact in float32
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        if self._dies_if is not None and self._dies_if.exists():
            os.kill(os.getpid(), 9)
        time.sleep(self._seconds)
        os.write(self._log, f"{self._number} {self._steps}\n".encode())
        return self._observe(), 1.0, self._steps % 7 == 0, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self._number, self._steps], np.float64)


def logged(file: Path, rows: int = 2, **options: object) -> GymWrapper:
    mode = gym.vector.AutoresetMode.DISABLED
    return GymWrapper(gym.vector.SyncVectorEnv([lambda: Logged(file, **options)] * rows, autoreset_mode=mode))


def executed(file: Path) -> list[tuple[int, int]]:
    return [tuple(map(int, line.split())) for line in file.read_text().splitlines()]


def delivered(batches: list[TensorDict]) -> dict[int, list[int]]:
    """Return the steps of each environment, in order of delivery."""
    steps: dict[int, list[int]] = defaultdict(list)
    for batch in batches:
        seen = batch["next", "observation"].reshape(-1, batch.shape[-1], 2)
        for row in seen.tolist():
            for number, step in row:
                steps[int(number)].append(int(step))
    return steps


def check_exactly_once(batches: list[TensorDict], file: Path, undelivered: int) -> None:
    """Check that all delivered steps were executed once and in order, and that few others were executed."""
    steps, done = delivered(batches), executed(file)
    assert len(done) == len(set(done))
    for each in steps.values():
        assert each == list(range(1, len(each) + 1))
    given = {(number, step) for number, each in steps.items() for step in each}
    assert given <= set(done)
    assert len(done) - len(given) <= undelivered
