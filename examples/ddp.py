"""Your own PPO loop over several processes: torchrun --nproc-per-node 2 examples/ddp.py [frames]."""

import sys

import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recurl.collectors import Collector
from recurl.core.seeding import derive_seed
from recurl.data import SequenceMinibatches
from recurl.distributed import global_statistics, joined, rank, world_size
from recurl.envs import GymEnv
from recurl.modules import ActorValueOperator, Categorical, LSTMModule, ProbabilisticActor, ValueOperator
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE

torch.set_num_threads(1)
frames = int(sys.argv[1]) if len(sys.argv) > 1 else 8192  # of each rank

with joined():  # without torchrun a single process
    torch.manual_seed(0)  # the same networks on every rank
    trunk = LSTMModule(input_size=2, hidden_size=64, in_key="observation", out_key="memory")
    head = Mod(nn.Linear(64, 2), in_keys=["memory"], out_keys=["logits"])
    actor_head = ProbabilisticActor(head, ["logits"], distribution_class=Categorical, return_log_prob=True)
    model = ActorValueOperator(trunk, actor_head, ValueOperator(nn.Linear(64, 1), in_keys=["memory"]))
    actor, critic = model.get_policy_operator(), model.get_value_operator()
    gae, loss = GAE(0.99, 0.95, critic), ClipPPOLoss(actor, critic, normalize_advantage=True)
    learner = DistributedDataParallel(loss) if world_size() > 1 else loss  # backward averages the gradients
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

    env = GymEnv("recurl/MaskedCartPole-v1", num_envs=8, categorical_action_encoding=True)
    env.set_seed(8 * rank())  # different episodes and actions on every rank
    torch.manual_seed(derive_seed(0, "actions", rank()))
    shuffle = torch.Generator().manual_seed(derive_seed(0, "minibatches"))  # the same on every rank
    for batch in Collector(env, actor, frames_per_batch=512, total_frames=frames):
        for minibatch in SequenceMinibatches(gae(batch), 4, 32, shuffle, rank=rank(), ranks=world_size()):
            with global_statistics():  # advantages are normalized over the minibatches of all ranks
                losses = learner(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
        if rank() == 0:
            print(f"{world_size()} ranks: value loss {losses['loss_critic'].item():.3f}")
