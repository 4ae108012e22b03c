"""Runs that are stopped and resumed, compared with uninterrupted runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch
from rich.console import Console

from recurl.trainers import PPOConfig, RunFolder, Trainer
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint

CLOCKS = ("wall_s", "cpu_s", "steps_per_s")


def small(**options: object) -> PPOConfig:
    return PPOConfig(
        **{
            "hidden_size": 8,
            "num_envs": 2,
            "rollout_steps": 24,
            "sequence_length": 8,
            "minibatches": 2,
            "total_steps": 384,
            "checkpoint_every": 100,
            "gae_lambda": 0.9,
            **options,
        }
    )


def train(config: PPOConfig, path: Path, *, resume: bool = False, stop_after: int | None = None) -> str:
    """Train in ``path`` and return the output."""
    out, folder = io.StringIO(), RunFolder(path)
    trainer = Trainer(config, folder, console=Console(file=out))
    try:
        if resume:
            trainer.resume()
        else:
            folder.create(config)
        updates = iter(range(1, 1000))
        trainer.run(lambda: next(updates) == stop_after)
    finally:
        trainer.close()
    return out.getvalue()


def rows(path: Path) -> list[dict[str, str]]:
    with RunFolder(path).metrics.open(newline="") as file:
        found = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in found]


def assert_resumes_bit_for_bit(config: PPOConfig, path: Path, *, stop_after: int = 3) -> None:
    """Train without and with an interruption; rows and weights must be the same."""
    train(config, path / "whole")
    train(config, path / "parts", stop_after=stop_after)
    assert len(rows(path / "parts")) == stop_after
    assert "Notice" not in train(config, path / "parts", resume=True)
    assert rows(path / "parts") == rows(path / "whole")
    one, other = (
        load_checkpoint(latest_checkpoint(RunFolder(path / name).checkpoints))["algorithm"]["agent"]
        for name in ("whole", "parts")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
