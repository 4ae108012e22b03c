"""recurl as ``recurl train`` runs it, with the logging, the TensorBoard events and the checkpoints of a run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import tensordict
import torch
from harness import SOLVED, Masked, Stopwatch, parser, report
from rich.console import Console
from stages import STAGES, StageSampler

import recurl
from recurl.trainers import DQN, PPO, PPOConfig, R2D2Config, RunConfig, RunFolder, Trainer

gymnasium.register("MaskedPendulum-v1", lambda: Masked("pendulum", []))
ENVS = {"cartpole": "recurl/MaskedCartPole-v1", "pendulum": "MaskedPendulum-v1", "r2d2": "recurl/MaskedCartPole-v1"}
ANNEALED_OVER = 150_000


def main() -> None:
    options = parser()
    options.add_argument("--profile", action="store_true", help="print the CPU time of every stage of training")
    options.add_argument("--top", type=int, default=0, help="lines of code to show for each stage")
    chosen = options.parse_args()
    if chosen.profile:
        profile(chosen)
    elif chosen.solve:
        report(solve(chosen), *about(configure(chosen)))
    else:
        report(collection(chosen) | training(chosen), *about(configure(chosen)))


def configure(options: argparse.Namespace, **changes: Any) -> RunConfig:
    """The run's options: those of the trainers, where peers don't fix them."""
    common: dict[str, Any] = {"env": ENVS[options.task], "hidden_size": options.hidden_size, "seed": options.seed}
    common |= {"total_steps": max(ANNEALED_OVER, 3 * (options.warmup + options.steps)), "threads": options.threads}
    if options.task == "r2d2":
        return R2D2Config(**(common | changes))
    common |= {"num_envs": options.num_envs, "rollout_steps": options.rollout_steps, "epochs": options.epochs}
    common |= {"minibatches": options.minibatches, "learning_rate": options.learning_rate}
    return PPOConfig(**(common | changes))


def about(config: RunConfig) -> tuple[int, dict[str, str]]:
    """The number of parameters, and what recurl stands on."""
    learner = make(config)
    learner.close()
    versions = {"recurl": recurl.__version__, "torch": torch.__version__, "tensordict": tensordict.__version__}
    return sum(parameter.numel() for parameter in learner.agent.actor.parameters()), versions


def make(config: RunConfig) -> PPO | DQN:
    return PPO(config) if isinstance(config, PPOConfig) else DQN(config)


def collection(options: argparse.Namespace) -> dict[str, float]:
    """Time collection alone."""
    learner = make(configure(options))
    while learner.env_steps < options.warmup:
        learner.learn(learner.collect())
    before, watch = learner.env_steps, Stopwatch()
    while learner.env_steps < before + options.steps:
        learner.collect()
    found = watch.read("collect", learner.env_steps - before)
    learner.close()
    return found


def training(options: argparse.Namespace) -> dict[str, float]:
    """Time training."""
    watch = Stopwatch()
    found: dict[str, float] = {}

    def begin() -> None:
        nonlocal watch
        watch = Stopwatch()

    def end(steps: int) -> None:
        nonlocal found
        found = watch.read("train", steps)

    train(options, begin, end)
    return found


def train(options: argparse.Namespace, begin: Callable[[], None], end: Callable[[int], None]) -> None:
    """Train; call ``begin`` after the warm-up, and ``end`` with the steps made since, before the run is closed."""
    config = configure(options)
    batch = config.frames_per_batch
    first = -(-options.warmup // batch)
    last = first - (-options.steps // batch)
    updates = 0

    def after_update() -> bool:
        nonlocal updates
        updates += 1
        if updates == first:
            begin()
        elif updates == last:
            end((last - first) * batch)
        return updates >= last

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
    times = {"train_steps": outcome.env_steps, "train_cpu_s": outcome.cpu_s, "train_wall_s": outcome.wall_s}
    return {**times, "solved": outcome.status == "solved"}


def profile(options: argparse.Namespace) -> None:
    """Print the CPU time of every stage of training."""
    sampler, found = StageSampler(), {}
    watch = Stopwatch()

    def begin() -> None:
        nonlocal watch
        watch = Stopwatch()
        sampler.start()

    def end(steps: int) -> None:
        sampler.stop()
        found.update(watch.read("train", steps))

    train(options, begin, end)
    steps, total = found["train_steps"], sum(sampler.seconds.values())
    print(f"{options.task}, {options.num_envs} environments, {steps} steps: CPU per environment step")
    print(f"{'all':16s} {found['train_cpu_s'] / steps * 1e6:8.1f} us")
    for stage in STAGES:
        part = sampler.seconds[stage]
        print(f"{stage:16s} {part / steps * 1e6:8.1f} us {part / total:7.1%}")
        hottest = [(used, line) for (owner, line), used in sampler.lines.most_common() if owner == stage]
        for used, line in hottest[: options.top]:
            print(f"{'':16s} {used / steps * 1e6:8.1f}    {line}")


if __name__ == "__main__":
    main()
