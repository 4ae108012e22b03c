"""Runs that start from the networks of another run."""

import io
import json

import pytest
import torch
from rich.console import Console

from recurl.core.errors import ArgumentError, NonFiniteError
from recurl.trainers import DQNConfig, PPOConfig, R2D2Config, RunFolder, SACConfig, TD3Config, Trainer
from recurl.trainers.algorithms.configs import DistillConfig
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

BOX, CHOICE = "recurl/MaskedPendulum-v1", "recurl/MaskedCartPole-v1"
SMALL = {"num_envs": 4, "rollout_steps": 32, "total_steps": 256, "hidden_size": 8}
REPLAY = {"learning_starts": 64, "slices": 4, "slice_length": 8, "burn_in": 0}


def new(path, kind, env, **options):
    out = io.StringIO()
    own = REPLAY if hasattr(kind, "learning_starts") else {}
    trainer = Trainer(
        kind(env=env, **{**SMALL, **own, **options}), RunFolder(path), console=Console(file=out, width=999)
    )
    return trainer, out


def begun(path, kind, env, source, **options):
    """Networks and output of a run that starts from another."""
    trainer, out = new(path, kind, env, init_from=str(source), **options)
    before = {name: value.clone() for name, value in trainer.algorithm.agent.state_dict().items()}
    trainer.begin()
    trainer.close()
    return before, trainer.algorithm, out.getvalue()


def saved(folder):
    return load_checkpoint(latest_checkpoint(folder.checkpoints))["algorithm"]


@pytest.mark.parametrize(
    ("env", "kind", "other", "options"),
    [
        (BOX, PPOConfig, PPOConfig, {}),
        (BOX, PPOConfig, PPOConfig, {"shared_trunk": False}),
        (CHOICE, DQNConfig, R2D2Config, {}),
        (BOX, SACConfig, SACConfig, {}),
        (BOX, TD3Config, TD3Config, {"shared_trunk": False}),
    ],
)
def test_all_networks_and_statistics_are_taken(tmp_path, env, kind, other, options):
    source = saved(folder := trained(tmp_path / "a", kind, env, {"cell": "gru", **options}))
    before, learner, said = begun(tmp_path / "b", other, env, folder.path, cell="gru", **options)
    agent = learner.agent.state_dict()
    for name, value in agent.items():
        if name.startswith(("actor.", "critic", "norm.")):
            assert torch.equal(value, source["agent"][name]), name
        elif name.startswith("explore."):
            assert torch.equal(value, before[name]), name
    assert said.startswith(f"Starting from {latest_checkpoint(folder.checkpoints)}: actor")
    assert "new" not in said
    scaler = learner.parts()["scaler"]
    if scaler is not None:
        assert torch.equal(scaler.moments.var, source["scaler"]["moments.var"])
        assert not scaler.returns.any()
    networks = dict(learner.loss.named_children())
    for name, target in networks.items():
        if name.startswith("target_"):
            assert all(map(torch.equal, target.parameters(), networks[name.removeprefix("target_")].parameters()))


def test_an_actor_of_sac_continues_with_ppo(tmp_path):
    folder = trained(tmp_path / "a", SACConfig, BOX, {"head_width": 8})
    _, learner, said = begun(tmp_path / "b", PPOConfig, BOX, folder.path, head_width=8)
    source = saved(folder)["agent"]
    assert all(torch.equal(v, source[n]) for n, v in learner.agent.state_dict().items() if n.startswith("actor."))
    assert "actor taken; critic new" in said


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
def test_a_distilled_student_is_tuned(tmp_path, kind):
    teacher = trained(tmp_path / "a", PPOConfig, BOX, {"cell": "gru"})
    options = {"teacher": str(teacher.path), "cell": "gru", "minibatches": 2, "head_width": 8}
    student = trained(tmp_path / "b", DistillConfig, BOX, options)
    _, learner, said = begun(tmp_path / "c", kind, BOX, student.path, cell="gru", head_width=8)
    source = saved(student)["agent"]
    assert all(torch.equal(v, source[n]) for n, v in learner.agent.state_dict().items() if n.startswith("actor."))
    assert f"actor taken; {'critic' if kind is PPOConfig else 'critics'} new" in said


def test_trunks_that_were_shared_and_are_not(tmp_path):
    """The critic's own trunk begins as the shared one; a critic of another trunk doesn't replace the actor's."""
    shared = trained(tmp_path / "a", PPOConfig, BOX, {"shared_trunk": True})
    _, learner, said = begun(tmp_path / "b", PPOConfig, BOX, shared.path, shared_trunk=False)
    assert "actor, critic, reward scale taken;" in said
    assert all(
        torch.equal(v, saved(shared)["agent"][n]) for n, v in learner.agent.critic.state_dict(prefix="critic.").items()
    )
    separate = trained(tmp_path / "c", PPOConfig, BOX, {"shared_trunk": False})
    _, learner, said = begun(tmp_path / "d", PPOConfig, BOX, separate.path, shared_trunk=True)
    assert "actor taken; critic new" in said
    assert all(
        torch.equal(v, saved(separate)["agent"][n]) for n, v in learner.agent.actor.state_dict(prefix="actor.").items()
    )


def test_a_run_that_starts_from_another_trains_and_resumes_without_it(tmp_path):
    folder = trained(tmp_path / "a", PPOConfig, CHOICE, {})
    checkpoint = latest_checkpoint(folder.checkpoints)
    trainer, out = new(tmp_path / "b", PPOConfig, CHOICE, init_from=str(checkpoint))
    trainer.folder.create(trainer.config)
    trainer.run(lambda: True)
    trainer.close()
    assert out.getvalue().count("Starting from") == 1
    assert json.loads(trainer.folder.config.read_text())["init_from"] == str(checkpoint)
    checkpoint.unlink()
    again, out = new(tmp_path / "b", PPOConfig, CHOICE, init_from=str(checkpoint))
    again.resume()
    assert again.run().status == "finished"
    again.close()
    assert "Starting from" not in out.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell": "gru"}, "--cell is 'lstm' there and 'gru' here"),
        ({"hidden_size": 16}, "--hidden-size is 8 there and 16 here"),
        ({"normalize_observations": False}, "--normalize-observations is True there and False here"),
        ({"env": "recurl/RepeatPrevious-v0"}, "as the observations of the two environments differ"),
        ({"kind": DQNConfig}, "it is of ppo, whose actor computes something else than that of dqn"),
    ],
)
def test_an_actor_that_does_not_fit_is_refused(tmp_path, options, message):
    folder = trained(tmp_path / "a", PPOConfig, CHOICE, {})
    options = {"env": CHOICE, "kind": PPOConfig, **options}
    with pytest.raises(ArgumentError, match=message):
        begun(tmp_path / "b", source=folder.path, **options)
    assert not (tmp_path / "b").exists()


def test_other_actions_are_refused(tmp_path):
    folder = trained(tmp_path / "a", PPOConfig, "recurl/RepeatPrevious-v0", {"env_kwargs": ("num_symbols=4",)})
    state = load_checkpoint(path := latest_checkpoint(folder.checkpoints))
    agent = state["algorithm"]["agent"]
    name = [name for name in agent if name.startswith("actor.")][-2]
    agent[name] = agent[name][:3]
    save_checkpoint(path.parent, 256, state)
    with pytest.raises(
        ArgumentError, match=r"\[3, 8\] there and \[4, 8\] here, as the actions of the two environments"
    ):
        begun(tmp_path / "b", PPOConfig, "recurl/RepeatPrevious-v0", folder.path, env_kwargs=("num_symbols=4",))


def test_a_source_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.pt").write_bytes(b"no checkpoint")
    for source, message in {
        "missing": "there is no run .*missing: name a folder that recurl train wrote",
        "empty": "holds no run",
        "file.pt": "is broken or not a checkpoint",
    }.items():
        with pytest.raises(ArgumentError, match=message):
            begun(tmp_path / "b", PPOConfig, CHOICE, tmp_path / source)


def test_networks_that_are_not_finite_are_refused(tmp_path):
    folder = trained(tmp_path / "a", PPOConfig, CHOICE, {})
    state = load_checkpoint(path := latest_checkpoint(folder.checkpoints))
    next(value for name, value in state["algorithm"]["agent"].items() if name.endswith("bias")).fill_(torch.nan)
    save_checkpoint(path.parent, 256, state)
    with pytest.raises(NonFiniteError, match="All numbers of the networks in"):
        begun(tmp_path / "b", PPOConfig, CHOICE, folder.path)


def test_names_of_code_in_the_other_run_are_not_imported(tmp_path):
    folder = trained(tmp_path / "a", PPOConfig, CHOICE, {})
    state = load_checkpoint(path := latest_checkpoint(folder.checkpoints))
    state["config"] |= {"env": "no_such_module:Env-v0", "callback": ["no_such_module:Mine"]}
    folder.config.write_text(json.dumps(state["config"]))
    save_checkpoint(path.parent, 256, state)
    assert "Starting from" in begun(tmp_path / "b", PPOConfig, CHOICE, folder.path)[2]
