"""Asynchronous updates: the same rows, weights and checkpoints, and faults stop the run in time."""

import io
import math

import pytest
import torch
from rich.console import Console

from recurl.core.errors import NonFiniteError
from recurl.trainers import A2C, PPO, A2CConfig, PPOConfig, R2D2Config, RunFolder, SACConfig, Trainer
from recurl.trainers.algorithms.learner import Learner
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from recurl.trainers.report.metrics import read_metrics
from recurl.trainers.run import updates
from tests.trainers import faulty
from tests.trainers.run.test_faults import Explosion, is_good

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

CLOCK = {"wall_s", "cpu_s", "steps_per_s", "eval_s"}
SMALL = {"hidden_size": 8, "num_envs": 4, "rollout_steps": 8, "total_steps": 32 * 8, "checkpoint_every": 3}
BANDIT = {"env": "recurl/Bandit-v0", "env_kwargs": ("pulls=3",), "sequence_length": 4, "minibatches": 2, **SMALL}
REPLAY = {"env": "recurl/Bandit-v0", "env_kwargs": ("pulls=3",), **SMALL, "drawn_on": "device", "learning_starts": 64}
REPLAY |= {"slices": 4, "slice_length": 4, "gradient_steps": 2, "cell": "gru"}
FAULTY = {"env": f"{faulty.__name__}:recurl-test/Faulty-v0", "sequence_length": 4, **SMALL}


@pytest.fixture
def ahead(monkeypatch):
    """Treat the CPU as an asynchronous device."""
    monkeypatch.setattr(updates, "_AHEAD_ON", ("cpu",))


class Log:
    """Records the events of a run in order."""

    def __init__(self):
        self.events = []

    def on_batch(self, batch):
        self.events.append("batch")

    def on_update(self, row):
        self._note("update", row)

    def on_evaluation(self, row):
        self._note("evaluation", row)

    def on_checkpoint(self, path):
        self.events.append(("checkpoint", path.stem))

    def _note(self, name, row):
        self.events.append((name, {key: repr(value) for key, value in row.items() if key not in CLOCK}))

    @property
    def names(self):
        return [event if isinstance(event, str) else event[0] for event in self.events]

    @property
    def reports(self):
        return [event for event in self.events if not isinstance(event, str)]


def train(path, config, prepare=lambda trainer: None, *, resume=False, should_stop=lambda: False):
    """Train; return the folder, the error that ended the run, and the events."""
    folder, log = RunFolder(path), Log()
    if not resume:
        folder.create(config)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()), callbacks=[log])
    if resume:
        trainer.resume()
    prepare(trainer)
    try:
        return folder, trainer.run(should_stop), log
    except NonFiniteError as error:
        return folder, error, log
    finally:
        trainer.close()


def rows_of(folder):
    return [
        {name: value for name, value in row.items() if name not in CLOCK} for row in read_metrics(folder.metrics)[1]
    ]


def state_of(folder):
    state = load_checkpoint(latest_checkpoint(folder.checkpoints))
    del state["wall_s"], state["cpu_s"]
    return state


def assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert repr(left) == repr(right)


def without_ids(state):
    """Trajectory ids are unique within a process, so those of two runs differ, also in a replay buffer."""
    collector = dict(state["algorithm"]["collector"])
    del collector["traj_ids"]
    algorithm = {name: part for name, part in state["algorithm"].items() if name != "buffer"}
    return {**state, "algorithm": {**algorithm, "collector": collector}}


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(**BANDIT, eval_every=96, eval_episodes=2),
        PPOConfig(**BANDIT, vectorization="device", store_states="starts"),
        A2CConfig(**{name: value for name, value in BANDIT.items() if name not in ("sequence_length", "minibatches")}),
        R2D2Config(**REPLAY),
        SACConfig(**REPLAY, vectorization="device", target_entropy=0.1),
    ],
    ids=["evaluations", "device", "a2c", "r2d2", "sac"],
)
def test_a_run_is_the_same(tmp_path, config, monkeypatch):
    expected, _, log = train(tmp_path / "waits", config)
    monkeypatch.setattr(updates, "_AHEAD_ON", ("cpu",))
    folder, outcome, ahead_log = train(tmp_path / "ahead", config)
    assert outcome.status == "finished"
    assert rows_of(folder) == rows_of(expected)
    assert len(rows_of(folder)) == 8
    assert ahead_log.reports == log.reports
    assert_same(without_ids(state_of(folder)), without_ids(state_of(expected)))


def test_updates_but_the_first_are_reported_once_the_next_is_launched(tmp_path, ahead):
    _, _, log = train(tmp_path, PPOConfig(**{**BANDIT, "checkpoint_every": 4}))
    rest = ["batch", "update", "batch", "update", "update", "checkpoint"]
    assert log.names == ["batch", "update", "batch", *rest, "batch", "batch", "update", *rest]


def test_whoever_replaces_learn_is_waited_for(tmp_path, ahead):
    class Own(PPO):
        def learn(self, batch):
            return super().learn(batch)

    config = PPOConfig(**BANDIT)
    for learner, expected in ((PPO(config), True), (Own(config), False)):
        assert learner.learns_ahead == expected
        learned = learner.learn_later(learner.collect())
        assert learned().keys() == set(PPO.reported)
        learner.learn = lambda batch: {}
        assert not learner.learns_ahead
        assert learner.learn_later(learner.collect())() == {}
        learner.close()
    assert A2C.learns_ahead is not Learner.learns_ahead


@pytest.mark.parametrize("config", [PPOConfig(**BANDIT), R2D2Config(**REPLAY)], ids=["ppo", "r2d2"])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, ahead, config):
    whole, _, _ = train(tmp_path / "whole", config)
    calls = iter(range(100))
    part, outcome, _ = train(tmp_path / "part", config, should_stop=lambda: next(calls) == 3)
    assert (outcome.status, outcome.env_steps, len(rows_of(part))) == ("stopped", 128, 4)
    train(part.path, config, resume=True)
    assert rows_of(part) == rows_of(whole)
    assert_same(without_ids(state_of(part))["algorithm"], without_ids(state_of(whole))["algorithm"])


def test_a_run_that_is_solved_ends_there(tmp_path, monkeypatch):
    config = PPOConfig(**{**BANDIT, "stop_return": -1.0})
    expected, outcome, _ = train(tmp_path / "waits", config)
    monkeypatch.setattr(updates, "_AHEAD_ON", ("cpu",))
    folder, found, _ = train(tmp_path / "ahead", config)
    assert outcome.status == found.status == "solved"
    assert rows_of(folder) == rows_of(expected)


@pytest.mark.parametrize("kind", [PPOConfig, R2D2Config])
@pytest.mark.parametrize("where", ["reward", "observation"])
def test_a_bad_batch_stops_the_run(tmp_path, ahead, where, kind):
    own = {} if kind is PPOConfig else {**REPLAY, "env": FAULTY["env"]}
    given = FAULTY if kind is PPOConfig else {}
    config = kind(**{**given, **own, "checkpoint_every": 2, "env_kwargs": (f"where={where}", "steps=40")})
    folder, error, log = train(tmp_path, config)
    assert "of environment 1 at step 7 of its batch (environment step 158) was nan, but only finite" in str(error)
    assert is_good(folder)
    assert [path.stem for path in sorted(folder.checkpoints.iterdir())] == ["000000000064", "000000000128"]
    assert len(rows_of(folder)) == 4
    assert log.names.count("batch") == 5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_bad_update_changes_nothing_and_stops_the_run_at_the_next(tmp_path, ahead, what, last):
    at, weights = 8 if last else 4, []

    def prepare(trainer):
        learner, count = trainer.algorithm, 0
        tensors = learner.loss.tensors

        def bad(batch):
            nonlocal count
            losses, count = tensors(batch), count + 1
            if (count - 1) // 8 + 1 == at:  # four epochs of two minibatches
                weights.append([parameter.detach().clone() for parameter in learner.agent.parameters()])
                value = losses["loss_critic"]
                losses["loss_critic"] = value * math.nan if what == "loss" else Explosion.apply(value)
            return losses

        learner.loss.tensors = bad

    folder, error, log = train(tmp_path, PPOConfig(**BANDIT), prepare)
    assert str(error).startswith(f"In update {at} ")
    assert len(weights) == 8
    assert_same(weights[0], weights[-1])
    assert log.names.count("batch") == (at if last else at + 1)
    assert log.names.count("update") == len(rows_of(folder)) == at - 1
    assert is_good(folder)
    assert len(list(folder.checkpoints.iterdir())) == (at - 1) // 3


def test_faults_that_are_skipped_are_waited_for(tmp_path, ahead):
    config = PPOConfig(**FAULTY, env_kwargs=("steps=37-42",), on_nonfinite="skip")
    folder, outcome, log = train(tmp_path, config)
    assert outcome.status == "finished"
    assert [int(row["skipped"]) for row in rows_of(folder)] == [0, 0, 0, 0, 1, 2, 2, 2]
    assert log.names[:4] == ["batch", "update", "batch", "update"]
