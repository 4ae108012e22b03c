"""Your own task, written once: stepped by NumPy on a CPU, or as tensors on a GPU, and trained on.

python examples/own_task.py [ENVIRONMENT STEPS] [DEVICE]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Box
from rich.console import Console

from recurl.envs.tasks import Dynamics, check_dynamics
from recurl.trainers import PPOConfig, RunFolder, Trainer, evaluate_run


class Catch(Dynamics):
    """Catch a ball that falls down a board of n x n fields and is only visible in the first row: 1 or 0."""

    def __init__(self, n=7):
        super().__init__(observation_space=Box(0.0, 1.0, (2, n), np.float32), actions=3, step_limit=n)
        self.n = n
        self.fields = np.eye(n, dtype=np.float32)

    def begin(self, xp, draw):
        """Drop a ball; the paddle starts anywhere."""
        return {"ball": draw.integers(self.n), "paddle": draw.integers(self.n)}

    def advance(self, xp, state, steps, actions):
        """Move the paddle by -1, 0 or 1; the last step is rewarded."""
        paddle = xp.clip(state["paddle"] + actions - 1, 0, self.n - 1)
        landed = steps == self.n - 1
        reward = xp.where(landed & (paddle == state["ball"]), 1.0, 0.0)
        return {"ball": state["ball"], "paddle": paddle}, reward, landed

    def observe(self, xp, state, steps):
        """Show the paddle, and the ball in the first row."""
        fields = xp.asarray(self.fields)
        ball = xp.take(fields, state["ball"]) * (steps == 0)[:, None]
        return xp.stack((ball, xp.take(fields, state["paddle"])), axis=1)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
device = sys.argv[2] if len(sys.argv) > 2 else "cuda" if torch.cuda.is_available() else "cpu"
print(f"largest difference between host and {device}: {check_dynamics(Catch(), device=device):.0f} roundings")
torch.set_num_threads(1)
options = {"hidden_size": 32, "num_envs": 64, "rollout_steps": 32, "learning_rate": 3e-3}
config = PPOConfig(env=Catch, env_kwargs=("n=5",), cell="gru", device=device, total_steps=steps, **options)
with tempfile.TemporaryDirectory() as name:
    folder = RunFolder(Path(name))
    folder.create(config)
    trainer = Trainer(config, folder, console=Console())
    trainer.run()
    trainer.close()
    evaluation = evaluate_run(folder, episodes=100, env=Catch)
print(f"greedy: {evaluation.mean_return:.2f} of the balls are caught on {device}")
