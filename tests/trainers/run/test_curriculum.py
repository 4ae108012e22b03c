"""Callbacks that change the environments during training."""

import pytest
import torch

from recurl.core.errors import ArgumentError, CallbackError
from recurl.trainers import PPOConfig, RunFolder, Trainer
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.trainers.resumes import rows
from tests.trainers.run.test_callbacks import run

pytestmark = pytest.mark.usefixtures("no_curves")


class Wider:
    """Raises the randomization with every update, and records the factors of the arms that began in the last batch."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.seen = []

    def on_start(self, trainer):
        self.trainer = trainer

    def on_batch(self, batch):
        factors = batch["privileged"][..., 2:][batch["is_init"][..., 0]]
        self.seen.append(((factors - 1) / torch.tensor([0.5, 0.5, 0.75, 0.3])).abs().max().item())

    def on_update(self, row):
        scale = self.trainer.parameters.get("randomization", 0.0)
        self.trainer.set_parameters(randomization=min(1.0, scale + 0.1))
        if row["update"] == self.stop_after:
            self.trainer.stop()


def options(**more):
    given = {"num_envs": 4, "rollout_steps": 16, "total_steps": 64 * 6, "hidden_size": 8, "device": "cpu", "seed": 3}
    arm = ("randomization=0", "max_episode_steps=4")
    return PPOConfig(env="recurl/MaskedArm-v0", env_kwargs=arm, **{**given, **more})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"vectorization": "sync"},
        {"vectorization": "device"},
        {"previous_action": True, "previous_reward": True},
        pytest.param({"env_workers": 2}, marks=pytest.mark.slow),
        pytest.param({"env_workers": 2, "env_groups": 2}, marks=pytest.mark.slow),
        pytest.param({"vectorization": "device", "compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_callback_widens_the_randomization_and_the_run_resumes_bit_for_bit(more, tmp_path):
    config, whole, first, rest = options(**more), Wider(), Wider(3), Wider()
    run(config, tmp_path / "whole", whole)
    for number, seen in enumerate(whole.seen):
        assert 0.7 * 0.1 * number <= seen <= 0.1 * number + 1e-5
    run(config, tmp_path / "parts", first)
    run(config, tmp_path / "parts", rest, resume=True)
    assert first.seen + rest.seen == whole.seen
    assert rest.trainer.parameters == whole.trainer.parameters == {"randomization": pytest.approx(0.6)}
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    one, other = (
        load_checkpoint(latest_checkpoint(RunFolder(tmp_path / name).checkpoints))["algorithm"]["agent"]
        for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_evaluations_keep_the_environment_of_the_options(tmp_path):
    class Widest(Wider):
        def on_start(self, trainer):
            super().on_start(trainer)
            trainer.set_parameters(randomization=1)

    def evaluated(callback, name):
        run(options(eval_every=384, eval_episodes=3, learning_rate=1e-12), tmp_path / name, callback)
        line = (tmp_path / name / "evaluations.csv").read_text().splitlines()[-1]
        return [float(text) for text in line.split(",")[2:4]]

    class Nothing(Wider):
        def on_update(self, row):
            pass

    assert evaluated(Widest(), "one") == pytest.approx(evaluated(Nothing(), "other"), rel=1e-5)


def test_an_error_is_that_of_the_callback(tmp_path):
    class Wrong(Wider):
        def on_update(self, row):
            self.trainer.set_parameters(randomisation=0.5)

    with pytest.raises(CallbackError, match="MaskedArm has no parameter randomisation: it has randomization"):
        run(options(), tmp_path, Wrong())


def test_environments_in_other_processes_are_refused(tmp_path):
    config = options(overlap=True)
    with pytest.raises(CallbackError, match="collect beside this process: leave out --overlap"):
        run(config, tmp_path, Wider())


def test_a_saved_parameter_that_the_environment_lacks_is_named(tmp_path):
    run(options(), tmp_path, Wider(2))
    trainer = Trainer(options(), RunFolder(tmp_path), console=None)
    state = trainer.algorithm.state_dict()
    state["parameters"] = {"mass": 3}
    with pytest.raises(ArgumentError, match="has no parameter mass"):
        trainer.algorithm.load_state_dict(state)
    trainer.close()
