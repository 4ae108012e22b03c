"""A run that is killed repeatedly ends like an uninterrupted one. Hundreds of kills: benchmarks/torture.py."""

import csv
import subprocess
import sys
import time

import pytest
import torch

from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint

pytestmark = pytest.mark.slow

TASK = "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 2 --rollout-steps 8"
WORDS = {
    "ppo": "ppo --sequence-length 4 --minibatches 2",
    "r2d2": "r2d2 --slices 2 --slice-length 6 --burn-in 2 --learning-starts 32 --buffer-size 128",
}


def rows(folder):
    with folder.metrics.open(newline="") as file:
        read = list(csv.DictReader(file))
    return [
        {name: value for name, value in row.items() if name not in ("wall_s", "cpu_s", "steps_per_s")} for row in read
    ]


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["ppo", "r2d2"])
def test_ends_as_one_that_was_left_alone(tmp_path, programs, algorithm):
    def start(words):
        return programs.Popen([sys.executable, "-m", "recurl", *words], stdout=subprocess.DEVNULL)

    whole, folder = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    words = ["train", *WORDS[algorithm].split(), *TASK.split(), "--total-steps", 384, "--checkpoint-every", 1]
    words += ["--eval-episodes", 1, "--run-dir"]
    assert start([*words, whole.path]).wait() == 0
    for kill in range(4):
        again = any(folder.checkpoints.glob("*.pt"))
        updates = len(rows(folder)) if again else 0
        run = start(["train", "--resume", folder.path] if again else [*words, folder.path, "--overwrite"])
        deadline = time.monotonic() + 60
        while not folder.metrics.exists() or len(rows(folder)) < min(updates + 2 + kill, 24):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        run.kill()
        assert run.wait() in (-9, 0)
    assert start(["train", "--resume", folder.path]).wait() == 0
    assert rows(folder) == rows(whole)
    assert len(rows(folder)) == 24
    agents = [load_checkpoint(latest_checkpoint(run.checkpoints))["algorithm"]["agent"] for run in (folder, whole)]
    assert all(torch.equal(agents[0][name], agents[1][name]) for name in agents[1])
    assert not list(folder.path.rglob("*.partial"))
