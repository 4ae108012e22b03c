"""Recurrent PPO from end to end: CPU time per environment step.

Usage::

    python benchmarks/bench_ppo.py --profile                  # where recurl's time goes, stage by stage
    python benchmarks/bench_ppo.py --profile --top 3          # and the three hottest lines of each stage
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console

from recurl.trainers import PPOConfig, RunFolder, Trainer
from stages import STAGES, StageSampler

ENVS = {"cartpole": "recurl/MaskedCartPole-v1"}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="recurl's stages")
    parser.add_argument("--task", choices=sorted(ENVS), default="cartpole")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16384, help="environment steps that are measured")
    parser.add_argument("--warmup", type=int, default=4096, help="environment steps before")
    parser.add_argument("--top", type=int, default=0, help="lines of code to show for each stage of a profile")
    options = parser.parse_args()
    if options.profile:
        profile(options)


def profile(options: argparse.Namespace) -> None:
    """Print the CPU time of every stage of a training run."""
    sampler, seconds, steps = sample_training(options)
    print(f"{options.task}, {options.num_envs} environments: {seconds / steps * 1e6:.1f} us CPU per environment step")
    total = sum(sampler.seconds.values())
    for stage in STAGES:
        part = sampler.seconds[stage]
        print(f"{stage:16s} {part / steps * 1e6:8.1f} us {part / total:7.1%}")
        hottest = [(used, line) for (owner, line), used in sampler.lines.most_common() if owner == stage]
        for used, line in hottest[: options.top]:
            print(f"{'':16s} {used / steps * 1e6:8.1f}    {line}")


def sample_training(options: argparse.Namespace) -> tuple[StageSampler, float, int]:
    """Train; return the samples, the CPU seconds and the environment steps after the warm-up."""
    config = PPOConfig(env=ENVS[options.task], num_envs=options.num_envs, total_steps=options.warmup + options.steps)
    warm_updates = -(-options.warmup // config.frames_per_batch)
    sampler = StageSampler()
    updates, start, seconds = 0, 0.0, 0.0

    def after_update() -> bool:
        nonlocal updates, start, seconds
        updates += 1
        if updates == warm_updates:
            sampler.start()
            start = time.process_time()
        elif updates == config.updates:
            seconds = time.process_time() - start
            sampler.stop()
        return False

    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        folder.create(config)
        trainer = Trainer(config, folder, console=Console(quiet=True))
        try:
            trainer.run(after_update)
        finally:
            trainer.close()
    return sampler, seconds, (updates - warm_updates) * config.frames_per_batch


if __name__ == "__main__":
    main()
