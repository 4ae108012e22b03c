"""Your own loop and loss: REINFORCE with an LSTM on rollouts, without recurl's collectors, losses and trainers.

python examples/own_loop.py [UPDATES]
"""

import sys

import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.envs import GymEnv
from recurl.modules import Categorical, LSTMModule, ProbabilisticActor, set_recurrent_mode

updates = int(sys.argv[1]) if len(sys.argv) > 1 else 150
torch.set_num_threads(1)
torch.manual_seed(0)

lstm = LSTMModule(input_size=4, hidden_size=32, in_key="observation", out_key="memory", recurrent_backend="fastest")
head = Mod(nn.Linear(32, 4), in_keys=["memory"], out_keys=["logits"])
actor = ProbabilisticActor(head, ["logits"], distribution_class=Categorical)
policy = Seq(lstm, actor)
env = GymEnv(
    "recurl/RepeatPrevious-v0", num_envs=32, categorical_action_encoding=True, policy=policy, k=1, episode_length=16
)  # policy=: the environment writes is_init and carries the hidden states
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

for update in range(updates):
    with torch.no_grad():
        batch = env.rollout(16, policy)  # [32, 16]: one episode per row
    reward = batch["next", "reward"].squeeze(-1)
    advantage = reward - reward.mean(0)  # an action only affects its own reward
    with set_recurrent_mode(True):  # whole sequences, each from the state stored at its first step
        distribution = actor.get_dist(lstm(batch))
    loss = -(distribution.log_prob(batch["action"]) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 10 == 0:
        print(f"update {update:3d}: return {reward.sum(1).mean():.2f}")
env.close()
