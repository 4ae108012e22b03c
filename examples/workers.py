"""Workers: two processes collect, each with its own environments and hidden states, and the main one learns by PPO.

python examples/workers.py [ENVIRONMENT STEPS]
"""

import sys

import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.collectors import MultiSyncCollector
from recurl.data import SequenceMinibatches
from recurl.envs import GymEnv
from recurl.modules import ActorValueOperator, Categorical, GRUModule, ProbabilisticActor, ValueOperator
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000
torch.set_num_threads(1)
torch.manual_seed(0)


def make_env():
    """Create the environments of a worker; runs in each worker, so call gymnasium.register here if needed."""
    return GymEnv("recurl/MaskedCartPole-v1", num_envs=4, categorical_action_encoding=True)


trunk = GRUModule(input_size=2, hidden_size=64, in_key="observation", out_key="memory", recurrent_backend="fastest")
head = Mod(nn.Linear(64, 2), in_keys=["memory"], out_keys=["logits"])
actor_head = ProbabilisticActor(head, ["logits"], distribution_class=Categorical, return_log_prob=True)
model = ActorValueOperator(trunk, actor_head, ValueOperator(nn.Linear(64, 1), in_keys=["memory"]))
actor, critic = model.get_policy_operator(), model.get_value_operator()
gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

# A worker that raises, dies or hangs raises here within seconds; leaving the block stops them all.
with MultiSyncCollector(
    [make_env, make_env], actor, frames_per_batch=1024, total_frames=frames, cat_results=0, timeout=60
) as collector:
    for batch in collector:  # [8, 128]: the rows of both workers
        gae(batch)
        for _ in range(4):
            for minibatch in SequenceMinibatches(batch, num_minibatches=4, slice_len=32):
                losses = loss(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                optimizer.step()
        collector.update_policy_weights_()  # the workers continue with the new weights
        ends = int(batch["next", "done"].sum())
        print(f"{collector.frames:6d} steps: {batch.numel() / max(ends, 1):.0f} steps per episode")
