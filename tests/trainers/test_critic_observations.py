"""Observations that only the critic sees: networks, batches, statistics, policies, evaluation, resumed runs."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

import recurl
from recurl.core.errors import ArgumentError
from recurl.trainers import (
    ALGORITHMS,
    A2CConfig,
    ImpalaConfig,
    PPOConfig,
    RunFolder,
    SACConfig,
    TD3Config,
    evaluate_run,
    export_run,
)
from tests.trainers.run.test_trainer import differing, final_state, metrics, train
from tests.trainers.test_sights import config as small

pytestmark = pytest.mark.usefixtures("no_curves")

KINDS = (PPOConfig, A2CConfig, ImpalaConfig, SACConfig, TD3Config)
HIDDEN = {"critic_observations": ("hidden",)}


class Masked(gym.Env):
    """Move to the origin; the velocity is the hidden part of the observation."""

    action_space = Box(-1.0, 1.0, (1,))

    def __init__(self, shown=("seen", "hidden"), mask=False):
        spaces = {"seen": Box(-9, 9, (2,)), "hidden": Box(-9, 9, (3,))}
        self.observation_space = Dict({name: spaces[name] for name in shown})
        self._shown = shown

    def _observed(self):
        values = {"seen": [self._x, 1.0], "hidden": [self._v, self._x, self._x * self._v]}
        return {name: np.array(values[name], np.float32) for name in self._shown}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._v, self._steps = self.np_random.uniform(-1, 1), 0.0, 0
        return self._observed(), {}

    def step(self, action):
        self._v = 0.9 * self._v + 0.3 * float(action[0])
        self._x += self._v
        self._x = float(np.clip(self._x, -5, 5))
        self._steps += 1
        return self._observed(), -abs(self._x), False, self._steps == 11, {}


BOTH, SEEN = "tests/Masked-v0", "tests/MaskedSeen-v0"
gym.register(BOTH, Masked)
gym.register(SEEN, Masked, kwargs={"shown": ("seen",)})


def options(kind, **more):
    only_ppo = {"sequence_length": 8, "minibatches": 2} if kind is PPOConfig else {}
    off_policy = {"learning_starts": 32, "slices": 3, "slice_length": 4, "buffer_size": 100, "gradient_steps": 2}
    shared = {"num_envs": 2, "rollout_steps": 16, "total_steps": 128, "hidden_size": 8, "cell": "gru"}
    own = off_policy if kind in (SACConfig, TD3Config) else only_ppo
    return kind(**{"env": BOTH, **shared, **own, "checkpoint_every": 2, "eval_episodes": 2, **HIDDEN, **more})


def trained(config, updates=4):
    learner = ALGORITHMS[config.algorithm].learner(config)
    for _ in range(updates):
        learner.learn(learner.collect())
    return learner


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", ["gru", "none"])
def test_the_actor_never_reads_them(kind, cell):
    agent = trained(options(kind, cell=cell)).agent
    assert agent.observations.keys == ["seen"]
    assert set(agent.all_observations.keys) == {"seen", "hidden"}
    assert "hidden" not in agent.actor.in_keys
    critics = agent.critic_list() if hasattr(agent, "critics") else [agent.critic]
    assert all("hidden" in critic.in_keys for critic in critics)
    shared = set(agent.actor.parameters()) & {weight for critic in critics for weight in critic.parameters()}
    assert not shared


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns(kind):
    torch.manual_seed(0)
    learner = ALGORITHMS[kind.algorithm].learner(options(kind))
    before = {name: value.clone() for name, value in learner.agent.named_parameters()}
    for _ in range(4):
        learner.learn(learner.collect())
    unchanged = [name for name, value in learner.agent.named_parameters() if torch.equal(value, before[name])]
    assert not unchanged


def test_the_actor_is_the_one_that_never_had_them():
    """Without gradients of the critic, the hidden entries can't reach the actor: as if the environment lacked them."""
    alone = options(PPOConfig, critic_observations=(), env=SEEN, shared_trunk=False, critic_coeff=0.0)
    with_hidden = options(PPOConfig, critic_coeff=0.0)
    learners = [ALGORITHMS["ppo"].learner(config) for config in (alone, with_hidden)]
    actors = [learner.agent.actor for learner in learners]
    actors[1].load_state_dict(actors[0].state_dict())
    for _ in range(3):
        actions = []
        for learner in learners:
            torch.manual_seed(0)
            batch = learner.collect()
            actions.append(batch["action"])
            batch["advantage"] = torch.ones(*batch.shape, 1)
            losses = learner.loss.gradients(batch.update({"value_target": torch.ones(*batch.shape, 1)}))
            learner.optimizer.descend(losses["loss_objective"])
        assert torch.equal(*actions)
        for name, weight in actors[0].named_parameters():
            assert torch.equal(weight, dict(actors[1].named_parameters())[name])


def test_statistics_are_separate():
    learner = trained(options(PPOConfig))
    actor, critic = learner.agent.observations.norm, learner.agent.all_observations.norm
    assert (actor.moments.mean.numel(), critic.moments.mean.numel()) == (2, 5)
    seen = learner.agent.all_observations.flat.keys.index("seen")
    begin = 0 if seen == 0 else 3
    torch.testing.assert_close(critic.moments.mean[begin : begin + 2], actor.moments.mean)


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
def test_runs_are_evaluated_exported_and_loaded_without_them(tmp_path, kind):
    folder = RunFolder(tmp_path / "run")
    config = options(kind, eval_env=SEEN, eval_every=64)
    train(config, folder.path)
    assert len(evaluate_run(folder, episodes=2).returns) == 2
    exported = [export_run(folder, kind) for kind in ("torch", "compiled")]
    seen, hidden = np.array([0.5, 1.0], np.float32), np.array([9.0, 9.0, 9.0], np.float32)
    for source in (folder.path, *exported):
        policy = recurl.load(source)
        assert list(policy.observation_space.spaces) == ["seen"]
        action, _ = policy.predict({"seen": seen})
        np.testing.assert_array_equal(action, policy.predict({"seen": seen, "hidden": hidden})[0])
    compiled = recurl.load(folder.path).compiled()
    np.testing.assert_allclose(compiled(seen)[0], action, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
@pytest.mark.usefixtures("shared_interpreter")
def test_resumed_equals_uninterrupted(tmp_path, kind):
    config = options(kind)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "half", stop_after=2)
    train(config, tmp_path / "half", resume=True)
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    found = differing(final_state(tmp_path / "half"), final_state(tmp_path / "whole"))
    assert [place for place in found if not place.endswith("/gym/objects")] == []  # pickled anew


SENSORS = {"observation_noise": 0.2, "observation_delay": 2}


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
@pytest.mark.usefixtures("shared_interpreter")
def test_the_critic_sees_what_sensors_blur(tmp_path, kind):
    config = options(kind, **SENSORS)
    batch = trained(config, 1).collect()
    position = batch["hidden"][..., 1]
    noise = batch["seen"][..., 0] - position
    assert noise.abs().max() > 0.1  # also late
    torch.testing.assert_close(batch["hidden"][..., 2], position * batch["hidden"][..., 0])
    assert 0.1 < (batch["seen"][..., 1] - 1).std() < 0.3
    train(config, tmp_path / "whole")
    train(config, tmp_path / "half", stop_after=2)
    train(config, tmp_path / "half", resume=True)
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    folder = RunFolder(tmp_path / "whole")
    torch.manual_seed(0)
    first = evaluate_run(folder, episodes=3)
    torch.manual_seed(1)
    assert evaluate_run(folder, episodes=3).returns == first.returns
    seen = {"seen": np.ones((2, 2), np.float32)}
    actions = [recurl.load(source).predict(seen)[0] for source in (folder, export_run(folder, "torch"))]
    np.testing.assert_allclose(actions[0], actions[1], atol=1e-5)


def test_noise_needs_numbers():
    make = partial(gym.wrappers.DtypeObservation, gym.make("MountainCar-v0"), np.int64)
    config = PPOConfig(env=make, num_envs=1, **SENSORS)
    with pytest.raises(ArgumentError, match=r"--observation-noise needs floating-point observations, and .* has only"):
        ALGORITHMS["ppo"].learner(config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"critic_observations": ("velocity",)}, "has no 'velocity': it has seen, hidden|it has hidden, seen"),
        ({"critic_observations": ("seen", "hidden")}, "must leave the actor an observation"),
    ],
)
def test_wrong_names(more, message):
    with pytest.raises(ArgumentError, match=message):
        ALGORITHMS["ppo"].learner(options(PPOConfig, **more))


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
def test_contradictions(kind):
    with pytest.raises(ArgumentError, match="leave out --shared-trunk"):
        options(kind, shared_trunk=True)
    with pytest.raises(ArgumentError, match=r"hidden can't be in both"):
        options(kind, drop_observations=("hidden",))
    assert not options(kind).shared_trunk
    assert options(kind, critic_observations=()).shared_trunk


def test_the_mask_belongs_to_the_actor():
    class Choices(Masked):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Discrete(2)
            self.observation_space = Dict({"seen": Box(-9, 9, (2,)), "action_mask": gym.spaces.MultiBinary(2)})

        def _observed(self):
            return {"seen": np.zeros(2, np.float32), "action_mask": np.ones(2, np.int8)}

        def step(self, action):
            return super().step([action])

    with pytest.raises(ArgumentError, match="The actor reads the action_mask"):
        ALGORITHMS["ppo"].learner(options(PPOConfig, env=Choices, critic_observations=("action_mask",)))


def test_entries_of_images_and_parts():
    from tests.trainers.sights import PARTS

    learner = ALGORITHMS["ppo"].learner(small(env=PARTS))
    names = [".".join(key) if isinstance(key, tuple) else key for key in learner.agent.observations.keys]
    learner = ALGORITHMS["ppo"].learner(small(env=PARTS, critic_observations=(names[0],)))
    assert len(learner.agent.observations.keys) == len(names) - 1
    learner.learn(learner.collect())
