"""Continuous control from memory: PPO with a GRU swings up a pendulum whose velocity is hidden.

python examples/continuous_control.py [ENVIRONMENT STEPS]
"""

import sys

import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.data import SequenceMinibatches
from recurl.envs import GymEnv
from recurl.modules import (
    MLP,
    ActorValueOperator,
    GRUModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
torch.set_num_threads(1)
torch.manual_seed(0)
env = GymEnv("recurl/MaskedPendulum-v1", num_envs=8)
spec = env.action_spec_unbatched

encoder = Mod(MLP(2, 64, num_cells=[]), in_keys=["observation"], out_keys=["encoded"])
gru = GRUModule(input_size=64, hidden_size=64, in_key="encoded", out_key="memory", recurrent_backend="fastest")
head = Mod(nn.Sequential(nn.Linear(64, 2), NormalParamExtractor()), in_keys=["memory"], out_keys=["loc", "scale"])
bounds = {"low": spec.low, "high": spec.high}  # actions are squashed to these bounds
actor_head = ProbabilisticActor(
    head, ["loc", "scale"], distribution_class=TanhNormal, distribution_kwargs=bounds, return_log_prob=True
)
model = ActorValueOperator(Seq(encoder, gru), actor_head, ValueOperator(nn.Linear(64, 1), in_keys=["memory"]))
actor, critic = model.get_policy_operator(), model.get_value_operator()
gae = GAE(gamma=0.9, lmbda=0.95, value_network=critic)
loss = ClipPPOLoss(actor, critic, normalize_advantage=True, entropy_coeff=0.0)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

collector = Collector(env, actor, frames_per_batch=1600, total_frames=frames)
for batch in collector:
    batch["next", "reward"] /= 10  # costs of a step reach 16
    gae(batch)
    for _ in range(10):
        for minibatch in SequenceMinibatches(batch, num_minibatches=4, slice_len=25):
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
    print(f"{collector.frames:6d} steps: mean return of 200 steps {2000 * batch['next', 'reward'].mean():.0f}")
collector.shutdown()
