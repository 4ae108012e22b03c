"""Compiled policies from runs and from files match ``predict``."""

import gymnasium as gym
import numpy as np
import pytest

import recurl
from recurl.core.errors import ArgumentError, MissingDependencyError, UnsupportedError
from recurl.recurrence.cpu import instruction_sets
from recurl.trainers import A2CConfig, PPOConfig, R2D2Config, RunFolder, SACConfig, export_run
from recurl.trainers.export import formats
from tests.trainers.small_runs import trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed"),
]

RUNS = {
    "lstm": (PPOConfig, "recurl/MaskedCartPole-v1", {"cell": "lstm"}),
    "box": (A2CConfig, "recurl/MaskedPendulum-v1", {"cell": "gru", "normalize_observations": True}),
    "none": (PPOConfig, "recurl/MaskedCartPole-v1", {"cell": "none"}),
    "sac": (SACConfig, "recurl/MaskedPendulum-v1", {"cell": "lstm"}),
    "entry": (PPOConfig, "recurl/MaskedArm-v0", {"cell": "gru", "critic_observations": ("privileged",)}),
    "r2d2": (R2D2Config, "recurl/MaskedCartPole-v1", {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")

    def run(name):
        kind, env, options = RUNS[name]
        path = place / name
        return RunFolder(path) if path.exists() else trained(path, kind, env, options)

    return run


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("brief_verification")
def test_it_acts_as_predict_does(name, runs):
    run = runs(name)
    policy, file = recurl.load(run), recurl.load(export_run(run, "compiled"))
    env = gym.make(RUNS[name][1])
    observation, _ = env.reset(seed=1)
    compiled, of_file = policy.compiled(), file.compiled()
    state = ours = theirs = None
    for step in range(60):
        start = step % 20 == 19
        expected, state = policy.predict(observation, state, start)
        array = observation["observation"] if name == "entry" else observation
        action, ours = compiled(array, ours, start)
        again, theirs = of_file(array, theirs, start)
        assert np.array_equal(action, again)
        assert type(action) is type(expected)
        assert env.action_space.contains(action)
        np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
        assert ours.keys() == theirs.keys() == state.keys()
        for key, value in state.items():
            assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype)
            np.testing.assert_allclose(ours[key], value, rtol=1e-4, atol=1e-5)
            assert np.array_equal(theirs[key], ours[key])
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            observation, _ = env.reset()
            state = ours = theirs = None


def test_refusals(runs, monkeypatch, tmp_path):
    run = runs("lstm")
    policy = recurl.load(run)
    act, observation = policy.compiled(), policy.observation_space.sample()
    with pytest.raises(ArgumentError, match=r"observation must have shape \[2\], got \[3\]"):
        act(np.zeros(3, np.float32))
    with pytest.raises(ArgumentError, match="state must be the state returned by the last call: 'state_h'"):
        act(observation, {})
    monkeypatch.setattr("recurl.trainers.export.policy_file.verify", lambda *_: None)
    with pytest.raises(UnsupportedError, match="Only a file of format compiled"):
        recurl.load(export_run(run, "torch")).compiled()
    path = export_run(run, "compiled")
    (tmp_path / "policy.recurl").write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ArgumentError, match="is damaged"):
        formats.FORMATS["compiled"].read(tmp_path / "policy.recurl")
    monkeypatch.setattr(formats, "missing", lambda: "there was no compiler")
    with pytest.raises(MissingDependencyError, match="can't be compiled: there was no compiler"):
        export_run(run, "compiled")


def test_an_observation_that_is_no_box(tmp_path):
    run = trained(tmp_path / "run", PPOConfig, "Taxi-v4", {"cell": "gru", "action_mask": "none"})
    with pytest.raises(
        UnsupportedError, match=r"A compiled policy must read a single Box, .* of Discrete\(500\): use predict"
    ):
        recurl.load(run).compiled()
