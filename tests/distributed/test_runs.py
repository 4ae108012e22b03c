"""Runs of several ranks: one folder, one log, checkpoints of all ranks, one end."""

import csv
import math
import shutil

import pytest
import torch

from recurl.trainers import DQNConfig, R2D2Config, RunFolder
from recurl.trainers.algorithms.dqn import DQN
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.distributed import runs

pytestmark = pytest.mark.slow


def rows(path):
    with RunFolder(path).metrics.open(newline="") as file:
        return [
            {name: value for name, value in row.items() if name not in ("wall_s", "cpu_s", "steps_per_s")}
            for row in csv.DictReader(file)
        ]


def same_bits(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_run_over_ranks_is_one_run_and_resumes_bit_for_bit(ranks, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    results = ranks.run(2, runs.train, whole)
    assert [result[:2] for result in results] == [("finished", 384)] * 2
    assert results[0][2] == results[1][2], "the same episodes"
    assert same_bits(results[0][3], results[1][3])
    assert "384/384 steps" in results[0][4]
    assert results[1][4] == ""
    assert rows(whole)[-1]["env_steps"] == "384"
    assert len(rows(whole)) == 12

    stopped = ranks.run(2, runs.train, cut, stop_after=5)
    assert [result[:2] for result in stopped] == [("stopped", 160)] * 2, "if one rank stops, all do"
    state = load_checkpoint(latest_checkpoint(RunFolder(cut).checkpoints))
    assert len(state["ranks"]) == 1
    assert not torch.equal(state["rng"]["torch"], state["ranks"][0]["rng"]["torch"])
    resumed = ranks.run(2, runs.train, cut, resume=True)
    assert all(same_bits(result[3], results[0][3]) for result in resumed)
    assert rows(cut) == rows(whole)


def test_an_adaptive_learning_rate_is_one_and_resumes_bit_for_bit(ranks, tmp_path):
    options = {"learning_rate_schedule": "adaptive", "target_kl": 1e-4}
    results = ranks.run(2, runs.train, tmp_path / "whole", **options)
    assert same_bits(results[0][3], results[1][3])
    ranks.run(2, runs.train, tmp_path / "cut", stop_after=5, **options)
    resumed = ranks.run(2, runs.train, tmp_path / "cut", resume=True)
    assert all(same_bits(result[3], results[0][3]) for result in resumed)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert len({row["learning_rate"] for row in rows(tmp_path / "whole")}) > 2


def test_a_run_of_ranks_starts_from_another_run(ranks, tmp_path):
    ranks.run(1, runs.train, tmp_path / "first")
    results = ranks.run(2, runs.train, tmp_path / "second", init_from=str(tmp_path / "first"))
    assert same_bits(results[0][3], results[1][3])
    assert results[0][4].startswith("Starting from")
    assert results[1][4] == ""


def test_another_number_of_ranks_resumes_with_a_notice(ranks, tmp_path):
    ranks.run(2, runs.train, tmp_path / "run", stop_after=4, total_steps=400)
    results = ranks.run(3, runs.train, tmp_path / "run", resume=True)
    assert [result[:2] for result in results] == [("finished", 368)] * 3, "128 + 5 x 48, no whole update more"
    assert "is of 2 ranks, but this run has 3" in results[0][4]
    assert [row["env_steps"] for row in rows(tmp_path / "run")[3:]] == ["128", "176", "224", "272", "320", "368"]


def test_an_evaluation_is_that_of_rank_0_for_all(ranks, tmp_path):
    options = {"eval_every": 64, "eval_episodes": 4, "stop_eval_return": -1000.0, "keep_best": True}
    results = ranks.run(2, runs.train, tmp_path / "run", **options)
    assert [result[:2] for result in results] == [("solved", 64)] * 2
    assert RunFolder(tmp_path / "run").best.exists()


FAULTY = {"env": "recurl-test/Faulty-v0", "env_kwargs": ("steps=20", "row=3"), "vectorization": "sync"}


def test_nan_on_one_rank_stops_all(ranks, tmp_path):
    results = ranks.run(2, runs.train, tmp_path / "run", **FAULTY)
    assert results[0] == results[1]
    assert results[0].startswith("The reward of environment 1 at step 3 of its batch")
    assert "was nan on rank 1, but only finite numbers" in results[0]


def test_nan_on_one_rank_is_skipped_by_all(ranks, tmp_path):
    results = ranks.run(2, runs.train, tmp_path / "run", on_nonfinite="skip", **FAULTY)
    assert [result[:2] for result in results] == [("finished", 384)] * 2
    assert same_bits(results[0][3], results[1][3])
    found = rows(tmp_path / "run")
    assert [row["skipped"] for row in found[:4]] == ["0", "0", "1", "1"]
    assert math.isnan(float(found[2]["grad_norm"]))


def test_replay_resumes_bit_for_bit_and_on_other_ranks(ranks, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    results = ranks.run(2, runs.replayed, whole, R2D2Config)
    ranks.run(2, runs.replayed, cut, R2D2Config, stop_after=5)
    state = load_checkpoint(latest_checkpoint(RunFolder(cut).checkpoints))
    buffers = [part["algorithm"]["buffer"]["storage"]["entries"] for part in (state, *state["ranks"])]
    assert not all(torch.equal(value, buffers[1][key]) for key, value in buffers[0].items()), "each has its own"
    shutil.copytree(cut, tmp_path / "other")
    resumed = ranks.run(2, runs.replayed, cut, R2D2Config, resume=True)
    assert all(same_bits(result[3], results[0][3]) for result in resumed)
    assert rows(cut) == rows(whole)
    others = ranks.run(3, runs.replayed, tmp_path / "other", R2D2Config, resume=True)
    assert others[0][:2] == ("finished", 352)
    assert same_bits(others[0][3], others[2][3])


def refused():
    other = ({"minibatches": 3}, {"sequence_length": 5}, {"total_steps": 20}, {"overlap": True})
    texts = [runs.refusal(runs.PPOConfig, **options) for options in other]
    DQN.data_parallel = False  # as in a custom algorithm
    try:
        return [*texts, runs.refusal(DQNConfig, slices=2, slice_length=4)]
    finally:
        DQN.data_parallel = True


def test_unsupported_options_are_refused(ranks):
    texts = ranks.run(2, refused)[1]
    size = "With several ranks, all minibatches must have the same size"
    wanted = [
        size,
        size,
        "must cover one batch of all 2 ranks, 32 steps, got 20",
        "--overlap",
        "dqn doesn't support several ranks",
    ]
    for text, words in zip(texts, wanted, strict=True):
        assert words in text


def test_a_curriculum_changes_the_environments_of_all_ranks_and_resumes_bit_for_bit(ranks, tmp_path):
    options = {
        "env": "recurl/MaskedArm-v0",
        "env_kwargs": ("max_episode_steps=6", "randomization=0"),
        "curriculum": True,
    }
    results = ranks.run(2, runs.train, tmp_path / "whole", **options)
    assert [result[-1] for result in results] == [{"randomization": 0.12}, {"randomization": 0.11}]
    assert same_bits(results[0][3], results[1][3])
    ranks.run(2, runs.train, tmp_path / "cut", stop_after=5, **options)
    resumed = ranks.run(2, runs.train, tmp_path / "cut", resume=True, curriculum=True)
    assert all(same_bits(result[3], results[0][3]) for result in resumed)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_a_symmetry_loss_resumes_bit_for_bit(ranks, tmp_path):
    options = {"env": "recurl/MaskedCartPole-v1", "env_kwargs": ("max_episode_steps=6",)}
    options |= {"symmetry": ("recurl.envs.tasks:CARTPOLE_MIRROR",)}
    results = ranks.run(2, runs.train, tmp_path / "whole", **options)
    assert same_bits(results[0][3], results[1][3])
    ranks.run(2, runs.train, tmp_path / "cut", stop_after=5, **options)
    resumed = ranks.run(2, runs.train, tmp_path / "cut", resume=True)
    assert all(same_bits(result[3], results[0][3]) for result in resumed)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
