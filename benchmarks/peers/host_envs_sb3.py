"""SB3-Contrib's RecurrentPPO on the environments of bench_host_envs.py, each in a separate process (SubprocVecEnv).

Times whole updates on a CPU, acting and learning included, and prints frames per second. Usage, on an idle machine::

    python benchmarks/peers/host_envs_sb3.py --num-envs 8 --steps 32
    python benchmarks/bench_host_envs.py --device cpu --workers 2 --num-envs 8 --steps 32 --only workers
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import gymnasium as gym
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import SubprocVecEnv

sys.path.insert(0, str(Path(__file__).parents[1]))
from spinning import Spin


def make() -> gym.Env:
    return Spin(gym.make("CartPole-v1"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--updates", type=int, default=10, help="number of timed updates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    env = SubprocVecEnv([make] * options.num_envs, start_method="spawn")
    frames = options.num_envs * options.steps
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=options.steps,
        batch_size=frames // 4,
        n_epochs=4,
        device="cpu",
        policy_kwargs={
            "lstm_hidden_size": options.hidden,
            "net_arch": [],
            "enable_critic_lstm": False,
            "shared_lstm": True,
        },
    )
    model.learn(3 * frames)
    start = time.perf_counter()
    model.learn(options.updates * frames)
    seconds = time.perf_counter() - start
    env.close()
    print(f"RecurrentPPO, {options.num_envs} processes: {options.updates * frames / seconds:,.0f} frames/s")


if __name__ == "__main__":
    main()
