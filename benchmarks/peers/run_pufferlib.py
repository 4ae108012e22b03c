"""PufferLib 3.0's trainer with its LSTMWrapper, gymnasium emulation and Serial vectorization.

The dashboard, which is redrawn on a timer, is off. PufferLib doesn't reset hidden states where an episode ends.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")
# PufferLib takes an nvcc on the PATH as a sign that its CUDA kernel was built.
os.environ["PATH"] = os.pathsep.join(
    folder for folder in os.environ["PATH"].split(os.pathsep) if not os.path.exists(os.path.join(folder, "nvcc"))
)

import numpy as np  # noqa: E402 - after the path is set
import pufferlib  # noqa: E402 - after the path is set
import torch  # noqa: E402 - after the path is set
from harness import Environments, parser, run  # noqa: E402 - after the path is set
from pufferlib import emulation, models, pufferl, vector  # noqa: E402 - after the path is set


class Puffer:
    """``PuffeRL``: ``evaluate`` collects, ``train`` learns."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        environments = Environments(options)

        def creator(buf: Any = None, seed: int = 0) -> emulation.GymnasiumPufferEnv:
            return emulation.GymnasiumPufferEnv(env=environments.make(), buf=buf, seed=seed)

        env = vector.make(creator, backend=vector.Serial, num_envs=options.num_envs)
        size = options.hidden_size
        base = models.Default(env.driver_env, hidden_size=size)
        policy = models.LSTMWrapper(env.driver_env, base, input_size=size, hidden_size=size)
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer = pufferl.PuffeRL(settings(options), env, policy)
        self.trainer.last_log_time = math.inf
        self.parameters = sum(parameter.numel() for parameter in policy.parameters())
        self.versions = {"torch": torch.__version__, "numpy": np.__version__, "pufferlib": str(pufferlib.__version__)}
        self.finished = environments.finished

    def collect(self) -> int:
        before = self.trainer.global_step
        self.trainer.evaluate()
        return self.trainer.global_step - before

    def learn(self) -> None:
        self.trainer.train()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """All options of PufferLib's configuration file, with the values shared by all peers."""
    batch = options.num_envs * options.rollout_steps
    minibatch = batch // options.minibatches
    return {
        "env": options.task,
        "use_rnn": True,
        "seed": options.seed,
        "device": "cpu",
        "precision": "float32",
        "torch_deterministic": True,
        "cpu_offload": False,
        "compile": False,
        "data_dir": "",
        "anneal_lr": False,
        "optimizer": "adam",
        "learning_rate": options.learning_rate,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-5,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_coef": 0.2,
        "vf_coef": 0.5,
        "vf_clip_coef": 10.0,
        "ent_coef": 0.0,
        "max_grad_norm": 0.5,
        "vtrace_rho_clip": 1.0,
        "vtrace_c_clip": 1.0,
        "prio_alpha": 0.0,
        "prio_beta0": 1.0,
        "total_timesteps": 10**9,
        "checkpoint_interval": 10**9,
        "update_epochs": options.epochs,
        "batch_size": batch,
        "minibatch_size": minibatch,
        "max_minibatch_size": max(batch, 32768),
        "bptt_horizon": min(options.rollout_steps, minibatch),
    }


def main() -> None:
    run(parser().parse_args(), Puffer)
    sys.stdout.flush()
    os._exit(0)  # PufferLib's monitoring thread never ends


if __name__ == "__main__":
    main()
