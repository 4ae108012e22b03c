import json

import pytest

from recurl.cli import main
from recurl.trainers import PPOConfig, evaluate_run
from tests.trainers.small_runs import trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), PPOConfig, "recurl/RepeatPrevious-v0", {"cell": "gru"})


def test_a_table(run, capsys):
    assert main(["evaluate", str(run.path), "--episodes", "6", "--seed", "1", "--max-steps", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = evaluate_run(run, episodes=6, seed=1, max_steps=9)
    assert lines[0] == "Greedy evaluation over 6 episodes"
    (row,) = [line for line in lines if "return" in line]
    low, high = found.to_dict()["return"]["interval"]
    assert f"{found.mean_return:.4g}" in row
    assert f"{low:.4g} to {high:.4g}" in row
    assert any("95% interval" in line and "std" in line for line in lines)
    assert lines[-2:] == [
        "95% interval: percentile bootstrap of the mean, 10,000 resamples",
        "6 of 6 episodes were cut after 9 steps",
    ]


@pytest.mark.parametrize("stochastic", [False, True])
def test_json(run, capsys, stochastic):
    options = ["--stochastic"] if stochastic else []
    assert main(["evaluate", str(run.path), "--episodes", "3", "--seed", "1", "--json", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    found = evaluate_run(run, episodes=3, seed=1, deterministic=not stochastic)
    assert said == {"run": str(run.path), "checkpoint": "newest", **found.to_dict()}
    assert said["deterministic"] is not stochastic


@pytest.mark.parametrize("command", ["evaluate", "play", "export"])
def test_a_checkpoint_that_is_not_there(run, capsys, command):
    assert main([command, str(run.path), "--checkpoint", "best"]) == 2
    assert "has no best checkpoint, which recurl train --eval-every" in capsys.readouterr().err
    assert main([command, str(run.path), "--checkpoint", "oldest"]) == 2
    assert "invalid choice 'oldest' for argument '--checkpoint'" in capsys.readouterr().err
