"""Every kind of action, and masks, through whole runs: collection, replay, resume, evaluation, doctor, export."""

import io
import json

import pytest
import torch
from rich.console import Console

from recurl.diagnostics import check_wiring
from recurl.errors import ArgumentError, UnsupportedError
from recurl.trainers import (
    ALGORITHMS,
    DQN,
    PPO,
    A2CConfig,
    DQNConfig,
    Impala,
    ImpalaConfig,
    PPOConfig,
    RunFolder,
    Trainer,
    evaluate_run,
    export_run,
    make_env,
)
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.envs.masked import ACTION_SPACES

ANY, MASKED = "RecurlTest/AnyAction-v0", "RecurlTest/Masked-v0"
SMALL = {"num_envs": 3, "rollout_steps": 16, "hidden_size": 8, "eval_episodes": 6, "checkpoint_every": 1}
PPO_SMALL = {**SMALL, "minibatches": 2, "sequence_length": 8, "entropy_coeff": 0.01, "total_steps": 192}
DQN_SMALL = {**SMALL, "slices": 4, "slice_length": 6, "learning_starts": 48, "buffer_size": 150, "total_steps": 192}


def options(kind, **more):
    small = {PPOConfig: PPO_SMALL, DQNConfig: DQN_SMALL}.get(kind, {**SMALL, "entropy_coeff": 0.01, "total_steps": 192})
    return kind(**{**small, **more})


def of_any(action, **more):
    return options(PPOConfig, env=ANY, env_kwargs=(f"kind={action}",), **more)


@pytest.mark.parametrize("action", ACTION_SPACES)
def test_collection_equals_replay(action):
    learner = PPO(of_any(action))
    assert learner.collector.why_not_lowered() is None
    assert learner.loss.why_not_lowered() is None
    for _ in range(2):
        batch = learner.collect()
        losses = learner.loss(learner.estimator(batch.copy()))
        assert (losses["max_ratio"] - 1).abs() < 1e-5
        assert batch["action_log_prob"].shape == (3, 16)
        assert all(map(torch.isfinite, map(torch.as_tensor, learner.learn(batch).values())))
    learner.close()


@pytest.mark.parametrize("clip_epsilon", [None, 0.2])
@pytest.mark.parametrize("action", ACTION_SPACES)
def test_importance_weights_of_what_was_just_collected_are_one(action, clip_epsilon):
    learner = Impala(options(ImpalaConfig, env=ANY, env_kwargs=(f"kind={action}",), clip_epsilon=clip_epsilon))
    assert learner.collector.why_not_lowered() is None
    assert learner.loss.why_not_lowered() is learner.estimator.why_not_lowered() is None
    for _ in range(2):
        batch = learner.collect()
        weight = learner.estimator(batch.copy())["importance_weight"]
        assert (weight - 1).abs().max() < 1e-5
        assert all(map(torch.isfinite, map(torch.as_tensor, learner.learn(batch).values())))
    learner.close()


@pytest.mark.parametrize("action", ["start", "multi", "matrix", "nested"])
@pytest.mark.parametrize("kind", [PPOConfig, A2CConfig, ImpalaConfig])
def test_tensordicts_give_the_same_numbers(kind, action):
    batches = []
    for lowered in (True, False):
        learner = ALGORITHMS[kind.algorithm].learner(options(kind, env=ANY, env_kwargs=(f"kind={action}",)))
        if not lowered:
            learner.agent.actor.module[0].module[0].register_forward_hook(lambda *_: None)
        assert (learner.loss.why_not_lowered() is None) == lowered
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
@pytest.mark.parametrize("kind", [PPOConfig, A2CConfig, ImpalaConfig, DQNConfig])
@pytest.mark.parametrize("masks", MASKS)
def test_masked_runs(tmp_path, kind, masks):
    """The environment refuses forbidden actions, so a run shows that neither training nor evaluation takes any."""
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
        (of_any("multi"), "torch", {"kind": "multi_categorical", "nvec": [2, 3, 4]}),
        (of_any("unbounded"), "onnx", {"kind": "unbounded", "shape": [2]}),
        (options(PPOConfig, env=MASKED), "torch", {"kind": "categorical", "n": 4}),
        (options(DQNConfig, env=MASKED), "onnx", {"kind": "categorical", "n": 4}),
    ],
    ids=["nested", "multi", "unbounded", "masked-ppo", "masked-dqn"],
)
@pytest.mark.slow
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


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="--env RecurlTest/Masked-v0 can't be used: The mask 'legal'"):
        PPO(options(PPOConfig, env=MASKED, action_mask="legal"))
    with pytest.raises(UnsupportedError, match="DQN needs Discrete actions"):
        DQN(options(DQNConfig, env=ANY, env_kwargs=("kind=dict",)))
