"""RLlib's PPO with an LSTM on sleeping environments, for bench_scale.py; prints a line of JSON per number of actors.

RLlib requires a different gymnasium version from recurl's, so it needs a separate interpreter::

    python3 -m venv ~/rllib && ~/rllib/bin/pip install torch==2.13.0 'ray[rllib]==2.60.0'
    python benchmarks/bench_scale.py --rllib ~/rllib/bin/python
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from typing import Any

import gymnasium as gym
import ray
import sleeping
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune import register_env


def make(context: Any) -> sleeping.Sleeping:
    return sleeping.Sleeping(context["num_envs"], autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)


def config_of(actors: int, hidden_size: int) -> PPOConfig:
    steps = actors * sleeping.ROWS * sleeping.STEPS
    model = DefaultModelConfig(
        fcnet_hiddens=[hidden_size], use_lstm=True, lstm_cell_size=hidden_size, max_seq_len=sleeping.STEPS
    )
    return (
        PPOConfig()
        .environment("sleeping")
        .env_runners(
            num_env_runners=actors,
            num_envs_per_env_runner=sleeping.ROWS,
            rollout_fragment_length=sleeping.STEPS,
            gym_env_vectorize_mode="vector_entry_point",
        )
        .learners(num_learners=0)
        .rl_module(model_config=model)
        .training(train_batch_size_per_learner=steps, minibatch_size=steps // 4, num_epochs=1)
        .debugging(log_level="ERROR")
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args()
    ray.init("local", num_cpus=2 * max(options.actors) + 2, include_dashboard=False, logging_level=logging.ERROR)
    register_env("sleeping", make)
    for actors in options.actors:
        algorithm = config_of(actors, options.hidden_size).build_algo()
        for _ in range(2):
            algorithm.train()
        begin, before = time.perf_counter(), sampled(algorithm)
        for _ in range(options.batches):
            algorithm.train()
        rate = (sampled(algorithm) - before) / sleeping.ROWS / (time.perf_counter() - begin)
        print(json.dumps({"actors": actors, "steps_per_s": rate, "rllib": ray.__version__}), flush=True)
        algorithm.stop()


def sampled(algorithm: Any) -> int:
    return int(algorithm.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime")))


if __name__ == "__main__":
    main()
