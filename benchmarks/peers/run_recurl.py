"""recurl as ``recurl train`` runs it, including metrics, TensorBoard events and checkpoints."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensordict
import torch
from harness import FRAMES, SOLVED, Stopwatch, about, next_order, parser, say
from rich.console import Console
from stages import STAGES, StageSampler

import recurl
from recurl.trainers import DQN, PPO, PPOConfig, R2D2Config, RunConfig, RunFolder, Trainer

ENVS = {
    "cartpole": "recurl/MaskedCartPole-v1",
    "pendulum": "recurl/MaskedPendulum-v1",
    "r2d2": "recurl/MaskedCartPole-v1",
    "frames": f"harness:{FRAMES}",
}
NATURE = {"encoder": "nature", "encoder_width": 512}
"""Nature DQN's network, as in Stable-Baselines3."""


def main() -> None:
    options = parser()
    options.add_argument("--profile", type=int, default=0, help="profile this number of training steps by stage")
    options.add_argument("--top", type=int, default=0, help="hottest lines of code to print per stage of the profile")
    chosen = options.parse_args()
    if chosen.solve:
        say(solve(chosen) | described(configure(chosen)))
    elif chosen.profile:
        profile(chosen)
    else:
        serve(chosen)


def configure(options: argparse.Namespace, **changes: Any) -> RunConfig:
    """Return the options of a run: recurl's defaults except where all peers share a value."""
    common: dict[str, Any] = {"env": ENVS[options.task], "hidden_size": options.hidden_size, "seed": options.seed}
    common |= {"total_steps": 10**8, "threads": options.threads, "device": "cpu"}
    common["num_envs"] = options.num_envs
    if options.task == "r2d2":
        return R2D2Config(**(common | changes))
    common |= NATURE if options.task == "frames" else {}
    common |= {"rollout_steps": options.rollout_steps, "epochs": options.epochs}
    common |= {"minibatches": options.minibatches, "learning_rate": options.learning_rate, "shared_trunk": True}
    return PPOConfig(**(common | changes))


def make(config: RunConfig) -> PPO | DQN:
    return PPO(config) if isinstance(config, PPOConfig) else DQN(config)


def described(config: RunConfig) -> dict[str, Any]:
    """Description of recurl as a peer."""
    learner = make(config)
    learner.close()
    parameters = sum(parameter.numel() for parameter in learner.agent.parameters())
    return about(
        parameters, {"recurl": recurl.__version__, "torch": torch.__version__, "tensordict": tensordict.__version__}
    )


def serve(options: argparse.Namespace) -> None:
    """Time the commands from standard input.

    Collection uses a separate learner. Training happens inside a run that blocks between commands.
    """
    config = configure(options)
    collector = make(config)
    while collector.env_steps < options.warmup:
        collector.learn(collector.collect())
    wanted, steps, watch = options.warmup, 0, Stopwatch()
    warm = False

    def after_update() -> bool:
        nonlocal wanted, steps, watch, warm
        steps += config.frames_per_batch
        if steps < wanted:
            return False
        say(watch.read(steps) if warm else described(config))
        warm = True
        while (order := next_order()) is not None and order[0] == "collect":
            say(collect(collector, order[1]))
        wanted, steps, watch = order[1] if order else 0, 0, Stopwatch()
        return order is None

    train(config, after_update)
    collector.close()


def collect(learner: PPO | DQN, steps: int) -> dict[str, float]:
    before, watch = learner.env_steps, Stopwatch()
    while learner.env_steps < before + steps:
        learner.collect()
    return watch.read(learner.env_steps - before)


def train(config: RunConfig, after_update: Callable[[], bool]) -> None:
    """Train until ``after_update`` returns True."""
    with tempfile.TemporaryDirectory() as name:
        trainer = start(config, Path(name))
        trainer.run(after_update)
        trainer.close()


def start(config: RunConfig, place: Path) -> Trainer:
    folder = RunFolder(place / "run")
    folder.create(config)
    return Trainer(config, folder, console=Console(quiet=True))


def solve(options: argparse.Namespace) -> dict[str, float | bool]:
    """Train until solved."""
    with tempfile.TemporaryDirectory() as name:
        trainer = start(configure(options, total_steps=options.solve, stop_return=SOLVED), Path(name))
        outcome = trainer.run()
        trainer.close()
    times = {"steps": outcome.env_steps, "cpu_s": outcome.cpu_s, "wall_s": outcome.wall_s}
    return {**times, "solved": outcome.status == "solved"}


def profile(options: argparse.Namespace) -> None:
    """Print the CPU time per stage of training."""
    config, sampler = configure(options), StageSampler()
    updates = 0
    first = -(-options.warmup // config.frames_per_batch)
    last = first - (-options.profile // config.frames_per_batch)

    def after_update() -> bool:
        nonlocal updates
        updates += 1
        if updates == first:
            sampler.start()
        elif updates == last:
            sampler.stop()
        return updates == last

    train(config, after_update)
    steps, total = (last - first) * config.frames_per_batch, sum(sampler.seconds.values())
    print(f"{options.task}, {config.num_envs} environments, {steps} steps: CPU per environment step")
    print(f"{'all':16s} {total / steps * 1e6:8.1f} us")
    for stage in STAGES:
        part = sampler.seconds[stage]
        print(f"{stage:16s} {part / steps * 1e6:8.1f} us {part / total:7.1%}")
        hottest = [(used, line) for (owner, line), used in sampler.lines.most_common() if owner == stage]
        for used, line in hottest[: options.top]:
            print(f"{'':16s} {used / steps * 1e6:8.1f}    {line}")


if __name__ == "__main__":
    main()
