"""rsl_rl's PPO with recurrent models, and the body of its runner, split into collection and update."""

from __future__ import annotations

import argparse
import importlib
from importlib.metadata import version
from typing import Any

import torch
from harness import parser, run
from rsl_rl.algorithms import PPO
from rsl_rl.models import RNNModel
from rsl_rl.storage import RolloutStorage
from rsl_rl.utils import check_nan
from tensor_cartpole import TensorCartPole
from tensordict import TensorDict
from torch import Tensor, nn

GROUPS = {"actor": ["policy"], "critic": ["policy"]}


class Env:
    """The protocol of ``rsl_rl.env.VecEnv``: a push to the right is an action above zero."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tensors = TensorCartPole(options)

    def get_observations(self) -> TensorDict:
        seen = self.tensors.observe()
        return TensorDict({"policy": seen}, [len(seen)])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        reward, terminated, truncated = self.tensors.step(actions[:, 0] > 0)
        return self.get_observations(), reward, (terminated | truncated).long(), {"time_outs": truncated}


class RslRl:
    """Separate LSTMs for actor and critic, as rsl_rl has them; whole rows, cut at episodes and padded."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.env, self.steps = Env(options), options.rollout_steps
        self.observations = self.env.get_observations()
        size = options.hidden_size
        shared = {"hidden_dims": [size], "rnn_type": "lstm", "rnn_hidden_dim": size}
        gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
        actor = RNNModel(self.observations, GROUPS, "actor", 1, distribution_cfg=gaussian, **shared)
        critic = RNNModel(self.observations, GROUPS, "critic", 1, **shared)
        for network in (actor, critic):
            network.to(options.device)
        if options.accelerate:
            importlib.import_module("recurl").accelerate(nn.ModuleList([actor, critic]))
        self.rows = options.num_envs
        storage = RolloutStorage("rl", self.rows, self.steps, self.observations, [1], options.device)
        self.ppo = PPO(
            actor,
            critic,
            storage,
            num_learning_epochs=options.epochs,
            num_mini_batches=options.minibatches,
            learning_rate=options.learning_rate,
            schedule="fixed",
            clip_param=0.2,
            gamma=0.99,
            lam=0.95,
            value_loss_coef=0.5,
            entropy_coef=0.0,
            max_grad_norm=0.5,
            device=options.device,
        )
        self.parameters = sum(parameter.numel() for net in (actor, critic) for parameter in net.parameters())
        self.versions = {"torch": torch.__version__, "rsl-rl-lib": version("rsl-rl-lib")}
        self.finished = self.env.tensors.finished

    def collect(self) -> int:
        self.ppo.storage.clear()
        with torch.inference_mode():
            for _ in range(self.steps):
                actions = self.ppo.act(self.observations)
                self.observations, rewards, dones, extras = self.env.step(actions)
                check_nan(self.observations, rewards, dones)
                self.ppo.process_env_step(self.observations, rewards, dones, extras)
        return self.steps * self.rows

    def learn(self) -> None:
        with torch.inference_mode():
            self.ppo.compute_returns(self.observations)
        self.ppo.update()


if __name__ == "__main__":
    run(parser().parse_args(), RslRl)
