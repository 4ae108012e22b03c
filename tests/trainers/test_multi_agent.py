"""Runs of several agents: shared policies, central critics, absent agents in statistics, names, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

import recurl
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs import SerialEnv, TransformedEnv
from recurl.modules import RewardScaler
from recurl.trainers import (
    PPO,
    A2CConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    RunFolder,
    SACConfig,
    evaluate_policy,
    evaluate_run,
    play_run,
)
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.motion import motion_of
from tests.envs.agents import LIMIT, Walkers
from tests.envs.test_multi_agent import Unsaved
from tests.trainers.run.test_trainer import differing, final_state, train

pytestmark = pytest.mark.usefixtures("no_curves")
SMALL = {"num_envs": 6, "rollout_steps": 16, "total_steps": 6 * 64, "hidden_size": 8, "eval_episodes": 12}
STAYING = {"lives": (None, None, None), "waits": (None, None, None), "agents_leave": False}


def walkers(num_envs=3, **options):
    return Walkers(-(-num_envs // 3), **options)


def central(num_envs=3):
    return walkers(num_envs, return_state=True, agent_ids=True)


@pytest.mark.parametrize("kind", [PPOConfig, A2CConfig, ImpalaConfig])
def test_agents_alone_and_a_central_critic(kind, tmp_path):
    options = kind(env=central, critic_observations=("state",), cell="gru", **SMALL)
    assert train(options, tmp_path / "run")[0].env_steps == 384
    policy = recurl.load(RunFolder(tmp_path / "run"), env=central)
    assert "Dict('agent_id': Discrete(3), 'observation'" in repr(policy)  # no state, no mask
    found = evaluate_run(RunFolder(tmp_path / "run"), episodes=12, env=central)
    assert {*found.lengths} <= {3, 11, 5, 1}  # agent 0 lives 3 steps, or 1 before its environment ends; agent 2, 5 or 1
    assert 11 in found.lengths


def test_a_run_resumes_bit_for_bit(tmp_path):
    options = PPOConfig(env=walkers, cell="gru", scale_rewards=True, **{**SMALL, "total_steps": 192})
    train(options, tmp_path / "a")
    train(options, tmp_path / "b", stop_after=1)
    assert "isn't restored" not in train(options, tmp_path / "b", resume=True)[1]
    assert not differing(final_state(tmp_path / "a"), final_state(tmp_path / "b"))
    policy, size = recurl.load(RunFolder(tmp_path / "a"), env=walkers), walkers().observation_spec["observation"].shape
    action, _ = policy.predict(np.zeros(size[1:], np.float32))  # what one agent sees, without a name
    assert action.shape == walkers().action_spec.shape[1:]


def test_absent_agents_change_no_statistics():
    learner = PPO(PPOConfig(env=walkers, cell="gru", **SMALL, normalize_observations=True, scale_rewards=True))
    batch = learner.collect()
    mask = batch["collector", "mask"]
    assert not mask.all()
    poisoned = batch.clone()
    poisoned["observation"][~mask] = 100.0
    reward, done = batch["next", "reward"].clone(), batch["next", "done"]
    scaler = RewardScaler(learner.config.gamma, (6,))
    scaler.update(reward, done, mask)
    learned = learner.learn(poisoned)
    moments = learner.agent.norm.moments
    assert torch.allclose(moments.mean, batch["observation"][mask].mean(0), atol=1e-6)
    assert int(moments.count) == int(mask.sum()) == int(scaler.moments.count)
    assert torch.equal(learner.scaler.moments.var, scaler.moments.var)
    assert all(np.isfinite(value) for value in learned.values())
    values, targets = (poisoned[key][..., 0][mask] for key in ("state_value", "value_target"))
    explained = 1 - (targets - values).var(correction=0) / targets.var(correction=0)
    assert learned["explained_variance"] == pytest.approx(float(explained), abs=1e-4)
    learner.close()


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
def test_scaled_returns_of_episodes_that_are_not_resumed_end(kind):
    options = kind(env=lambda num_envs=6: Unsaved(num_envs // 3, **STAYING), scale_rewards=True, cell="gru", **SMALL)
    ran, resumed = make_algorithm(options), make_algorithm(options)
    for _ in range(2):
        ran.learn(ran.collect())
    assert ran.scaler.returns.all()  # of running episodes
    resumed.load_state_dict(ran.state_dict())
    assert not resumed.restored_episodes
    assert not resumed.scaler.returns.any()
    assert torch.equal(resumed.scaler.moments.var, ran.scaler.moments.var)


def test_playing_says_that_agents_are_not_rendered(tmp_path):
    train(PPOConfig(env=walkers, cell="none", **{**SMALL, "total_steps": 96}), tmp_path / "run")
    said = []
    folder = RunFolder(tmp_path / "run", notify=said.append)
    assert len(play_run(folder, env=walkers)[0].returns) == 1
    assert said == [
        "Nothing is shown because environments of several agents aren't rendered: step one of your own with the policy "
        "recurl.load(run), and render it there."
    ]
    with pytest.raises(ArgumentError, match=r"--video can't record .*walkers\(\), because environments of s"):
        play_run(folder, env=walkers, video=tmp_path / "out.mp4")


class Faulty(Walkers):
    """One agent of the second environment observes NaN at the fifth step of a run."""

    total = 0

    def _step_envs(self, actions):
        found, self.total = super()._step_envs(actions), self.total + 1
        if self.total == 5:
            found.observation[1, 1] = torch.nan
        return found


def test_a_fault_of_one_agent_begins_its_environment_anew(tmp_path):
    made = []
    options = PPOConfig(
        env=lambda num_envs=6: made.append(Faulty(num_envs // 3)) or made[-1],
        on_nonfinite="skip",
        **SMALL,
    )
    trainer = train(options, tmp_path / "run")[0]
    env = made[0]
    assert env.rows_per_env == TransformedEnv(env).rows_per_env == SerialEnv(2, walkers).rows_per_env == 3
    assert env.resets[:4] == [[0, 1], [0, 1], [1], [0]]  # at the start, step 11, after the batch of 16 steps, and 22
    assert trainer.env_steps == 384


def test_minibatches_without_an_agent_make_no_step():
    lives, waits, limits = (3, None, 9), (None, None, None), [10**6] * 2
    options = PPOConfig(
        env=lambda num_envs=6: Walkers(num_envs // 3, lives=lives, waits=waits, limits=limits),
        cell="gru",
        sequence_length=8,
        minibatches=12,
        epochs=2,
        learning_rate_schedule="adaptive",
        **SMALL,
    )
    learner = PPO(options)
    learner.learn(learner.collect())
    batch, steps = learner.collect(), []
    assert batch["collector", "mask"].all(1).sum() == 2  # the others have left
    descend, entropies = learner.optimizer.descend, []
    gradients = learner.gradients()

    def watched(minibatch):
        losses = gradients(minibatch)
        entropies.append(float(losses.get("entropy", 0.0)))
        return losses

    learner.gradients = lambda: watched
    learner.optimizer.descend = lambda total: steps.append(total) or descend(total)
    learned = learner.learn(batch)
    assert len(steps) == 2 * 4  # of 12 sequences, 4 are of agents that take part
    assert min(entropies) > 0
    assert learned["entropy"] == pytest.approx(sum(entropies[4:]) / 4)
    learner.close()


def test_episodes_and_motion_of_agents():
    torch.manual_seed(0)
    batch = walkers(6).rollout(40, break_when_any_done=False)
    reward, done, mask = batch["next", "reward"][..., 0], batch["next", "done"][..., 0], batch["collector", "mask"]
    stats, halves = EpisodeStats(6), EpisodeStats(6)
    stats.update(reward, done, present=mask)
    for part in (slice(0, 13), slice(13, 40)):
        halves.update(reward[:, part], done[:, part], present=mask[:, part])
    assert stats.episodes == halves.episodes == int((done & mask).sum())
    assert sorted(stats.returns) == pytest.approx(sorted(halves.returns))
    assert {*stats.lengths} <= {1, 3, 5, LIMIT}
    shown = batch.clone()
    shown["action"][~mask] = 77.0
    assert torch.equal(motion_of(batch), motion_of(shown))


def test_waiting_rows_are_no_episodes_of_an_evaluation():
    actor = TensorDictModule(lambda x: x, ["observation"], ["action"])
    found = evaluate_policy(actor, walkers(6), episodes=6 * 4)
    assert {*found.lengths} == {1, 3, 5, 11}  # agent 0 waits for 2 steps between its episodes
    assert sorted(found.lengths) == sorted(2 * [3, 3, 1, 3, 11, 11, 11, 11, 5, 5, 1, 5])


def test_names_and_rows():
    pytest.importorskip("vmas")
    learner = PPO(
        PPOConfig(
            env="vmas/balance",
            env_kwargs=("max_steps=5", "return_state=True"),
            critic_observations=("state",),
            cell="gru",
            **SMALL,
        )
    )
    batch = learner.collect()
    assert batch["observation"].shape == (6, 16, 16)
    assert ("collector", "mask") not in batch
    learner.learn(batch)
    learner.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"env": "vmas/balance", "num_envs": 7},
            "set --num-envs to 9, a multiple of the number of agents, each of which is a row",
        ),
        (
            {"env": "vmas/balanc"},
            "--env vmas/balanc can't be used: VMAS has no scenario 'balanc'. Did you mean balance",
        ),
        ({"env": "pettingzoo/sisl/none"}, "PettingZoo has no parallel environment 'sisl/none'"),
        ({"env": "vmas/"}, "named vmas/SCENARIO, pettingzoo/ID or pettingzoo/module:function, got 'vmas/'"),
        ({"env": "vmas/balance", "env_kwargs": ("continuous_actions=false",)}, "continuous_actions must be True or F"),
        ({"env": "vmas/balance", "wrapper": ("a:B",)}, "doesn't support --wrapper: leave it out"),
    ],
)
def test_refused_options(options, said):
    with pytest.raises(ArgumentError, match=said):
        PPO(PPOConfig(**{**SMALL, **options}))


@pytest.mark.parametrize("kind", [SACConfig, R2D2Config])
def test_replay_refuses_absent_agents(kind):
    action = {"action": "discrete"} if kind is R2D2Config else {}
    options = {"num_envs": 3, "rollout_steps": 8, "total_steps": 240, "cell": "gru", "learning_starts": 24}
    name = kind.algorithm_name()
    with pytest.raises(UnsupportedError, match=f"isn't supported with {name}, which replays all steps: use ppo"):
        make_algorithm(kind(env=lambda num_envs: walkers(num_envs, **action), **options))
    learner = make_algorithm(kind(env=lambda num_envs: walkers(num_envs, **STAYING, **action), **options))
    learner.learn(learner.collect())
    learner.close()
