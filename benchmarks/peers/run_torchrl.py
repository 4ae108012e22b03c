"""TorchRL's Collector, LSTMModule, GAE and ClipPPOLoss, wired as in its documentation.

The variant ``default`` steps a SerialEnv and recomputes advantages in every epoch, as TorchRL's examples do. ``best``
uses the fastest settings found: one vectorized gymnasium environment, and advantages once per batch.
"""

from __future__ import annotations

import argparse
import importlib
import warnings

import gymnasium
import tensordict
import torch
import torchrl
from harness import Environments, parser, run
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymWrapper, SerialEnv, TransformedEnv
from torchrl.modules import (
    LSTMModule,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

warnings.filterwarnings("ignore")


def make_env(options: argparse.Namespace, environments: Environments) -> TransformedEnv:
    if options.variant == "best":
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        vector = gymnasium.vector.SyncVectorEnv([environments.make] * options.num_envs, autoreset_mode=mode)
        return TransformedEnv(GymWrapper(vector, device=options.device))
    return TransformedEnv(SerialEnv(options.num_envs, lambda: GymWrapper(environments.make()), device=options.device))


def make_networks(env: TransformedEnv, size: int) -> tuple[ProbabilisticActor, TensorDictSequential]:
    spec = env.action_spec_unbatched
    features = env.observation_spec_unbatched["observation"].shape[-1]
    encoder = nn.Sequential(nn.Linear(features, size), nn.Tanh())
    trunk = TensorDictSequential(
        TensorDictModule(encoder, in_keys=["observation"], out_keys=["embedding"]),
        LSTMModule(
            input_size=size,
            hidden_size=size,
            in_keys=["embedding", "h", "c", "is_init"],
            out_keys=["memory", ("next", "h"), ("next", "c")],
        ),
    )
    if spec.dtype.is_floating_point:
        head = nn.Sequential(nn.Linear(size, 2 * spec.shape[-1]), NormalParamExtractor())
        keys, kind = ["loc", "scale"], TanhNormal
        bounds = {"low": spec.space.low, "high": spec.space.high}
    else:
        head, keys, kind, bounds = nn.Linear(size, spec.shape[-1]), ["logits"], OneHotCategorical, {}
    actor = ProbabilisticActor(
        TensorDictSequential(trunk, TensorDictModule(head, in_keys=["memory"], out_keys=keys)),
        in_keys=keys,
        out_keys=["action"],
        spec=env.action_spec_unbatched,
        distribution_class=kind,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    return actor, TensorDictSequential(trunk, ValueOperator(nn.Linear(size, 1), in_keys=["memory"]))


class TorchRL:
    """Collects batches of shape ``[N, T]`` and learns from minibatches of whole rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        if options.num_envs % options.minibatches:
            raise SystemExit(f"minibatches are whole rows: {options.minibatches} don't divide {options.num_envs}")
        self.options, environments = options, Environments(options)
        env = make_env(options, environments)
        env.set_seed(options.seed)
        actor, critic = (network.to(options.device) for network in make_networks(env, options.hidden_size))
        if options.accelerate:
            importlib.import_module("recurl").accelerate(nn.ModuleList([actor, critic]))
        frames = options.num_envs * options.rollout_steps
        collector = Collector(
            env, actor, frames_per_batch=frames, total_frames=-1, auto_register_policy_transforms=True
        )
        self.batches = iter(collector)
        self.gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False, deactivate_vmap=True)
        self.loss = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=0.2,
            # A squashed normal has no closed-form entropy: a bonus of weight 0 would only cost samples.
            entropy_bonus=options.task == "cartpole",
            entropy_coeff=0.0,
            critic_coeff=0.5,
            normalize_advantage=True,
            loss_critic_type="l2",
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=options.learning_rate, eps=1e-5)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(options.num_envs, device=options.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=options.num_envs // options.minibatches,
        )
        self.parameters = sum(parameter.numel() for parameter in set(self.loss.parameters()))
        self.versions = {
            "torch": torch.__version__,
            "torchrl": torchrl.__version__,
            "tensordict": tensordict.__version__,
        }
        self.finished = environments.finished

    def collect(self) -> int:
        self.batch = next(self.batches)
        return self.batch.numel()

    def learn(self) -> None:
        batch = self.batch.exclude("embedding", "memory", "logits", ("next", "embedding"))
        for epoch in range(self.options.epochs):
            if epoch == 0 or self.options.variant != "best":
                with set_recurrent_mode(True), torch.no_grad():
                    self.gae(batch)
                self.buffer.empty()
                self.buffer.extend(batch)
            for minibatch in self.buffer:
                self.step(minibatch)

    def step(self, minibatch: tensordict.TensorDictBase) -> None:
        with set_recurrent_mode(True):
            losses = self.loss(minibatch)
        sum(losses[name] for name in losses.keys() if name.startswith("loss_")).backward()  # noqa: SIM118 - iterating over a TensorDict yields rows, not keys
        nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    run(parser().parse_args(), TorchRL)
