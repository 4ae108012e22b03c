"""Checkpoints of format 2 as written by the first version, without a table of contents."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recurl.trainers import RunFolder, Trainer, evaluate_run, export_run
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

RUNS = Path(__file__).with_name("format_2")


@pytest.fixture(params=["ppo", "overlap", "dqn", "r2d2"])
def folder(request, tmp_path):
    shutil.copytree(RUNS / request.param, tmp_path / "run")
    return RunFolder(tmp_path / "run", pytest.fail)


def test_are_of_the_first_version(folder):
    state = torch.load(latest_checkpoint(folder.checkpoints), weights_only=True)
    assert "contents" not in state
    assert "skipped" not in folder.metrics.read_text()


@pytest.mark.usefixtures("shared_interpreter")
def test_runs_are_resumed(folder):
    before = folder.metrics.read_text().splitlines()
    out = io.StringIO()
    trainer = Trainer(folder.read_config(), folder, console=Console(file=out))
    trainer.resume()
    outcome = trainer.run()
    trainer.close()
    assert (outcome.status, outcome.env_steps) == ("finished", 160)
    assert "Notice" not in out.getvalue()
    header, *rows = folder.metrics.read_text().splitlines()
    assert [row.split(",")[:3] for row in rows[:-1]] == [row.split(",")[:3] for row in before[1:-1]]
    assert "skipped" in header
    assert rows[-1].startswith("10,160,")
    assert [path.stem for path in sorted(folder.checkpoints.iterdir())] == ["000000000144", "000000000160"]


@pytest.mark.usefixtures("brief_verification")
def test_are_evaluated_and_exported(folder):
    assert len(evaluate_run(folder, episodes=3).returns) == 3
    assert export_run(folder, "torch").exists()
    assert load_checkpoint(latest_checkpoint(folder.checkpoints))["algorithm"]["agent"]
