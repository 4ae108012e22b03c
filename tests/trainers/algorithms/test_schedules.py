"""Schedules of learning rate, entropy bonus and clipping range, and of options of a custom algorithm."""

import io
import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console

from recurl.cli import main
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.ranges import Positive
from recurl.trainers import (
    A2C,
    DQN,
    PPO,
    A2CConfig,
    DQNConfig,
    Impala,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    RunFolder,
    Trainer,
)
from recurl.trainers.config import Schedule
from recurl.trainers.report.metrics import read_metrics
from tests.trainers.run.test_trainer import config, differing, final_state, metrics, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

FACTORS = {
    "constant": [1.0] * 6,
    "linear": [1 - done / 6 for done in range(6)],
    "cosine": [(1 + math.cos(math.pi * done / 6)) / 2 for done in range(6)],
}


def column(path, name):
    return [float(row[name]) for row in read_metrics(RunFolder(path).metrics)[1]]


@pytest.mark.parametrize("schedule", FACTORS)
@pytest.mark.parametrize(
    ("kind", "learner"),
    [(PPOConfig, PPO), (A2CConfig, A2C), (ImpalaConfig, Impala), (DQNConfig, DQN), (R2D2Config, DQN)],
)
def test_every_algorithm_has_one_of_its_step_size(kind, learner, schedule):
    algorithm = learner(config(kind, learning_rate=1e-2, learning_rate_schedule=schedule))
    found = []
    for _ in range(6):
        algorithm.learn(algorithm.collect())
        found.append(algorithm.optimizer.optimizer.param_groups[0]["lr"])
        assert algorithm.scheduled["learning_rate"] == found[-1]
    assert found == pytest.approx([1e-2 * factor for factor in FACTORS[schedule]])
    algorithm.close()


@pytest.mark.parametrize("schedule", FACTORS)
def test_those_of_the_loss(schedule):
    own = {f"{name}_schedule": schedule for name in ("entropy_coeff", "clip_epsilon")}
    ppo = PPO(config(entropy_coeff=0.1, clip_epsilon=0.3, **own))
    found = []
    for _ in range(6):
        ppo.learn(ppo.collect())
        found.append((ppo.loss.entropy_coeff, ppo.loss.clip_epsilon))
    assert found == [pytest.approx((0.1 * factor, 0.3 * factor)) for factor in FACTORS[schedule]]
    ppo.close()


def test_defaults_and_columns(tmp_path):
    train(config(total_steps=128), tmp_path)
    assert column(tmp_path, "learning_rate") == pytest.approx([1e-3, 0.5e-3])
    assert column(tmp_path, "entropy_coeff") == pytest.approx([0.01, 0.005])
    assert column(tmp_path, "clip_epsilon") == [0.2, 0.2]
    assert config(DQNConfig).scheduled == {"learning_rate": "linear"}


def test_anneal_of_old_runs_is_read():
    values = {name: value for name, value in config().to_dict().items() if not name.endswith("_schedule")}
    for anneal, schedule in ((True, "linear"), (False, "constant")):
        found = PPOConfig.from_dict({**values, "anneal": anneal}).scheduled
        assert found == {"learning_rate": schedule, "entropy_coeff": schedule, "clip_epsilon": "constant"}


@dataclass(frozen=True, kw_only=True)
class WarmConfig(DQNConfig):
    """Options with a custom schedule."""

    temperature: Positive = 2.0
    temperature_schedule: Schedule = "linear"


class Warm(DQN):
    def schedules(self):
        return {**super().schedules(), "temperature": lambda value: setattr(self, "temperature", value)}


def test_an_own_option_with_a_schedule():
    warm = Warm(config(WarmConfig))
    for _ in range(4):
        warm.collect()
    assert warm.temperature == pytest.approx(1.0)
    warm.close()
    deaf = DQN(config(WarmConfig))
    with pytest.raises(
        UnsupportedError, match=r"DQN.schedules\(\) must return a setter for temperature, as its options"
    ):
        deaf.collect()
    deaf.close()


CONSTANT = {"learning_rate_schedule": "constant", "entropy_coeff_schedule": "constant"}


def test_an_extended_run_is_the_longer_run_where_nothing_depends_on_its_length(tmp_path):
    options = config(**CONSTANT)
    train(options, tmp_path / "long")
    train(replace(options, total_steps=192), tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--total-steps", "384"]) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "long")
    assert differing(final_state(tmp_path / "run"), final_state(tmp_path / "long")) == []
    assert json.loads(RunFolder(tmp_path / "run").config.read_text())["total_steps"] == 384


@pytest.mark.parametrize("kind", [PPOConfig, R2D2Config])
def test_schedules_continue_over_the_new_total_from_the_current_step(tmp_path, kind, capsys):
    train(config(kind, total_steps=192, learning_rate=1e-3, learning_rate_schedule="linear"), tmp_path)
    assert main(["train", "--resume", str(tmp_path), "--total-steps", "400"]) == 0
    expected = [1 - done / 3 for done in range(3)] + [1 - done / 6 for done in range(3, 6)]
    assert column(tmp_path, "learning_rate") == pytest.approx([1e-3 * factor for factor in expected])
    assert "Finished after 384 steps" in capsys.readouterr().out


def test_extensions_that_add_nothing(tmp_path, capsys):
    train(config(), tmp_path)
    before = RunFolder(tmp_path).config.read_text()
    for steps in (384, 447, 64):
        with pytest.raises(ArgumentError, match=r"--total-steps must exceed the 384 steps of the newest checkpoint"):
            RunFolder(tmp_path).extend(steps)
    assert main(["train", "--resume", str(tmp_path), "--total-steps", "100"]) == 2
    assert "by at least one batch of 64, got 100" in capsys.readouterr().err
    assert RunFolder(tmp_path).config.read_text() == before
    with pytest.raises(ArgumentError, match="holds no run"):
        RunFolder(tmp_path / "none").extend(1000)


def test_an_extension_in_python(tmp_path):
    folder = RunFolder(tmp_path)
    train(config(), tmp_path)
    trainer = Trainer(folder.extend(512), folder, console=Console(file=io.StringIO()))
    trainer.resume()
    assert trainer.run().env_steps == 512
    trainer.close()


def test_a_clip_range_may_be_a_tensor():
    def learned(epsilon):
        ppo = PPO(config(clip_epsilon=0.01))
        ppo.loss.clip_epsilon = epsilon
        row = ppo.learn(ppo.collect())
        ppo.close()
        return row

    assert learned(torch.tensor(0.01)) == pytest.approx(learned(0.01), rel=1e-4)


ADAPTIVE = {"learning_rate_schedule": "adaptive", "epochs": 2, "minibatches": 2}


def adapted(options, updates=4):
    """Rates and losses of some updates, and the divergences of all gradient steps."""
    ppo, seen = PPO(options), []
    adapt = ppo._adapt
    ppo._adapt = lambda kl: (seen.append(kl.item()), adapt(kl))
    rows = [ppo.learn(ppo.collect()) for _ in range(updates)]
    ppo.close()
    return rows, seen


@pytest.mark.parametrize("target", [1e-6, 1e-3, 10.0])
def test_an_adaptive_rate_follows_the_divergence_of_each_gradient_step_but_the_first(target):
    rows, seen = adapted(config(**ADAPTIVE, target_kl=target, learning_rate=1e-3))
    assert len(seen) == 4 * 3  # of four gradient steps
    rate = torch.tensor(1e-3)
    for number, row in enumerate(rows):
        for kl in seen[3 * number : 3 * number + 3]:
            factor = 1 / 1.5 if kl > 2 * target else 1.5 if kl < target / 2 else 1.0
            rate = (rate * factor).clamp(1e-5, 1e-2)
        assert row["learning_rate"] == pytest.approx(rate.item(), rel=1e-5)
    assert rows[0]["kl_approx"] == pytest.approx(sum(seen[1:3]) / 2, rel=1e-4)


def test_an_adaptive_rate_is_the_same_from_the_definition_and_from_compiled_code(monkeypatch):
    """The library's loss, compiled code and the definition measure the same divergence."""
    options = config(**ADAPTIVE, target_kl=1e-3)
    (expected, seen), (compiled, also_seen) = adapted(options, 2), adapted(replace(options, compile=True), 2)
    monkeypatch.setattr("recurl.execution.executor.FORMS", {})
    plain, again_seen = adapted(options, 2)
    for found in (also_seen, again_seen):
        assert found == pytest.approx(seen, rel=1e-2, abs=1e-6)
    for found in (compiled, plain):
        assert [row["learning_rate"] for row in found] == pytest.approx([row["learning_rate"] for row in expected])


def test_an_adaptive_rate_is_in_the_metrics_and_resumes_exactly(tmp_path):
    options = config(**ADAPTIVE, target_kl=1e-3)
    train(options, tmp_path / "whole")
    train(options, tmp_path / "run", stop_after=3)
    train(options, tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert differing(final_state(tmp_path / "run"), final_state(tmp_path / "whole")) == []
    rates = column(tmp_path / "run", "learning_rate")
    assert len(rates) == 6
    assert len(set(rates)) > 2


def test_an_adaptive_rate_of_another_algorithm_or_without_anything_to_measure():
    for kind in (A2CConfig, ImpalaConfig, DQNConfig):
        with pytest.raises(
            ArgumentError, match="--learning-rate-schedule must be one of constant, linear, cosine, got"
        ):
            config(kind, learning_rate_schedule="adaptive")
    with pytest.raises(ArgumentError, match="needs two gradient steps per update or more"):
        config(learning_rate_schedule="adaptive", epochs=1, minibatches=1)
    with pytest.raises(ArgumentError, match=r"--learning-rate must lie between 1e-05 and 0\.01 with"):
        config(learning_rate_schedule="adaptive", learning_rate=0.1)
