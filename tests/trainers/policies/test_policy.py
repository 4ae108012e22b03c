"""Loaded policies act bit-identically to evaluation and collection."""

import copy
import pickle
import runpy
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import recurl
from recurl.core.errors import ArgumentError, ArgumentTypeError, NonFiniteError, UnsupportedError
from recurl.envs import ExplorationType, set_exploration_type
from recurl.envs.gym_vector import make_vector
from recurl.trainers import (
    A2CConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    SACConfig,
    TD3Config,
    evaluate_run,
    export_run,
    load_agent,
    make_env,
)
from recurl.trainers.networks.agent import collecting
from recurl.trainers.policies.policy import Policy
from recurl.trainers.policies.steps import AgentStep
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

MEMORY = "recurl/RepeatPrevious-v0"
CASES = {
    "ppo-lstm-2": (PPOConfig, "recurl/MaskedCartPole-v1", {"cell": "lstm", "num_layers": 2}),
    "ppo-gru-continuous": (PPOConfig, "Pendulum-v1", {"cell": "gru", "normalize_observations": False}),
    "ppo-none": (PPOConfig, "CartPole-v1", {"cell": "none"}),
    "ppo-own-cell": (PPOConfig, MEMORY, {"cell": "tests.own_cells:FastWeights"}),
    "ppo-own-trunks": (PPOConfig, MEMORY, {"cell": "lstm", "shared_trunk": False}),
    "a2c-gru": (A2CConfig, MEMORY, {"cell": "gru"}),
    "impala-lstm": (ImpalaConfig, "Pendulum-v1", {"cell": "lstm", "shared_trunk": False}),
    "dqn-lstm": (DQNConfig, MEMORY, {"cell": "lstm", "normalize_observations": True}),
    "r2d2-gru": (R2D2Config, "recurl/TMaze-v0", {"cell": "gru"}),
    "sac-gru": (SACConfig, "Pendulum-v1", {"cell": "gru", "shared_trunk": False}),
    "td3-lstm": (TD3Config, "Pendulum-v1", {"cell": "lstm"}),
}
STEPS = 90


@pytest.fixture(scope="module", params=CASES)
def run(request, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), *CASES[request.param])


@pytest.fixture(scope="module")
def lstm(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("lstm"), PPOConfig, MEMORY, {"cell": "lstm"})


def collected(folder, rows, kind):
    """Return the steps of recurl's own loop with the policy for evaluation or collection."""
    config, agent = load_agent(folder)
    policy = agent.actor if kind is ExplorationType.DETERMINISTIC else collecting(agent.policy)
    torch.manual_seed(0)
    with make_env(config, rows, policy=agent.policy) as env, set_exploration_type(kind):
        env.set_seed(5)
        return env.rollout(STEPS, policy, break_when_any_done=False)


def played(folder, rows, *, deterministic=True):
    """Return actions, states and starts of a user's loop over Gymnasium environments, ``[n, T, ...]``."""
    policy, config = recurl.load(folder), folder.read_config()
    env = make_vector(config.env, rows, None, **config.env_arguments)
    torch.manual_seed(0)
    observation, _ = env.reset(seed=5)
    state, start, taken = None, None, []
    for _ in range(STEPS):
        action, state = policy.predict(observation, state, start, deterministic)
        taken.append((action, *state.values()))
        observation, _, terminated, truncated, _ = env.step(action)
        start = terminated | truncated
        if start.any():
            observation, _ = env.reset(options={"reset_mask": start})
    env.close()
    return [np.stack(values, 1) for values in zip(*taken, strict=True)], list(state)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_program_takes_the_steps_of_evaluation_and_collection(run, deterministic):
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    expected = collected(run, 3, kind)
    (actions, *states), names = played(run, 3, deterministic=deterministic)
    assert expected["next", "done"].any() or run.read_config().env == "Pendulum-v1"
    assert np.array_equal(actions, expected["action"].numpy())
    for name, state in zip(names, states, strict=True):
        assert np.array_equal(state, expected["next", name].numpy())


def test_one_observation_gives_the_episode_of_an_evaluation(run):
    policy, config = recurl.load(run.path), run.read_config()
    env = gym.make(config.env, **config.env_arguments)
    observation, _ = env.reset(seed=7)
    state, done, total = None, False, 0.0
    while not done:
        action, state = policy.predict(observation, state)
        observation, reward, terminated, truncated, _ = env.step(action)
        done, total = terminated or truncated, total + float(reward)
    assert evaluate_run(run, episodes=1, seed=7).returns == [pytest.approx(total, rel=1e-6)]


def test_rows_of_a_batch_are_those_of_one_environment(lstm):
    policy = recurl.load(lstm)
    observations = np.eye(4, dtype=np.float32)
    action, state = policy.predict(observations)
    again, after = policy.predict(observations, state)
    for row in range(4):
        first, one = policy.predict(observations[row])
        second, later = policy.predict(observations[row], one)
        assert (first, second) == (action[row], again[row])
        assert type(first) is np.int64
        np.testing.assert_allclose(later["state_h"], after["state_h"][row], rtol=1e-5, atol=1e-6)


def test_an_episode_start_makes_rows_fresh(lstm):
    policy = recurl.load(lstm)
    observations = np.eye(4, dtype=np.float32)
    _, state = policy.predict(observations)
    _, mixed = policy.predict(observations, state, np.array([True, False, True, False]))
    _, fresh = policy.predict(observations)
    _, carried = policy.predict(observations, state)
    for name in state:
        assert np.array_equal(mixed[name][::2], fresh[name][::2])
        assert np.array_equal(mixed[name][1::2], carried[name][1::2])
    for start in (True, np.True_, np.array([True]), 1):
        _, one = policy.predict(observations[0], policy.predict(observations[0])[1], start)
        assert np.array_equal(one["state_h"], policy.predict(observations[0])[1]["state_h"])


def test_a_state_is_the_programs_own(lstm):
    policy = recurl.load(lstm)
    observation = np.eye(4, dtype=np.float32)[0]
    _, state = policy.predict(observation)
    kept = copy.deepcopy(state)
    expected = policy.predict(observation, state)
    for given in (pickle.loads(pickle.dumps(state)), {name: value.tolist() for name, value in state.items()}):
        action, after = policy.predict(observation, given)
        assert action == expected[0]
        assert all(np.array_equal(after[name], expected[1][name]) for name in after)
    frozen = copy.deepcopy(state)
    for value in frozen.values():
        value.flags.writeable = False
    _, after = policy.predict(observation, frozen)
    for name, value in state.items():
        assert np.array_equal(value, kept[name])
        assert not np.shares_memory(after[name], frozen[name])
        value[:] = 9.0  # modifying the returned state has no side effects
        after[name][:] = 9.0
    assert policy.predict(observation, kept)[0] == expected[0]


def test_networks_that_need_tensordicts_act_alike(lstm):
    config, agent = load_agent(lstm, on_cpu=True)
    fast = recurl.load(lstm)
    agent.actor[0].register_forward_hook(lambda *_: None)  # called only in the TensorDict path
    with make_env(config, 1, policy=agent.actor) as env:
        slow = Policy(AgentStep(agent, env), fast._converter, "the policy")
    assert "hooks" in slow._step._networks[True].obstacle
    assert fast._step._networks[True].obstacle is None
    observations = np.tile(np.eye(4, dtype=np.float32), (10, 1))
    for deterministic in (True, False):
        state = other = None
        for policy in (fast, slow):
            policy.set_seed(0)
        for _ in range(3):
            action, state = fast.predict(observations, state, deterministic=deterministic)
            found, other = slow.predict(observations, other, deterministic=deterministic)
            assert np.array_equal(action, found)
            assert all(np.array_equal(state[name], other[name]) for name in state)


def test_draws_are_reproduced_by_a_seed_of_their_own(lstm):
    policy = recurl.load(lstm)
    observations = np.tile(np.eye(4, dtype=np.float32), (20, 1))

    def draws():
        return [policy.predict(observations, deterministic=False)[0].tolist() for _ in range(3)]

    policy.set_seed(3)
    before = torch.get_rng_state()
    first = draws()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    policy.set_seed(3)
    assert draws() == first
    assert draws() != first
    assert len({tuple(part) for part in first}) == 3
    other = recurl.load(lstm)  # without a seed: torch's global generator
    torch.manual_seed(4)
    once = other.predict(observations, deterministic=False)[0]
    torch.manual_seed(4)
    assert np.array_equal(other.predict(observations, deterministic=False)[0], once)
    with pytest.raises(ArgumentError, match="A seed must be a non-negative integer, got -1"):
        policy.set_seed(-1)


def test_loading_leaves_random_numbers_and_gradients_alone(lstm):
    before = torch.get_rng_state()
    policy = recurl.load(lstm)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.enable_grad():
        action, state = policy.predict(np.eye(4, dtype=np.float32))
    assert all(type(value) is np.ndarray for value in (action, *state.values()))


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_vector_environments_of_gymnasium(lstm, mode):
    """Vector environments return the first observation of an episode with ``done``, or one step later."""
    policy = recurl.load(lstm)
    env = gym.make_vec(MEMORY, 2, autoreset_mode=gym.vector.AutoresetMode[mode])
    observation, _ = env.reset(seed=5)
    state, start, ended = None, None, np.zeros(2, bool)
    seen, totals = [], np.zeros(2)
    for _ in range(64):
        action, state = policy.predict(observation, state, start)
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(state["state_h"])
        totals += reward
        done = terminated | truncated
        start, ended = (done if mode == "SAME_STEP" else ended), done
    if mode == "NEXT_STEP":  # the reset takes a step, whose action is ignored
        observation = env.step(action)[0]
        start = ended
    assert start.all()
    _, state = policy.predict(observation, state, start)
    assert np.array_equal(state["state_h"], policy.predict(observation)[1]["state_h"])
    assert totals.tolist() == pytest.approx(evaluate_run(lstm, episodes=2, seed=5).returns)


@pytest.mark.usefixtures("brief_verification")
@pytest.mark.parametrize(
    ("case", "kind"),
    [("ppo-lstm-2", "onnx"), ("ppo-gru-continuous", "torch"), ("ppo-none", "torch"), ("r2d2-gru", "onnx")],
)
def test_an_exported_file_acts_as_the_run(tmp_path, case, kind):
    folder = trained(tmp_path / "run", *CASES[case])
    path = export_run(folder, kind)
    policy, exported = recurl.load(folder), recurl.load(path)
    assert exported.observation_space == policy.observation_space
    assert exported.action_space == policy.action_space
    policy.observation_space.seed(0)
    state = other = None
    for step in range(30):
        observation = np.stack([np.clip(policy.observation_space.sample(), -3, 3) for _ in range(3)])
        start = np.array([False, step % 7 == 6, True])
        action, state = policy.predict(observation, state, start)
        found, other = exported.predict(observation, other, start)
        assert (found.shape, found.dtype) == (action.shape, action.dtype)
        np.testing.assert_allclose(found, action, rtol=1e-5, atol=1e-5)
        assert list(other) == list(state)
        for name, value in state.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5)
    one, after = exported.predict(observation[0])
    np.testing.assert_allclose(one, policy.predict(observation[0])[0], rtol=1e-5, atol=1e-5)
    assert {name: value.shape for name, value in after.items()} == {
        name: value.shape[1:] for name, value in state.items()
    }
    with pytest.raises(UnsupportedError, match=r"contains the greedy policy only: deterministic=False needs the run"):
        exported.predict(observation, deterministic=False)


def test_the_example_plays_an_episode(tmp_path, monkeypatch, capsys):
    folder = trained(tmp_path, *CASES["ppo-lstm-2"])
    example = Path(__file__).parents[3] / "examples" / "act.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(folder.path)])
    runpy.run_path(str(example))
    assert capsys.readouterr().out == f"return {evaluate_run(folder, episodes=1, seed=0).returns[0]:g}\n"


class Parts(gym.Env):
    """Environment with observations of several kinds, one of which repeats the action."""

    observation_space = gym.spaces.Dict(
        {
            "choice": gym.spaces.Discrete(3, start=1),
            "image": gym.spaces.Box(0, 255, (4, 5, 1), np.uint8),
            "parts": gym.spaces.Dict({"place": gym.spaces.Box(-1, 1, (2,))}),
        }
    )
    action_space = gym.spaces.Discrete(3, start=1)

    def _observe(self, last):
        draw = self.np_random
        return {
            "choice": np.int64(last),
            "image": draw.integers(0, 256, (4, 5, 1), np.uint8),
            "parts": {"place": draw.uniform(-1, 1, 2).astype(np.float32)},
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(1), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self._observe(action), float(action), bool(self.np_random.random() < 0.1), False, {}


gym.register("recurl-test/InParts-v0", entry_point=Parts)


@pytest.mark.usefixtures("brief_verification")
@pytest.mark.parametrize("source", ["run", "onnx"])
def test_nested_observations(tmp_path, source):
    folder = trained(tmp_path, PPOConfig, "recurl-test/InParts-v0", {"cell": "gru"})
    expected = evaluate_run(folder, episodes=1, seed=7)
    policy = recurl.load(folder if source == "run" else export_run(folder, source))
    env = gym.make("recurl-test/InParts-v0")
    observation, _ = env.reset(seed=7)
    state, done, total = None, False, 0.0
    while not done:
        action, state = policy.predict(observation, state)
        observation, reward, done, _, _ = env.step(action)
        total += float(reward)
    assert expected.returns == [total]
    vector = gym.vector.SyncVectorEnv([Parts, Parts])
    batch, _ = vector.reset(seed=7)
    action, state = policy.predict(batch)
    assert vector.action_space.contains(action)
    assert state["state_h"].shape == (2, 1, 8)


def test_mistakes(lstm):
    policy = recurl.load(lstm)
    eye = np.eye(4, dtype=np.float32)
    _, state = policy.predict(eye)

    def refused(error, match, *arguments, **named):
        with pytest.raises(error, match=match):
            policy.predict(*arguments, **named)

    refused(ArgumentError, r"takes an observation in Box\(.*must have 1 dimensions, or 2 .*got shape \[\]", 3.0)
    refused(ArgumentError, r"takes an observation in .*must be torch.float32 of shape \[4\], got .*\[3\]", eye[0, :3])
    refused(ArgumentError, r"takes an observation in .*at least one row, got none", eye[:0])
    refused(ArgumentError, r"takes an observation in .*can't become float32", eye[0].astype(complex))
    refused(NonFiniteError, "An observation must be finite, but 'observation' holds NaN", eye * np.nan)
    refused(
        ArgumentError,
        r"The state of a batch of 3 must hold state_h of shape \[3, 1, 8\], got \[4, 1, 8\]",
        eye[:3],
        state,
    )
    refused(ArgumentError, r"The state of one environment must hold state_h of shape \[1, 8\], got", eye[0], state)
    refused(
        ArgumentTypeError, "state must be a state returned by predict, or None where episodes begin, got tuple", eye, ()
    )
    refused(ArgumentError, r"with \['state_h', 'state_c'\], got \['h'\]", eye, {"h": eye})
    refused(ArgumentError, r"episode_start must be bools of shape \[4\], got bool of shape \[\]", eye, state, True)
    refused(
        ArgumentError,
        r"episode_start must be a bool, got bool of shape \[4\]",
        eye[0],
        policy.predict(eye[0])[1],
        eye[0] > 0,
    )
    refused(ArgumentError, "action_mask= is for a policy that was trained with masks", eye, action_mask=eye)
    assert policy.predict(eye, reward=np.ones(4))[0].shape == (4,)  # ignored by this policy
