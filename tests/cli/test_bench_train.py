import csv
import re
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from recurl.cli import main
from recurl.trainers import machine

SMALL = "--env recurl/RepeatPrevious-v0 --hidden-size 8 --num-envs 4 --rollout-steps 16 --warm-up 1 --updates 2"


def test_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "split.csv"
    assert main(["bench", "train", "ppo", *SMALL.split(), "--csv", str(path)]) == 0
    said = capsys.readouterr().out
    assert "ppo with lstm 8 on recurl/RepeatPrevious-v0, 4 environments x 16 steps" in said
    assert re.search(r"all .* (9[5-9]|10[0-5])\.\d%", said)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [row["part"] for row in rows]
    assert parts[:2] == ["acting", "environment"]
    assert {"advantages", "optimiser", "rest"} <= set(parts)
    assert {"forward", "backward"} <= set(parts) or "forward and backward (one program)" in parts
    assert all(part in said for part in parts)
    assert sum(float(row["ms"]) for row in rows) == pytest.approx(float(rows[0]["update_ms"]), rel=0.05)
    assert {row["gpu_busy_ms"] for row in rows} == {""}


def test_takes_a_preset_and_more_steps_than_the_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench train --preset masked-cartpole --total-steps 2048 --warm-up 2 --updates 2 --hidden-size 8"
    assert main(words.split()) == 0
    assert "recurl/MaskedCartPole-v1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "recurl bench train needs an algorithm (ppo, "),
        ("--updates 3", "recurl bench train needs an algorithm (ppo, "),
        ("pqo", "There is no algorithm 'pqo'"),
        ("ppo --env recurl/TMaze-v0 --updates 0", "--updates must be positive, got 0"),
        ("ppo --env recurl/TMaze-v0 --warm-up -1", "--warm-up must be positive, got -1"),
        ("ppo --env recurl/TMaze-v0 --run-dir x", "--run-dir"),
        ("ppo --env recurl/TMaze-v0 --csv {tmp}/none/x.csv", "--csv must be a regular file that can be written"),
        ("ppo --env recurl/TMaze-v0 --csv {tmp}", "--csv must be a regular file that can be written"),
        ("ppo --env nothing-v0", "nothing-v0"),
        ("ppo --env recurl/TMaze-v0 --env-groups 2", "--env-groups 2 needs --env-workers, and --num-envs must be"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(["bench", "train", *words.format(tmp=tmp_path).split()]) == 2
    out, said = capsys.readouterr()
    assert len(said.splitlines()) == 1
    assert message in said
    assert out == "", "nothing was timed"


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose step takes a millisecond."""

    def step(self, action: Any) -> Any:
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass
        return self.env.step(action)


def test_says_what_workers_would_gain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "core_count", lambda: 4)
    task = f"--env CartPole-v1 --wrapper {__name__}:Slow"
    words = f"bench train ppo {SMALL.replace('--env recurl/RepeatPrevious-v0', task)}"
    assert main(words.split()) == 0
    found = re.search(
        r"With --env-workers 4, .* instead of (\S+) ms of an update: (\S+) times", capsys.readouterr().out
    )
    assert found
    assert float(found[1]) > 4 * 16, "a millisecond for each of 4 environments and 16 steps"
    assert 1.5 < float(found[2]) < 4
    assert main([*words.split(), "--env-workers", "2"]) == 0
    assert "With --env-workers" not in capsys.readouterr().out, "they are in workers already"


def test_says_nothing_of_workers_that_gain_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "ppo", *SMALL.split()]) == 0
    assert "With --env-workers" not in capsys.readouterr().out
