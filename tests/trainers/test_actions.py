"""All kinds of actions, and masks, in whole runs: collection, replay, resuming, evaluation, doctor, export."""

import io
import json

import pytest
import torch
from rich.console import Console

from recurl.collectors import collector as collection
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.diagnostics import check_wiring
from recurl.modules import recurrent_modules
from recurl.sequences.mode import set_recurrent_mode
from recurl.trainers import (
    ALGORITHMS,
    DQN,
    PPO,
    SAC,
    TD3,
    A2CConfig,
    DQNConfig,
    Impala,
    ImpalaConfig,
    PPOConfig,
    ReplayConfig,
    RunFolder,
    SACConfig,
    TD3Config,
    Trainer,
    evaluate_run,
    export_run,
    make_env,
)
from recurl.trainers.algorithms.on_policy import OnPolicy
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.envs.masked import ACTION_SPACES
from tests.pairs import paired

pytestmark = pytest.mark.usefixtures("no_curves")

ANY, MASKED = "RecurlTest/AnyAction-v0", "RecurlTest/Masked-v0"
SMALL = {"num_envs": 3, "rollout_steps": 16, "hidden_size": 8, "eval_episodes": 6, "checkpoint_every": 1}
PPO_SMALL = {**SMALL, "minibatches": 2, "sequence_length": 8, "entropy_coeff": 0.01, "total_steps": 192}
DQN_SMALL = {**SMALL, "slices": 4, "slice_length": 6, "learning_starts": 48, "buffer_size": 150, "total_steps": 192}


def options(kind, **more):
    on_policy = {**SMALL, "entropy_coeff": 0.01, "total_steps": 192}
    small = DQN_SMALL if issubclass(kind, ReplayConfig) else {PPOConfig: PPO_SMALL}.get(kind, on_policy)
    return kind(**{**small, **more})


def of_any(action, kind=PPOConfig, **more):
    return options(kind, env=ANY, env_kwargs=(f"kind={action}",), **more)


@pytest.mark.parametrize("action", ACTION_SPACES)
def test_collection_equals_replay(action):
    learner = PPO(of_any(action))
    assert learner.collector.explain()["tensors"] is None
    assert learner.loss.explain()["tensors"] is None
    for _ in range(2):
        batch = learner.collect()
        losses = learner.loss(learner.estimator(batch.copy()))
        assert (losses["max_ratio"] - 1).abs() < 1e-5
        assert batch["action_log_prob"].shape == (3, 16)
        assert all(map(torch.isfinite, map(torch.as_tensor, learner.learn(batch).values())))
    learner.close()


CHOICES = ["start", "multi", "matrix of integers", "multi with start"]
BOXES = ["scalar", "matrix"]


FITTING = [*((SACConfig, name) for name in (*CHOICES, *BOXES, "unbounded")), *((TD3Config, name) for name in BOXES)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "action"), FITTING)
@pytest.mark.parametrize("shared", [True, False])
def test_collection_equals_replay_of_actor_and_critics(kind, action, shared):
    learner = ALGORITHMS[kind.algorithm].learner(of_any(action, kind, shared_trunk=shared, cell="gru"))
    assert learner.collector.explain()["tensors"] is None
    assert learner.loss.explain()["tensors"] is None
    states = [key for part in recurrent_modules(learner.agent.policy) for key in part.state_keys]
    assert len(states) == (1 if shared else 2)
    for _ in range(3):
        batch = learner.collect()
        replayed = batch.select(*learner.loss.in_keys, strict=False)
        with set_recurrent_mode(True), torch.no_grad():
            for network in learner.loss.networks():
                network(replayed)
        for key in states:
            torch.testing.assert_close(replayed["next", key], batch["next", key], rtol=1e-5, atol=1e-6)
        learned = learner.learn(batch)
    assert all(map(torch.isfinite, map(torch.as_tensor, learned.values())))
    learner.close()


@pytest.mark.parametrize("clip_epsilon", [None, 0.2])
@pytest.mark.parametrize("action", ACTION_SPACES)
def test_importance_weights_of_a_new_batch_are_one(action, clip_epsilon):
    learner = Impala(options(ImpalaConfig, env=ANY, env_kwargs=(f"kind={action}",), clip_epsilon=clip_epsilon))
    assert learner.collector.explain()["tensors"] is None
    assert learner.loss.explain()["tensors"] is learner.estimator.explain()["tensors"] is None
    for _ in range(2):
        batch = learner.collect()
        weight = learner.estimator(batch.copy())["importance_weight"]
        assert (weight - 1).abs().max() < 1e-5
        assert all(map(torch.isfinite, map(torch.as_tensor, learner.learn(batch).values())))
    learner.close()


@pytest.mark.parametrize("action", ["start", "multi", "matrix", "nested"])
@pytest.mark.parametrize("kind", [PPOConfig, A2CConfig, ImpalaConfig])
def test_tensordicts_give_the_same_numbers(kind, action, monkeypatch):
    monkeypatch.setattr(collection, "CompiledNetwork", lambda network: network)  # which rounds differently
    monkeypatch.setattr(OnPolicy, "gradients", lambda learner: learner.loss.gradients)  # and so does its fastest form
    batches = []
    for lowered in (True, False):
        learner = ALGORITHMS[kind.algorithm].learner(options(kind, env=ANY, env_kwargs=(f"kind={action}",)))
        if not lowered:
            learner.agent.actor.module[0].module[0].register_forward_hook(lambda *_: None)
        assert (learner.loss.explain()["tensors"] is None) == lowered
        batch = learner.collect()
        learned = learner.learn(batch)
        batches.append((batch, learned))
        learner.close()
    (first, of_first), (second, of_second) = batches
    assert (first.exclude("collector") == second.exclude("collector")).all()
    assert of_first == of_second


def run(config, path, stop_after=None, resume=False):
    folder = RunFolder(path)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.resume() if resume else folder.create(config)
    left = iter(range(stop_after - 1, -1, -1)) if stop_after else None
    trainer.run(lambda: left is not None and next(left) == 0)
    trainer.close()
    return folder


def weights(folder):
    return load_checkpoint(latest_checkpoint(folder.checkpoints))["algorithm"]["agent"]


MASKS = {
    "observation": {},
    "info": {"env_kwargs": ("where=info",)},
    "named": {"env_kwargs": ("entry=legal",), "action_mask": "legal"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "masks"),
    [*paired([PPOConfig, A2CConfig, ImpalaConfig], [*MASKS]), *paired([DQNConfig, SACConfig], [*MASKS])],
)
def test_masked_runs(tmp_path, kind, masks):
    """The environment rejects masked actions, so a run shows that neither training nor evaluation takes any."""
    config = options(kind, env=MASKED, **MASKS[masks])
    folder = run(config, tmp_path)
    assert evaluate_run(folder, episodes=6).mean_return == 5.0
    agent = ALGORITHMS[kind.algorithm].learner(config).agent
    assert "action_mask" not in agent.observations.keys
    with make_env(config, 2, policy=agent.policy) as env:
        results = check_wiring(agent.policy, env, 16)
    assert [result for result in results if not result.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("config", [of_any("nested"), options(DQNConfig, env=MASKED)], ids=["nested", "masked"])
def test_a_resumed_run_is_the_whole_run(tmp_path, config):
    whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "parts", stop_after=2)
    parts = run(config, tmp_path / "parts", resume=True)
    first, second = weights(whole), weights(parts)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("config", "kind", "action"),
    [
        (of_any("nested"), "onnx", {"kind": "parts"}),
        pytest.param(
            of_any("multi"), "torch", {"kind": "multi_categorical", "nvec": [2, 3, 4]}, marks=pytest.mark.full
        ),
        (of_any("unbounded"), "torch", {"kind": "unbounded", "shape": [2]}),
        (options(PPOConfig, env=MASKED), "torch", {"kind": "categorical", "n": 4}),
        (options(DQNConfig, env=MASKED), "onnx", {"kind": "categorical", "n": 4}),
        (of_any("multi", SACConfig), "onnx", {"kind": "multi_categorical", "nvec": [2, 3, 4]}),
        pytest.param(of_any("matrix", A2CConfig), "torch", {"kind": "box"}, marks=pytest.mark.full),
    ],
    ids=["nested", "multi", "unbounded", "masked-ppo", "masked-dqn", "multi-sac", "matrix"],
)
@pytest.mark.slow
@pytest.mark.usefixtures("brief_verification")
def test_exports(tmp_path, config, kind, action):
    path = export_run(run(config, tmp_path), kind)  # which compares it with the policy
    about = json.loads(path.with_name(path.name + ".json").read_text())
    assert about["action"].items() >= action.items()
    names = {part["name"] for part in about["inputs"]}
    assert ("action_mask" in names) == (config.env == MASKED)
    if action == {"kind": "parts"}:
        assert [part["name"] for part in about["outputs"]][:3] == ["action.arm.0", "action.arm.1", "action.leg"]


def test_without_masks_the_entry_is_an_observation():
    learner = PPO(options(PPOConfig, env="RecurlTest/Masked-v0", action_mask="none"))
    assert sorted(learner.agent.observations.keys) == ["action_mask", "time"]
    assert "action_mask" not in str(learner.agent.actor[-1].in_keys)
    learner.close()


def test_a_network_may_see_the_mask():
    learner = PPO(options(PPOConfig, env="RecurlTest/Masked-v0", show_action_mask=True))
    assert sorted(learner.agent.observations.keys) == ["action_mask", "time"]
    assert "action_mask" in learner.agent.actor[-1].in_keys
    learner.learn(learner.collect())
    learner.close()


def test_unsupported_actions():
    with pytest.raises(ArgumentError, match="--env RecurlTest/Masked-v0 can't be used: The mask 'legal'"):
        PPO(options(PPOConfig, env=MASKED, action_mask="legal"))
    for action in ("dict", "binary"):
        with pytest.raises(UnsupportedError, match="SAC needs Box, Discrete or MultiDiscrete actions, got"):
            SAC(of_any(action, SACConfig))
    for action in ("multi", "unbounded"):
        with pytest.raises(UnsupportedError, match="TD3 needs Box actions with two finite bounds"):
            TD3(of_any(action, TD3Config))
    with pytest.raises(UnsupportedError, match="DQN needs Discrete actions"):
        DQN(options(DQNConfig, env=ANY, env_kwargs=("kind=dict",)))
