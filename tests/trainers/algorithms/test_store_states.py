"""Runs that store recurrent states at the starts of sequences only: the same bits with less memory."""

import math

import pytest
import torch

from recurl.core.errors import ArgumentError, NonFiniteError
from recurl.core.keys import NEXT
from recurl.nn.recurrent_net import RecurrentNet
from recurl.trainers import A2C, PPO, A2CConfig, Impala, ImpalaConfig, PPOConfig
from recurl.trainers.algorithms import footprint as footprints
from recurl.trainers.algorithms.footprint import footprint
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.faults import FaultWatch

SMALL = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1", "episode_length=10"), "hidden_size": 8}
SIZES = {"num_envs": 4, "rollout_steps": 16, "total_steps": 640}
LINEAR = ["mingru", "minlstm", "lru", "s5(state_size=8)", "rglru", "ffm", "gtrxl(window=4)"]
OTHERS = ["mlstm", "mamba2(state_size=8)", "gated_deltanet", "slstm", "shm(rows=3)"]


def config(kind=PPOConfig, **options):
    lengths = {"sequence_length": 8, "epochs": 2} if kind is PPOConfig else {}
    return kind(**{**SMALL, **SIZES, **lengths, **options})


def learned(learner, updates=2):
    """Metrics of some updates, the weights after them, and the sparse states of a batch."""
    rows = []
    for _ in range(updates):
        batch = learner.collect()
        sparse = [key for key in batch.keys(True, True) if key[-1] == "step"]
        rows.append(learner.learn(batch))
    learner.close()
    return rows, [value.clone() for value in learner.agent.state_dict().values()], sparse


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [
        *((PPOConfig, PPO, {"cell": cell}) for cell in ("lstm", "gru", "none", *LINEAR, *OTHERS)),
        (PPOConfig, PPO, {"shared_trunk": False, "num_layers": 2, "vectorization": "device"}),
        (PPOConfig, PPO, {"rollout_steps": 5, "sequence_length": 8}),
        (A2CConfig, A2C, {}),
        (ImpalaConfig, Impala, {"shared_trunk": False}),
        pytest.param(PPOConfig, PPO, {"cell": "gru", "compile": True, "minibatches": 1}, marks=pytest.mark.slow),
    ],
)
def test_learning_has_the_bits_of_all_states(kind, make, options):
    expected = learned(make(config(kind, store_states="all", **options)))
    found = learned(make(config(kind, store_states="starts", **options)))
    assert repr(found[0]) == repr(expected[0])
    for left, right in zip(found[1], expected[1], strict=True):
        assert torch.equal(left, right)
    assert bool(found[2]) == (options.get("cell") != "none")
    assert expected[2] == []


def test_a_resumed_run_continues_with_either():
    learner = PPO(config(store_states="starts"))
    learner.learn(learner.collect())
    state = learner.state_dict()
    expected = learned(learner)
    for stored in ("all", "starts"):
        again = PPO(config(store_states=stored))
        again.load_state_dict(state)
        torch.manual_seed(3)
        found = learned(again)
        assert len(found[1]) == len(expected[1])
    assert expected[2]


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({}, 8),
        ({"store_states": "all"}, None),
        ({"device": "cuda"}, 8),
        ({"device": "cuda", "store_states": "all"}, None),
        ({"device": "cuda", "sequence_length": 7}, None),
        ({"device": "cuda", "sequence_length": 64}, 16),
        ({"device": "cuda", "collectors": "ray:2"}, None),
        ({"device": "cuda", "overlap": True, "env_workers": 2}, 8),
    ],
)
def test_which_states_are_stored(options, every):
    assert config(**options).states_every == every


def test_whole_rows_are_learned_from():
    assert config(A2CConfig, device="cuda").states_every == 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_length": 7}, "--sequence-length must divide --rollout-steps, got 7 for 16"),
        ({"collectors": "ray:2"}, "a single collecting process, got --collectors"),
        ({"overlap": True}, "a single collecting process, got --overlap on the CPU"),
    ],
)
def test_where_all_states_are_needed(options, words):
    with pytest.raises(ArgumentError, match=f"--store-states starts needs .*{words}"):
        config(store_states="starts", **options)


def test_the_footprint_is_smaller():
    every, starts = (footprint(config(store_states=stored))["a batch"] for stored in ("all", "starts"))
    states = 2 * 8 * 4  # bytes of h and c
    assert every - starts == 64 * (2 * states - states // 8)
    learner = PPO(config(store_states="starts"))
    batch = learner.collect()
    assert starts <= sum(value.nbytes for value in batch.values(True, True))
    learner.close()


@pytest.fixture
def passes(monkeypatch):
    """Tokens of each pass of a recurrent network over sequences, and whether it returns states."""
    found, run = [], RecurrentNet.run

    def recorded(net, x, states, boundaries, backend, options):
        found.append((boundaries.num_tokens, options.after))
        return run(net, x, states, boundaries, backend, options)

    monkeypatch.setattr(RecurrentNet, "run", recorded)
    return found


@pytest.mark.parametrize("cell", ["gtrxl(window=4)", "gated_deltanet"])
@pytest.mark.parametrize(("kind", "make"), [(PPOConfig, PPO), (ImpalaConfig, Impala)])
def test_values_of_large_states_are_estimated_for_few_rows_at_once(kind, make, cell, passes, monkeypatch):
    chosen = config(kind, cell=cell, num_envs=5, total_steps=800)
    learner = make(chosen)
    batch = learner.collect()
    whole, parts = batch.clone(), batch.clone()
    expected = learner.write_advantages(whole)
    states = footprints.large_states(chosen)
    assert passes == [(80, True)]
    passes.clear()
    monkeypatch.setitem(footprints._STATES_AT_ONCE, "cpu", 3 * 16 * states)
    torch.testing.assert_close(learner.write_advantages(parts), expected)
    assert passes == [(32, True), (32, True), (16, True)]
    for key in learner.estimator.out_keys:
        torch.testing.assert_close(parts[key], whole[key])
    kept = sum(value.nbytes for value in batch.values(True, True))
    assert 2 * 16 * states < footprint(chosen)["a batch"] <= kept + 2 * 16 * states
    learner.close()


def test_normalized_advantages_are_estimated_at_once(passes, monkeypatch):
    monkeypatch.setitem(footprints._STATES_AT_ONCE, "cpu", 1)
    chosen = config(A2CConfig, cell="gtrxl(window=4)", normalize_advantages=True)
    learner = A2C(chosen)
    batch = learner.collect()
    learner.write_advantages(batch)
    assert passes == [(64, True)]
    assert footprint(chosen)["a batch"] > 64 * footprints.large_states(chosen)
    assert batch["advantage"].mean().abs() < 1e-6
    learner.close()


def test_v_trace_computes_no_states_of_a_separate_actor(passes):
    learner = Impala(config(ImpalaConfig, shared_trunk=False))
    learner.write_advantages(learner.collect())
    assert passes == [(64, True), (64, False)]  # critic and actor
    learner.close()


def test_a_state_that_is_not_finite_is_found_where_it_is_stored():
    learner = PPO(config(store_states="starts"))
    batch = learner.collect()
    key = next(key for key in batch.keys(True, True) if key[-1] == "every_8" and key[0] != NEXT)
    batch[key][2, 9] = math.inf
    watch = FaultWatch(learner, EpisodeStats(4), skip=False)
    with pytest.raises(
        NonFiniteError, match=f"The hidden state '{key[0]}' of environment 2 at step 8 of its .* was inf"
    ):
        watch.begin(batch)()
    learner.close()
