"""SB3-Contrib's RecurrentPPO, with its ``learn`` split into collection and update."""

from __future__ import annotations

import argparse
import importlib

import sb3_contrib
import stable_baselines3
import torch
from harness import Environments, parser, run
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn


class Encoder(BaseFeaturesExtractor):
    """One hidden layer, as in all peers."""

    def __init__(self, observation_space: object, features_dim: int) -> None:
        super().__init__(observation_space, features_dim)
        self.layer = nn.Sequential(nn.Linear(observation_space.shape[0], features_dim), nn.Tanh())

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layer(observations)


class SB3:
    """RecurrentPPO. Variant ``default`` has separate LSTMs for actor and critic; ``shared`` has one for both."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        environments = Environments(options)
        env = DummyVecEnv([environments.make] * options.num_envs)
        lstms = {"enable_critic_lstm": False, "shared_lstm": True} if options.variant == "shared" else {}
        encoder = {
            "features_extractor_class": Encoder,
            "features_extractor_kwargs": {"features_dim": options.hidden_size},
        }
        if options.task == "frames":
            encoder = {"features_extractor_class": NatureCNN, "features_extractor_kwargs": {"features_dim": 512}}
        self.model = RecurrentPPO(
            "CnnLstmPolicy" if options.task == "frames" else "MlpLstmPolicy",
            env,
            n_steps=options.rollout_steps,
            batch_size=options.num_envs * options.rollout_steps // options.minibatches,
            n_epochs=options.epochs,
            learning_rate=options.learning_rate,
            gamma=0.99,
            gae_lambda=0.95,
            ent_coef=0.0,
            seed=options.seed,
            device=options.device,
            policy_kwargs={
                "lstm_hidden_size": options.hidden_size,
                "net_arch": [],
                **encoder,
                **lstms,
            },
        )
        if options.accelerate:
            importlib.import_module("recurl").accelerate(self.model.policy)
        self.total, self.callback = self.model._setup_learn(10**9, None)
        self.callback.on_training_start({}, {})
        self.parameters = sum(parameter.numel() for parameter in self.model.policy.parameters())
        self.versions = {
            "torch": torch.__version__,
            "sb3-contrib": sb3_contrib.__version__,
            "stable-baselines3": stable_baselines3.__version__,
        }
        self.finished = environments.finished

    def collect(self) -> int:
        before = self.model.num_timesteps
        buffer = self.model.rollout_buffer
        self.model.collect_rollouts(self.model.env, self.callback, buffer, n_rollout_steps=self.model.n_steps)
        self.model._update_current_progress_remaining(self.model.num_timesteps, self.total)
        return self.model.num_timesteps - before

    def learn(self) -> None:
        self.model.train()


if __name__ == "__main__":
    run(parser().parse_args(), SB3)
