"""R2D2 on a T-maze: Q-learning with a GRU from prioritized slices of a replay buffer, with burn-in.

python examples/r2d2.py [ENVIRONMENT STEPS]
"""

import sys

import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.data import BurnIn, LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer, slice_priorities
from recurl.envs import GymEnv
from recurl.modules import EGreedyModule, GRUModule, QValueActor
from recurl.objectives import DQNLoss, HardUpdate

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
torch.set_num_threads(1)
torch.manual_seed(0)
env = GymEnv("recurl/TMaze-v0", num_envs=8, corridor_length=5)
spec = env.action_spec_unbatched

gru = GRUModule(input_size=4, hidden_size=32, in_key="observation", out_key="memory", recurrent_backend="fastest")
actor = QValueActor(Seq(gru, Mod(nn.Linear(32, spec.n), in_keys=["memory"], out_keys=["action_value"])), spec=spec)
explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.02, annealing_num_steps=frames // 2)
sampler = PrioritizedSliceSampler(20_000, alpha=0.9, beta=0.6, slice_len=16, strict_length=False, by_step=True)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000, ndim=2), sampler=sampler, batch_size=256)
loss = DQNLoss(actor, gamma=0.95, double_dqn=True)
targets = HardUpdate(loss, value_network_update_interval=50)
optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
burn_in, target_burn_in = BurnIn(actor, 2), BurnIn(loss.target_value_network, 2)

collector = Collector(env, Seq(actor, explore), frames_per_batch=256, total_frames=frames)
for number, batch in enumerate(collector):
    explore.step(batch.numel())
    buffer.extend(batch)
    for _ in range(8):
        sample = buffer.sample()
        # The first steps of a slice only bring its stored state up to date, for each of the two networks.
        data, slow = burn_in(sample), target_burn_in(sample)
        for key, at in loss.target_states.items():
            data.set(at, slow.get(key))
        losses = loss(data)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        targets.step()
        priorities = slice_priorities(sample, losses["td_error"], data)
        buffer.update_priority(sample["index"], priorities, sample["collector", "write_step"])
    if number % 10 == 0:
        ended = batch["next", "reward"][batch["next", "done"]]
        print(f"{collector.frames:6d} steps: {ended.mean():.2f} of 1, loss {losses['loss'].item():.4f}")
collector.shutdown()
