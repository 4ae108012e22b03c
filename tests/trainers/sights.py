"""Small environments with all kinds of observations."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

spaces = gym.spaces
CAMERA, PARTS = "recurl-test/Camera-v0", "recurl-test/Parts-v0"


class Camera(gym.Env):
    """A 24x24x3 image, half of which is lit at the first of five steps; the last action must recall which half."""

    observation_space = spaces.Box(0, 255, (24, 24, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bit, self.steps = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        last = self.steps == 5
        return self.observe(), float(last and action == self.bit), last, False, {}

    def observe(self):
        return self.image()

    def image(self):
        image = self.np_random.integers(0, 20, (24, 24, 3), np.uint8)
        if self.steps == 0:
            image[:, 12 * self.bit : 12 * (self.bit + 1)] = 200
        return image

    def get_state(self):
        return {"bit": self.bit, "steps": self.steps, "rng": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.bit, self.steps = int(state["bit"]), int(state["steps"])
        self.np_random.bit_generator.state = state["rng"]


class Parts(Camera):
    """The same, with the image in a nested space along with a vector, choices and bits, plus a text."""

    observation_space = spaces.Dict(
        {
            "image": Camera.observation_space,
            "rest": spaces.Tuple(
                [
                    spaces.Box(-np.inf, np.inf, (2,)),
                    spaces.Discrete(5, start=1),
                    spaces.Dict({"levels": spaces.MultiDiscrete([2, 3]), "bits": spaces.MultiBinary(2)}),
                ]
            ),
            "mission": spaces.Text(8),
        }
    )

    def observe(self):
        vector = self.np_random.normal(3.0, 2.0, 2).astype(np.float32)
        deep = {"levels": self.np_random.integers(0, [2, 3]), "bits": self.np_random.integers(0, 2, 2, np.int8)}
        rest = (vector, np.int64(1 + self.steps % 5), deep)
        return {"image": self.image(), "rest": rest, "mission": "remember"}


for name, kind in ((CAMERA, Camera), (PARTS, Parts)):
    if name not in gym.registry:  # imported under two names: as a test module, and for its doctests
        gym.register(name, kind, max_episode_steps=5)
