from __future__ import annotations

import csv
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recurl.cli import main
from recurl.collectors import RayCollector
from recurl.core.errors import ArgumentError
from recurl.trainers import A2CConfig, ImpalaConfig, PPOConfig, R2D2Config, RunFolder, SACConfig, Trainer
from recurl.trainers.checkpoint import latest_checkpoint
from recurl.trainers.run.callbacks import Callbacks
from recurl.trainers.run.faults import FaultWatch
from recurl.trainers.run.outcome import Clock
from recurl.trainers.run.updates import Updates

pytestmark = pytest.mark.slow

ENV = "recurl/MaskedCartPole-v1"
SIZE = {"hidden_size": 4, "num_envs": 4, "rollout_steps": 8, "collectors": "ray:2", "logger": "none"}


def trainer_of(config, path: Path) -> Trainer:
    folder = RunFolder(path)
    folder.create(config)
    return Trainer(config, folder, console=Console(quiet=True))


def rows_of(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.full
def test_a_run_resumes_exactly_and_survives_an_actor(ray_cluster, tmp_path: Path) -> None:
    config = ImpalaConfig(env=ENV, total_steps=5 * 32, checkpoint_every=3, **SIZE)
    trainer = trainer_of(config, tmp_path / "whole")
    trainer.run()
    whole = {name: value.clone() for name, value in trainer.algorithm.agent.state_dict().items()}
    rows = rows_of(tmp_path / "whole")
    assert [row["lag_max"] for row in rows] == ["0.0", "1.0", "1.0", "1.0", "1.0"]
    assert rows[-1]["actors_replaced"] == "0"
    trainer.close()

    part = RunFolder(shutil.copytree(tmp_path / "whole", tmp_path / "part"))
    latest_checkpoint(part.checkpoints).unlink()  # as after a kill at the third or fourth update
    second = Trainer(config, part, console=Console(quiet=True))
    second.resume()
    second.run()
    found = second.algorithm.agent.state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.items())

    collector = second.algorithm.collector
    assert isinstance(collector, RayCollector)
    assert collector.replacements == []
    os.kill(collector.processes[1], signal.SIGKILL)
    with pytest.warns(UserWarning, match="Collector actor 1 died and is replaced"):
        rows = updates_until_replaced(second)
    assert rows[-1]["actors_replaced"] == 1
    assert rows[-1]["frames_lost"] == 16
    second.close()


class Rows(list):
    """Callback that records the rows of updates."""

    on_update = list.append


def updates_until_replaced(trainer: Trainer) -> list[dict[str, float]]:
    rows, callbacks = Rows(), Callbacks()
    callbacks.add(rows)
    watch = FaultWatch(trainer.algorithm, trainer.stats, skip=False)
    updates, clock = Updates(trainer.algorithm, trainer.stats, watch, callbacks), Clock(0.0, 0.0)
    while not (rows and rows[-1]["actors_replaced"]):
        updates.make(clock, len(rows) + 1)
    return rows


@pytest.mark.full
@pytest.mark.parametrize(("kind", "actors"), [(PPOConfig, 1), (R2D2Config, 2)])
def test_algorithms_learn_from_actors(ray_cluster, tmp_path: Path, kind: type, actors: int) -> None:
    own = {PPOConfig: {"sequence_length": 4, "minibatches": 2}}.get(kind, {"learning_starts": 32, "gradient_steps": 1})
    config = kind(env=ENV, total_steps=3 * 32, **{**SIZE, **own, "collectors": f"ray:{actors}"})
    trainer = trainer_of(config, tmp_path / "run")
    trainer.run()
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 3
    lag = "0.0" if kind is PPOConfig else "1.0"
    assert rows[-1]["lag_max"] == lag
    if kind is R2D2Config:
        assert float(rows[-1]["eps"]) == pytest.approx((0.4 + 0.4**8) / 2)
    trainer.close()


@pytest.mark.full
def test_the_command(ray_cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "ppo", "--env", ENV, "--run-dir", str(tmp_path / "run"), "--collectors"]
    assert main([*words, "ray:2", "--num-envs", "3"]) == 2
    assert "must divide --num-envs, got 2 and 3: use 1, 3." in capsys.readouterr().err
    assert main([*words, "ray:400", "--num-envs", "400", "--ray-address", "auto"]) == 2
    said = capsys.readouterr().err
    assert "400 actors need 400 CPUs of the Ray cluster, but 4 of its 4 are free" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "error_line"),
    [
        ({"collectors": "8"}, r"--collectors takes ray:N, such as ray:8 for eight actors, got '8'"),
        ({"collectors": "ray:3"}, r"must divide --num-envs, got 3 and 8: use 1, 2, 4, 8"),
        ({"collectors": "ray:2", "env_workers": 2}, "leave out --env-workers and --overlap"),
        ({"collectors": "ray:2", "overlap": True}, "leave out --env-workers and --overlap"),
        ({"collectors": "ray:2", "max_lag": 2, "on_nonfinite": "skip"}, "skip needs --max-lag 0 or 1 .*, got 2"),
        ({"max_lag": 1}, "--max-lag applies to actors only: add --collectors"),
        ({"ray_address": "auto"}, "--ray-address applies to actors only: add --collectors"),
    ],
)
def test_options_that_do_not_fit(options: dict, error_line: str) -> None:
    with pytest.raises(ArgumentError, match=error_line):
        PPOConfig(env=ENV, **options)


def test_lags_that_algorithms_take() -> None:
    lags = [kind(env=ENV, **SIZE).lag for kind in (A2CConfig, PPOConfig, ImpalaConfig, SACConfig, R2D2Config)]
    assert lags == [0, 0, 1, 1, 1]
    with pytest.raises(ArgumentError, match=r"a2c doesn't correct for older weights: --max-lag .* at most 0, got 1"):
        A2CConfig(env=ENV, **{**SIZE, "max_lag": 1})
