"""Several ranks learn the same as one process with all their environments."""

import math

import pytest
import torch

from recurl.trainers import R2D2Config, SACConfig
from tests.distributed import runs

pytestmark = pytest.mark.slow

PPO = {"minibatches": 2, "sequence_length": 8, "epochs": 2}
AVERAGED = {"normalize_advantages": True}


def check_same(results, whole, tolerance):
    for other in results[1:]:
        assert other["rows"] == results[0]["rows"] or str(other["rows"]) == str(results[0]["rows"])
        for name, value in other["state"].items():
            assert torch.equal(value, results[0]["state"][name]), name
    for name, value in whole["state"].items():
        found = results[0]["state"][name]
        assert found.dtype == value.dtype
        is_exact = name.endswith(".exact")  # running moments, in float64 next to any weights
        assert value.dtype in (torch.int64, torch.float64 if tolerance == 1e-12 or is_exact else torch.float32)
        if is_exact:
            rounded = torch.stack([results[0]["state"][name.replace(".exact", kind)] for kind in (".mean", ".var")])
            assert torch.equal(found.to(rounded.dtype), rounded)
        torch.testing.assert_close(
            found, value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name} {text}"
        )
    for found, row in zip(results[0]["rows"], whole["rows"], strict=True):
        assert found.keys() == row.keys()
        for name, value in row.items():
            close = math.isclose(found[name], value, rel_tol=max(tolerance, 1e-6) * 100, abs_tol=1e-5)
            assert close or math.isnan(value), (name, found[name], value)
            assert math.isnan(found[name]) == math.isnan(value)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("in_float64", [False, True])
def test_ppo(ranks, world, in_float64):
    results = ranks.run(world, runs.learn, "ppo", PPO, 1, in_float64)
    whole = runs.learn("ppo", PPO, world, in_float64)
    assert whole["rows"][-1]["episodes"] > 4
    check_same(results, whole, 1e-12 if in_float64 else 1e-5)


def test_losses_as_a_program(ranks):
    """A compiled function can't exchange the statistics that normalize advantages: that is done before."""
    check_same(ranks.run(2, runs.learn_as_graphs, "ppo", {**PPO, "compile": True}), runs.learn("ppo", PPO, 2), 1e-5)


@pytest.mark.parametrize(("algorithm", "options", "is_program"), [("ppo", PPO, True), ("a2c", AVERAGED, False)])
def test_an_estimate_that_exchanges_nothing_is_a_program(ranks, algorithm, options, is_program):
    found = ranks.run(2, runs.estimate_as_on_a_gpu, algorithm, {**options, "compile": True})
    assert [program for program, _ in found] == [is_program] * 2
    check_same([learned for _, learned in found], runs.learn(algorithm, options, 2), 1e-5)


def test_rows_that_are_shorter_than_a_sequence(ranks):
    options = {"minibatches": 2, "sequence_length": 32, "epochs": 2}
    check_same(ranks.run(2, runs.learn, "ppo", options), runs.learn("ppo", options, 2), 1e-5)


@pytest.mark.parametrize("algorithm", ["a2c", "impala"])
def test_one_step_a_batch(ranks, algorithm):
    check_same(ranks.run(2, runs.learn, algorithm, AVERAGED), runs.learn(algorithm, AVERAGED, 2), 1e-5)


@pytest.mark.parametrize(
    ("kind", "env"),
    [(R2D2Config, "recurl/TMaze-v0"), (SACConfig, "recurl/MaskedCartPole-v1")],  # of discrete actions: no noise
)
def test_replay_learns_from_all_shares_of_a_batch(ranks, kind, env):
    results, (norms, whole) = ranks.run(2, runs.improve, kind, env, 4), runs.improve(kind, env, 8)
    assert len(whole) > 5
    for found_norms, found in results:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_losses_from_replay_as_a_program(ranks):
    plain, programmed = (ranks.run(2, runs.replay_weights, compiled) for compiled in (False, True))
    for name, value in programmed[0].items():
        assert torch.equal(value, programmed[1][name]), name
        torch.testing.assert_close(value, plain[0][name], rtol=1e-5, atol=1e-6)


def test_torchs_own_ddp(ranks):
    whole = runs.ddp_gradients(in_ddp=False)
    for found in ranks.run(2, runs.ddp_gradients, True):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_the_example_with_ddp(ranks):
    (said, first), (silent, second) = ranks.run(2, runs.wrapped)
    assert said.startswith("2 ranks: value loss ")
    assert silent == ""
    assert all(torch.equal(value, second[name]) for name, value in first.items())
