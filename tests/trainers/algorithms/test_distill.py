"""Distillation: labels, states of teacher and student, shares, runs, bad input."""

import json

import pytest
import torch

import recurl
from recurl.cli import main
from recurl.core.errors import ArgumentError
from recurl.data import SequenceMinibatches
from recurl.sequences.mode import ExplorationType, set_exploration_type, set_recurrent_mode
from recurl.trainers import ALGORITHMS, DQNConfig, PPOConfig, RunFolder, SACConfig, TD3Config, evaluate_run
from recurl.trainers.algorithms.configs import DistillConfig
from tests.trainers.run.test_trainer import differing, final_state, metrics, train
from tests.trainers.test_critic_observations import BOTH, SEEN, options

pytestmark = pytest.mark.usefixtures("no_curves")


def teach(folder, kind=PPOConfig, **more):
    config = options(kind, **{"critic_observations": (), "hidden_size": 16, **more})
    train(config, folder)
    return config


def student(teacher, **more):
    small = {"num_envs": 4, "rollout_steps": 16, "total_steps": 256, "hidden_size": 8, "cell": "gru"}
    own = {"sequence_length": 8, "minibatches": 2, "epochs": 1, "checkpoint_every": 2, "eval_episodes": 2}
    hidden = {"teacher_observations": ("hidden",)}
    return DistillConfig(teacher=str(teacher), **{"env": BOTH, **small, **own, **hidden, **more})


def learner_of(config):
    return ALGORITHMS["distill"].learner(config)


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig, TD3Config])
@pytest.mark.parametrize("cell", ["lstm", "none"])
def test_labels_are_what_the_teacher_does(tmp_path, kind, cell):
    """The policy of the run, fed with the same observations step by step, chooses the labels of the batch."""
    teach(tmp_path / "teacher", kind, cell=cell)
    learner = learner_of(student(tmp_path / "teacher"))
    policy = recurl.load(tmp_path / "teacher")
    states = [None] * 4
    for _ in range(3):
        batch = learner.collect()
        for row in range(4):
            for t in range(16):
                step = batch[row, t]
                seen = {name: step[name].numpy() for name in ("seen", "hidden")}
                action, states[row] = policy.predict(seen, states[row], bool(step["is_init"]))
                torch.testing.assert_close(step["teacher_action"], torch.as_tensor(action), rtol=1e-4, atol=1e-5)


def test_the_student_never_reads_what_is_the_teachers(tmp_path):
    teach(tmp_path / "teacher")
    learner = learner_of(student(tmp_path / "teacher"))
    assert "hidden" not in learner.agent.actor.in_keys
    assert "hidden" not in learner.loss.in_keys
    assert not any("teacher" in name for name, _ in learner.agent.named_parameters())
    before = {name: value.clone() for name, value in learner.teacher.state_dict().items()}
    own = {name: value.clone() for name, value in learner.agent.named_parameters()}
    for _ in range(2):
        learner.learn(learner.collect())
    assert all(torch.equal(value, before[name]) for name, value in learner.teacher.state_dict().items())
    changed = {name for name, value in learner.agent.named_parameters() if not torch.equal(value, own[name])}
    assert len(changed) == len(own)


@pytest.mark.parametrize("as_entries", [True, False])
def test_gradients_reach_the_first_step_of_an_episode(tmp_path, as_entries):
    """The loss of a step depends on all observations of its episode within the sequence, and on no others."""
    teach(tmp_path / "teacher")
    learner = learner_of(student(tmp_path / "teacher", sequence_length=16))
    data = learner.collect().select(*learner.loss.in_keys, strict=False)
    minibatches = SequenceMinibatches(data, 1, 16)
    minibatch = next(iter(minibatches.entries() if as_entries else minibatches))
    seen = minibatch["seen"].clone().requires_grad_()
    minibatch.set("seen", seen)
    label = minibatch["teacher_action"]
    other = label.clone()
    other[8] += 1  # the difference is the part of this step
    minibatch.set("teacher_action", other)
    changed = learner.loss(minibatch)["loss"]
    minibatch.set("teacher_action", label)
    (gradient,) = torch.autograd.grad(changed - learner.loss(minibatch)["loss"], seen)
    begins = minibatch["is_init"][:9].reshape(-1).nonzero()[-1].item()
    reached = gradient.reshape(len(gradient), -1).abs().sum(-1).nonzero().reshape(-1).tolist()
    assert reached == list(range(begins, 9))
    assert len(reached) > 1


@pytest.mark.parametrize(("share", "fraction"), [(1.0, 0.5), (0.0, 0.5), (0.5, 1.0), (1.0, 0.0)])
def test_the_share_of_the_teacher(tmp_path, share, fraction):
    teach(tmp_path / "teacher")
    config = student(
        tmp_path / "teacher", teacher_share=share, teacher_fraction=fraction, num_envs=64, total_steps=8192
    )
    learner = learner_of(config)
    for update in range(8):
        batch = learner.collect()
        taken = (batch["action"] == batch["teacher_action"]).float().mean().item()
        expected = share * max(1 - update / 8 / fraction, 0) if fraction else 0.0
        assert taken == pytest.approx(expected, abs=0.06)
        assert learner.learn(batch)["teacher_share"] == pytest.approx(expected)


def test_real_valued_actions_of_the_student_are_greedy(tmp_path):
    """The loss trains no spread, so sampled actions would be those of an untrained one."""
    teach(tmp_path / "teacher")
    learner = learner_of(student(tmp_path / "teacher", teacher_share=0.0))
    learner.learn(learner.collect())
    actor = learner.agent.actor
    before = {name: value.clone() for name, value in learner.agent.state_dict().items()}
    batch = learner.collect()
    assert all(torch.equal(value, before[name]) for name, value in learner.agent.state_dict().items())
    with torch.no_grad(), set_recurrent_mode(True), set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = actor(batch.select(*actor.in_keys))["action"]
    torch.testing.assert_close(batch["action"], acted)


@pytest.mark.usefixtures("shared_interpreter")
def test_resumed_equals_uninterrupted(tmp_path):
    teach(tmp_path / "teacher")
    config = student(tmp_path / "teacher")
    train(config, tmp_path / "whole")
    train(config, tmp_path / "half", stop_after=2)
    train(config, tmp_path / "half", resume=True)
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    found = differing(final_state(tmp_path / "half"), final_state(tmp_path / "whole"))
    assert [place for place in found if not place.endswith("/gym/objects")] == []


def test_a_student_acts_without_its_teacher(tmp_path):
    teach(tmp_path / "teacher")
    config = student(tmp_path / "teacher", eval_env=SEEN)
    train(config, tmp_path / "student")
    (tmp_path / "teacher" / "config.json").unlink()
    assert len(evaluate_run(RunFolder(tmp_path / "student"), episodes=2).returns) == 2
    assert list(recurl.load(tmp_path / "student").observation_space.spaces) == ["seen"]


def test_a_student_learns_to_count_from_a_teacher_that_sees(tmp_path, capsys):
    """The teacher of CartPole sees the velocities; the student has to infer them."""
    teach(tmp_path / "teacher", PPOConfig, env="CartPole-v1", total_steps=30_000, num_envs=8, rollout_steps=128,
          hidden_size=32, cell="none", sequence_length=32, minibatches=4, eval_episodes=20)  # fmt: skip
    best = evaluate_run(RunFolder(tmp_path / "teacher"), episodes=20).mean_return
    status = main(["distill", str(tmp_path / "teacher"), "--total-steps", "40000", "--cell", "gru", "--hidden-size",
                   "32", "--run-dir", str(tmp_path / "student"), "--logger", "none",
                   "--eval-episodes", "20"])  # fmt: skip
    assert not status
    assert "distill (gru)" in capsys.readouterr().out
    reached = evaluate_run(RunFolder(tmp_path / "student"), episodes=20).mean_return
    assert reached >= 0.9 * best > 90


def test_discrete_teachers_of_another_algorithm(tmp_path):
    cart = {"env": "CartPole-v1", "critic_observations": ()}
    config = DQNConfig(env="CartPole-v1", num_envs=2, rollout_steps=8, total_steps=64, learning_starts=16, slices=2,
                       slice_length=4, buffer_size=64, gradient_steps=1, hidden_size=8, cell="gru")  # fmt: skip
    train(config, tmp_path / "teacher")
    learner = learner_of(student(tmp_path / "teacher", teacher_observations=(), env=cart["env"]))
    batch = learner.collect()
    assert batch["teacher_action"].dtype == torch.int64
    assert 0 <= learner.learn(batch)["agreement"] <= 1


def test_bad_input(tmp_path):
    teach(tmp_path / "teacher")
    with pytest.raises(ArgumentError, match="needs a teacher"):
        DistillConfig(env=BOTH)
    with pytest.raises(ArgumentError, match="holds no run"):
        learner_of(student(tmp_path / "nothing"))
    with pytest.raises(ArgumentError, match=r"observes hidden, which the environment lacks: it has seen"):
        learner_of(student(tmp_path / "teacher", env=SEEN, teacher_observations=()))
    with pytest.raises(ArgumentError, match="has no 'velocity'"):
        learner_of(student(tmp_path / "teacher", teacher_observations=("velocity",)))
    with pytest.raises(ArgumentError, match="must leave the actor an observation"):
        learner_of(student(tmp_path / "teacher", teacher_observations=("seen", "hidden")))
    with pytest.raises(ArgumentError, match="acts in"):
        learner_of(student(tmp_path / "teacher", env="CartPole-v1", teacher_observations=()))
    values = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**values, "cell": "no_such_module:Cell"}))
    with pytest.raises(ArgumentError, match="names code"):
        learner_of(student(tmp_path / "teacher"))
