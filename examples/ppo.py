"""The training loop of the README: PPO with an LSTM on masked CartPole."""

import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.collectors import Collector
from recurl.data import SequenceMinibatches
from recurl.envs import GymEnv
from recurl.modules import ActorValueOperator, Categorical, LSTMModule, ProbabilisticActor, ValueOperator
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE

torch.set_num_threads(1)  # at this size a second thread slows it down
env = GymEnv("recurl/MaskedCartPole-v1", num_envs=8, categorical_action_encoding=True)

trunk = LSTMModule(input_size=2, hidden_size=64, in_key="observation", out_key="memory", recurrent_backend="fastest")
head = Mod(nn.Linear(64, 2), in_keys=["memory"], out_keys=["logits"])
actor_head = ProbabilisticActor(head, ["logits"], distribution_class=Categorical, return_log_prob=True)
model = ActorValueOperator(trunk, actor_head, ValueOperator(nn.Linear(64, 1), in_keys=["memory"]))
actor, critic = model.get_policy_operator(), model.get_value_operator()

# The collector appends what the policy's memory needs: is_init at episode starts, and the hidden states.
collector = Collector(env, actor, frames_per_batch=1024, total_frames=4096)
gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

for batch in collector:  # [8, 128], hidden states carried from batch to batch
    gae(batch)
    for _ in range(4):
        for minibatch in SequenceMinibatches(batch, num_minibatches=4, slice_len=32):  # sequences, never single steps
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
collector.shutdown()
