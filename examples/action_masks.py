"""Action masks: a game whose legal moves change at every step, trained with its mask and without.

python examples/action_masks.py [ENVIRONMENT STEPS]
"""

import sys
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch
from rich.console import Console

from recurl.trainers import PPOConfig, RunFolder, Trainer, evaluate_run


class Keys(gymnasium.Env):
    """Press a key of the color shown one step ago. Two of 16 keys are legal, one per color.

    The legal keys change at every step, and only the mask shows them. Any other key ends the episode. The best return
    is 1, without memory 0.5, and at most 0.01 for a policy that ignores the mask.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(16)

    def reset(self, *, seed=None, options=None):
        """Start an episode."""
        super().reset(seed=seed)
        self.steps, self.shown = 0, 0
        return self._observe()

    def step(self, action):
        """Compare the color of the key with the one shown before."""
        place, color = divmod(int(action), 2)
        over, right = place != self.place, self.steps > 0 and (place, color) == (self.place, self.before)
        self.steps += 1
        observation, info = self._observe()
        return observation, right / 19, over, self.steps == 20, info

    def _observe(self):
        self.before, self.shown = self.shown, int(self.np_random.integers(2))
        self.place = int(self.np_random.integers(8))
        return np.eye(2, dtype=np.float32)[self.shown], {"action_mask": np.arange(16) // 2 == self.place}


gymnasium.register("Keys-v0", Keys)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40_960
torch.set_num_threads(1)
for mask in ("action_mask", "none"):  # recurl train ppo --action-mask none
    config = PPOConfig(env="Keys-v0", action_mask=mask, cell="gru", gamma=0.3, learning_rate=3e-3, total_steps=steps)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.create(config)
        trainer = Trainer(config, folder, console=Console(quiet=True))
        trainer.run()
        trainer.close()
        print(f"--action-mask {mask}: greedy return {evaluate_run(folder, episodes=50).mean_return:.2f} of 1")
