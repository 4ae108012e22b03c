"""A GPU: the whole PPO step, Adam included, captured as one CUDA graph. Without a GPU the step runs eagerly.

python examples/gpu.py [ENVIRONMENT STEPS]
"""

import sys

import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.collectors import Collector
from recurl.data import SequenceMinibatches
from recurl.envs import GymEnv
from recurl.modules import ActorValueOperator, Categorical, LSTMModule, ProbabilisticActor, ValueOperator
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.trainers import CudaGraphStep

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
torch.manual_seed(0)
env = GymEnv("recurl/MaskedCartPole-v1", num_envs=32, categorical_action_encoding=True, device=device)

trunk = LSTMModule(2, 64, in_key="observation", out_key="memory", recurrent_backend="fastest", device=device)
head = Mod(nn.Linear(64, 2, device=device), in_keys=["memory"], out_keys=["logits"])
actor_head = ProbabilisticActor(head, ["logits"], distribution_class=Categorical, return_log_prob=True)
model = ActorValueOperator(trunk, actor_head, ValueOperator(nn.Linear(64, 1, device=device), in_keys=["memory"]))
actor, critic = model.get_policy_operator(), model.get_value_operator()
gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
rate = torch.tensor(1e-3, device=device)  # values that change between steps are tensors, filled in place
optimizer = torch.optim.Adam(loss.parameters(), lr=rate, capturable=on_gpu, fused=True)


def step(minibatch):
    """Take one gradient step; minibatches always have the same shapes."""
    losses = loss(minibatch)
    optimizer.zero_grad()
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    optimizer.step()
    return losses["loss_objective"].detach()


train = CudaGraphStep(step, loss, optimizer) if on_gpu else step
collector = Collector(env, actor, frames_per_batch=2048, total_frames=frames)
for batch in collector:
    gae(batch)
    rate.fill_(1e-3 * (1 - collector.frames / (frames + 2048)))
    for _ in range(4):
        for minibatch in SequenceMinibatches(batch, num_minibatches=4, slice_len=32):
            train(minibatch)
    ends = int(batch["next", "done"].sum())
    print(f"{collector.frames:6d} steps on {device}: {batch.numel() / max(ends, 1):.0f} steps per episode")
collector.shutdown()
