"""Evaluations during training: schedule, environments, best policy, and stopping."""

import csv

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.trainers import DQNConfig, PPOConfig, RunFolder
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.trainers.run.test_trainer import config, differing, final_state, metrics, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

EVALUATED = {"eval_every": 128, "eval_episodes": 3}


def rows(path):
    with RunFolder(path).evaluations.open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "eval_s"} for row in csv.DictReader(file)]


def test_come_when_they_are_due(tmp_path):
    train(config(eval_every=100, eval_episodes=3), tmp_path)
    found = rows(tmp_path)
    assert [int(row["env_steps"]) for row in found] == [128, 256, 320, 384]  # past 100, 200, 300, and at the end
    assert {row["eval_episodes"] for row in found} == {"3"}
    assert {row["eval_length"] for row in found} == {"11.0"}


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig])
def test_a_resumed_run_has_the_same_evaluations(tmp_path, kind):
    options = config(kind, keep_best=True, **EVALUATED)
    train(options, tmp_path / "whole")
    train(options, tmp_path / "half", stop_after=3)
    _, printed = train(options, tmp_path / "half", resume=True)
    assert "Notice" not in printed
    assert rows(tmp_path / "half") == rows(tmp_path / "whole")
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    assert differing(final_state(tmp_path / "half"), final_state(tmp_path / "whole")) == []
    best = [load_checkpoint(latest_checkpoint(RunFolder(tmp_path / name).best)) for name in ("half", "whole")]
    assert differing(*best) == []


def test_lost_rows_are_reported(tmp_path):
    options = config(**EVALUATED)
    train(options, tmp_path, stop_after=5)
    RunFolder(tmp_path).evaluations.unlink()
    _, printed = train(options, tmp_path, resume=True)
    assert "evaluations.csv contains rows for 0 of the 2 evaluations before the checkpoint" in printed


def test_the_best_policy_is_kept(tmp_path):
    train(config(keep_best=True, **EVALUATED), tmp_path)
    found = rows(tmp_path)
    best = max(found, key=lambda row: float(row["eval_return"]))
    (path,) = RunFolder(tmp_path).best.iterdir()
    assert int(path.stem) == int(best["env_steps"])
    state = load_checkpoint(path)
    assert state["eval_return"] == float(best["eval_return"])
    last = load_checkpoint(latest_checkpoint(RunFolder(tmp_path).checkpoints))["algorithm"]["agent"]
    assert state["algorithm"]["agent"].keys() == last.keys()
    same = all(torch.equal(last[name], value) for name, value in state["algorithm"]["agent"].items())
    assert same == (best["env_steps"] == "384")


def test_the_return_of_an_evaluation_ends_the_run_and_it_stays_so(tmp_path):
    options = config(stop_eval_return=-10.0, **EVALUATED)
    outcome, _ = train(options, tmp_path)
    assert (outcome.status, outcome.env_steps) == ("solved", 128)
    again, _ = train(options, tmp_path, resume=True)
    assert (again.status, again.env_steps) == ("solved", 128)


def test_training_returns_end_a_run_without_one(tmp_path):
    outcome, _ = train(config(stop_return=0.0, stop_eval_return=1e6, **EVALUATED), tmp_path)
    assert outcome.status == "solved"


def test_other_arguments_of_the_environment(tmp_path):
    train(config(eval_env_kwargs=("episode_length=17",), **EVALUATED), tmp_path)
    assert {row["eval_length"] for row in rows(tmp_path)} == {"17.0"}


def test_another_environment():
    options = config(eval_env="recurl/TMaze-v0", eval_env_kwargs=("corridor_length=3",))
    assert (options.for_evaluation().env, options.for_evaluation().env_kwargs) == (
        "recurl/TMaze-v0",
        ("corridor_length=3",),
    )
    same = config(eval_env_kwargs=("k=3",))
    assert same.for_evaluation().env_kwargs == ("k=3", "episode_length=11")
    assert config().for_evaluation() == config()


@pytest.mark.parametrize("every", [None, 128])
def test_an_environment_with_other_spaces_is_refused(tmp_path, every):
    words = (
        r"The evaluation environment \(--eval-env, --eval-env-kwargs\) must have the same observations as the training"
    )
    with pytest.raises(ArgumentError, match=words):
        train(config(eval_env="recurl/MaskedCartPole-v1", eval_every=every), tmp_path)
    with pytest.raises(ArgumentError, match="--env NoSuch-v0 can't be used"):
        train(config(eval_env="NoSuch-v0"), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_best": True}, "--keep-best needs evaluations during training: add --eval-every STEPS"),
        ({"stop_eval_return": 1.0}, "--stop-eval-return needs evaluations during training"),
        ({"eval_every": 0}, "--eval-every must be positive, got 0"),
        ({"eval_env_kwargs": ("k",)}, "--eval-env-kwargs takes name=value, such as k=8, got 'k'"),
        ({"eval_env_kwargs": ("k=1", "k=2")}, "--eval-env-kwargs got k twice"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ArgumentError, match=message):
        config(**options)
