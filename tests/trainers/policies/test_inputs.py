"""Handmade policies that read the previous action, the previous reward or a mask."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.core.errors import ArgumentError, MissingArgumentError, NonFiniteError, UsageError
from recurl.core.specs import Binary
from recurl.envs import (
    ExplorationType,
    GymEnv,
    PreviousAction,
    PreviousReward,
    TransformedEnv,
    set_exploration_type,
)
from recurl.envs.gym_vector import make_vector
from recurl.modules import (
    Categorical,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    get_env_transforms_from_module,
)
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.policies.converter import Converter
from recurl.trainers.policies.policy import Policy
from recurl.trainers.policies.steps import AgentStep, FileStep
from recurl.transforms import Transform

MEMORY = "recurl/RepeatPrevious-v0"
READS = ["observation", "previous_action", "previous_reward"]


def actor_of(spec, reads, size):
    """Return a random actor that reads all of ``reads``, and a mask if there is one."""
    torch.manual_seed(1)
    inputs = [key for key in reads if key != "action_mask"]
    encode = TensorDictModule(lambda *parts: torch.cat([part.float() for part in parts], -1), inputs, ["embedding"])
    memory = LSTMModule(input_size=size, hidden_size=8, in_key="embedding", out_key="memory")
    if spec.dtype.is_floating_point:
        net = nn.Sequential(nn.Linear(8, 2 * spec.shape[0]), NormalParamExtractor())
        head = TensorDictModule(net, ["memory"], ["loc", "scale"])
        return ProbabilisticActor(
            TensorDictSequential(encode, memory, head), ["loc", "scale"], distribution_class=TanhNormal
        )
    heads = [TensorDictModule(nn.Linear(8, spec.n), ["memory"], ["logits"])]
    if "action_mask" in reads:
        hide = TensorDictModule(
            lambda logits, mask: logits.masked_fill(~mask, -1e9), ["logits", "action_mask"], ["logits"]
        )
        heads.append(hide)
    return ProbabilisticActor(TensorDictSequential(encode, memory, *heads), ["logits"], distribution_class=Categorical)


def wired(env, actor):
    return env.append_transform(get_env_transforms_from_module(actor))


def policy_of(actor, env, base):
    return Policy(AgentStep(SimpleNamespace(actor=actor, policy=actor), env), Converter(*base.readers), "the policy")


def with_previous(name, rows):
    base = GymEnv(name, num_envs=rows, categorical_action_encoding=True)
    env = TransformedEnv(base, PreviousReward()).append_transform(PreviousAction(base.action_spec_unbatched))
    size = sum(env.observation_spec[key].shape[-1] for key in READS)
    actor = actor_of(base.action_spec_unbatched, READS, size)
    env = wired(env, actor)
    return policy_of(actor, env, base), actor, env


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", [MEMORY, "Pendulum-v1"])
def test_previous_action_and_reward_are_those_of_the_environment(name, deterministic):
    policy, actor, env = with_previous(name, 3)
    env.set_seed(5)
    torch.manual_seed(0)
    with set_exploration_type(ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM):
        expected = env.rollout(210, actor, break_when_any_done=False)
    assert expected["next", "done"].any()
    vector = make_vector(name, 3, None)
    observation, _ = vector.reset(seed=5)
    torch.manual_seed(0)
    state = start = reward = None
    for step in range(210):
        action, state = policy.predict(observation, state, start, deterministic, reward=reward)
        assert np.array_equal(action, expected["action"][:, step].numpy())
        assert np.array_equal(state["recurrent_state_h"], expected["next", "recurrent_state_h"][:, step].numpy())
        observation, reward, terminated, truncated, _ = vector.step(action)
        start = terminated | truncated
        if start.any():
            observation, _ = vector.reset(options={"reset_mask": start})


def test_the_previous_action_is_in_the_state_and_zero_at_starts():
    policy, _, _ = with_previous(MEMORY, 1)
    eye = np.eye(4, dtype=np.float32)
    action, state = policy.predict(eye)
    assert np.array_equal(state["previous_action"], eye[action])
    one, after = policy.predict(eye[0], reward=0.0)
    assert np.array_equal(after["previous_action"], eye[one])
    fresh = policy.predict(eye)[1]
    restarted = policy.predict(eye, state, np.array([True, False, True, False]), reward=np.ones(4))[1]
    assert np.array_equal(restarted["recurrent_state_h"][::2], fresh["recurrent_state_h"][::2])
    assert not np.array_equal(restarted["recurrent_state_h"][1], fresh["recurrent_state_h"][1])


def test_a_reward_that_is_read_is_required():
    policy, _, _ = with_previous(MEMORY, 1)
    eye = np.eye(4, dtype=np.float32)
    _, state = policy.predict(eye)  # no reward is needed where episodes begin
    policy.predict(eye, state, np.ones(4, bool))
    with pytest.raises(MissingArgumentError, match=r"the policy reads the previous reward: .*predict\(\.\.\., reward="):
        policy.predict(eye, state)
    with pytest.raises(ArgumentError, match=r"reward must be numbers of shape \[4\], got float64 of shape \[\]"):
        policy.predict(eye, state, reward=1.0)
    with pytest.raises(ArgumentError, match=r"reward must be a number, got float64 of shape \[4\]"):
        policy.predict(eye[0], policy.predict(eye[0])[1], reward=np.ones(4))
    with pytest.raises(NonFiniteError, match="reward must be finite, got"):
        policy.predict(eye, state, reward=np.full(4, np.nan))
    policy.predict(eye, state, np.ones(4, bool), reward=np.full(4, np.nan))  # ignored where episodes begin


def test_they_are_inputs_of_an_exported_function():
    policy, actor, env = with_previous(MEMORY, 2)
    step = PolicyStep(actor)
    arguments = step.arguments(env.reset())
    about = {
        "inputs": [
            {"name": name, "shape": ["batch", *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in zip(step.inputs, arguments, strict=True)
        ],
        "outputs": [{"name": name} for name in step.outputs],
        "states": {name: f"next.{name}" for name in ("recurrent_state_h", "recurrent_state_c")},
    }
    exported = Policy(FileStep(lambda given: step(*given), about, {}), policy._converter, "the file")
    state = other = reward = None
    for index in range(9):
        observation, start = np.eye(4, dtype=np.float32), np.array([index % 4 == 3, False, False, True])
        action, state = policy.predict(observation, state, start, reward=reward)
        found, other = exported.predict(observation, other, start, reward=reward)
        assert np.array_equal(found, action)
        assert state.keys() == other.keys()
        for name, value in state.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6)
        reward = np.arange(4.0) - index
    with pytest.raises(MissingArgumentError, match="the file reads the previous reward"):
        exported.predict(observation, other)


class Mask(Transform):
    """Environment that declares a mask."""

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec.clone()
        spec.set("action_mask", Binary((*spec.shape, 4), dtype=torch.bool))
        return spec


@pytest.fixture(scope="module")
def masked():
    base = GymEnv(MEMORY, num_envs=1, categorical_action_encoding=True)
    actor = actor_of(base.action_spec_unbatched, ["observation", "action_mask"], 4)
    return policy_of(actor, wired(TransformedEnv(base, Mask()), actor), base)


@pytest.mark.parametrize("dtype", [bool, np.int8])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_mask_restricts_the_actions(masked, dtype, deterministic):
    observations = np.tile(np.eye(4, dtype=np.float32), (10, 1))
    mask = np.random.default_rng(0).random((40, 4)) < 0.4
    mask[np.arange(40), np.arange(40) % 4] = True
    action, state = masked.predict(observations, deterministic=deterministic, action_mask=mask.astype(dtype))
    assert mask[np.arange(40), action].all()
    in_parts, _ = masked.predict(observations, action_mask=(mask[:, :2], mask[:, 2:]))
    assert mask[np.arange(40), in_parts].all()
    one, _ = masked.predict(observations[0], deterministic=deterministic, action_mask=mask[0].astype(dtype))
    assert mask[0, one]
    assert list(state) == ["recurrent_state_h", "recurrent_state_c"]


def test_a_mask_is_taken_from_the_observation(masked):
    space = gym.spaces.Dict({"observation": masked.observation_space})
    readers = [type(reader)(space, (), "test") if n == 0 else reader for n, reader in enumerate(_readers())]
    policy = Policy(masked._step, Converter(*readers), "the policy")
    eye, mask = np.eye(4, dtype=np.float32), np.eye(4, dtype=np.int8)[::-1]
    assert policy.predict({"observation": eye, "action_mask": mask})[0].tolist() == [3, 2, 1, 0]
    assert policy.predict({"observation": eye[0], "action_mask": mask[0]})[0] == 3
    # the argument takes precedence
    assert policy.predict({"observation": eye[0], "action_mask": mask[0]}, action_mask=mask[1])[0] == 2


def _readers():
    return GymEnv(MEMORY, categorical_action_encoding=True).readers


def test_a_mask_that_is_missing_or_wrong(masked):
    eye = np.eye(4, dtype=np.float32)
    with pytest.raises(MissingArgumentError, match=r"the policy was trained with action masks: .*action_mask="):
        masked.predict(eye)
    for mask in (np.ones(4), np.full((4, 4), 2), np.ones((4, 3))):
        with pytest.raises(
            ArgumentError, match=r"action_mask must hold 0 and 1, or bools, of shape \[4, 4\], or be a tuple or dict"
        ):
            masked.predict(eye, action_mask=mask)
    with pytest.raises(UsageError, match=r"but allows none in rows \[1, 3\]\."):
        masked.predict(eye, action_mask=np.array([[1], [0], [1], [0]]) * np.ones((1, 4)))
    with pytest.raises(UsageError, match=r"but allows none\."):
        masked.predict(eye[0], action_mask=np.zeros(4))
