from pathlib import Path

import pytest
import torch

from recurl import execution
from recurl.core.errors import ArgumentError
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.files.checkpoints import restoring


def config(**options):
    return PPOConfig(
        **{
            "env": "recurl/RepeatPrevious-v0",
            "env_kwargs": ("k=1", "episode_length=10"),
            "hidden_size": 8,
            "num_envs": 4,
            "rollout_steps": 16,
            "sequence_length": 8,
            "total_steps": 640,
            **options,
        }
    )


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm"},
        {"cell": "gru", "num_layers": 2},
        {"cell": "none"},
        {"shared_trunk": False},
        {"normalize_observations": False, "scale_rewards": False, "learning_rate_schedule": "constant"},
        {"env": "Pendulum-v1", "env_kwargs": ()},
        {"env": "recurl/MaskedPendulum-v1", "env_kwargs": ()},
    ],
)
def test_an_update_changes_every_weight(options):
    ppo = PPO(config(**options))
    before = {name: value.clone() for name, value in ppo.agent.named_parameters()}
    batch = ppo.collect()
    assert batch.batch_size == (4, 16)
    row = ppo.learn(batch)
    assert ppo.env_steps == 64
    assert ppo.loss.explain()["tensors"] is ppo.estimator.explain()["tensors"] is None
    assert all(torch.tensor(list(row.values())).isfinite())
    unchanged = [name for name, value in ppo.agent.named_parameters() if torch.equal(value, before[name])]
    assert unchanged == []
    ppo.close()


@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
def test_ratio_is_one_at_first_with_normalization(cell):
    ppo = PPO(config(cell=cell, learning_rate=1e-12))
    for _ in range(3):
        row = ppo.learn(ppo.collect())
        assert abs(row["loss_objective"]) < 1e-5
        assert row["clip_fraction"] == 0
        assert row["kl_approx"] < 1e-5
    assert ppo.agent.norm.moments.count == 3 * 64
    ppo.close()


def test_a_state_of_other_options_is_refused():
    state = PPO(config()).state_dict()
    with (
        pytest.raises(ArgumentError, match=r"1.pt doesn't fit the run's config\.json: RuntimeError"),
        restoring(Path("1.pt")),
    ):
        PPO(config(hidden_size=16)).load_state_dict(state)


@pytest.mark.parametrize(
    "options", [{"clip_value": 0.02}, {"adam_eps": 0.1}, {"clip_value": 0.02, "shared_trunk": False}]
)
def test_options_of_loss_and_optimizer_count_with_and_without_the_compiled_pass(options):
    def learned(compiled, **more):
        ppo = PPO(config(learning_rate=0.01, **more))
        batch = ppo.collect()
        gradients = execution.compile(ppo.loss.gradients, backend="auto" if compiled else "eager")
        ppo.gradients = lambda: gradients
        ppo.learn(batch)
        assert gradients.explain().form == ("fused" if compiled else "eager")
        ppo.close()
        return torch.nn.utils.parameters_to_vector(ppo.agent.parameters()).detach()

    fast, plain, other = (
        learned(True, **options),
        learned(False, **options),
        learned(True, **{**options, "clip_value": 0.0, "adam_eps": 1e-5}),
    )
    torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-4)
    assert (fast - other).abs().max() > 1e-2
