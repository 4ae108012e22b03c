"""Your own environment: written for Gymnasium, registered, checked, and trained on.

python examples/own_environment.py [ENVIRONMENT STEPS]
"""

import sys
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch
from rich.console import Console

from recurl.envs import GymEnv, check_env_specs
from recurl.trainers import PPOConfig, RunFolder, Trainer, evaluate_run


class Echo(gymnasium.Env):
    """Repeat what was shown one step ago; the best return of the 20 steps is 19, half of it without memory."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Start an episode."""
        super().reset(seed=seed)
        self.shown, self.before, self.steps = int(self.np_random.integers(2)), 0, 0
        return self._observation(), {}

    def step(self, action):
        """Compare the action with what was shown before."""
        reward = float(action == self.before) if self.steps else 0.0
        self.before, self.shown = self.shown, int(self.np_random.integers(2))
        self.steps += 1
        return self._observation(), reward, False, self.steps == 20, {}

    def _observation(self):
        return np.eye(2, dtype=np.float32)[self.shown]


gymnasium.register("Echo-v0", Echo)
check_env_specs(GymEnv("Echo-v0"))  # steps it and compares everything with the declared spaces

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
torch.set_num_threads(1)
config = PPOConfig(env="Echo-v0", cell="gru", hidden_size=16, gamma=0.3, learning_rate=1e-2, total_steps=frames)
with tempfile.TemporaryDirectory() as name:  # any folder, for metrics, checkpoints and the learning curve
    folder = RunFolder(Path(name))
    folder.create(config)
    trainer = Trainer(config, folder, console=Console())
    trainer.run()
    trainer.close()
    evaluation = evaluate_run(folder, episodes=50)
print(f"greedy return {evaluation.mean_return:.1f} of 19")
