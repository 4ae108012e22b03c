"""Non-finite numbers from environments and from learning, in whole runs."""

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recurl.core.errors import NonFiniteError
from recurl.trainers import (
    A2CConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    RunFolder,
    SACConfig,
    TD3Config,
    Trainer,
    evaluate_run,
)
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from recurl.trainers.report.metrics import read_metrics
from tests.pairs import paired

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

ROOT = Path(__file__).parents[3]
ENV = "tests.trainers.faulty:recurl-test/Faulty-v0"
REPLAY = {"slices": 4, "slice_length": 8, "learning_starts": 32, "buffer_size": 400, "gradient_steps": 4}
SMALL = {"hidden_size": 8, "num_envs": 4, "rollout_steps": 8, "total_steps": 32 * 12, "checkpoint_every": 2}
KINDS = {
    "ppo": (PPOConfig, {"sequence_length": 4}),
    "ppo without memory": (PPOConfig, {"sequence_length": 4, "cell": "none"}),
    "ppo, own trunks": (PPOConfig, {"sequence_length": 4, "shared_trunk": False}),
    "overlap": (PPOConfig, {"sequence_length": 4, "overlap": True}),
    "a2c": (A2CConfig, {}),
    "impala": (ImpalaConfig, {"overlap": True}),
    "dqn": (DQNConfig, REPLAY),
    "r2d2": (R2D2Config, {**REPLAY, "burn_in": 2}),
    "sac": (SACConfig, {**REPLAY, "burn_in": 2, "prioritized": True}),
    "td3": (TD3Config, {**REPLAY, "env_kwargs": ("continuous=True",)}),
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Importable by workers too."""
    monkeypatch.syspath_prepend(str(ROOT))


def config(kind="ppo", **options):
    make, own = KINDS[kind]
    return make(**{"env": ENV, **SMALL, **own, **options})


def run(path, options):
    """Train; return the folder, the error that ended the run, and the output."""
    folder, out = RunFolder(path, pytest.fail), io.StringIO()
    folder.create(options)
    trainer = Trainer(options, folder, console=Console(file=out))
    try:
        return folder, trainer.run()
    except NonFiniteError as error:
        return folder, error
    finally:
        trainer.close()


def is_good(folder):
    state = load_checkpoint(latest_checkpoint(folder.checkpoints))["algorithm"]
    tensors = [*state["agent"].values()]
    optimizers = [state[name] for name in state if name.endswith("optimizer")]
    tensors += [value for optimizer in optimizers for part in optimizer["state"].values() for value in part.values()]
    return all(tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize(
    ("kind", "where", "number"),
    [
        ("ppo", "reward", "nan"),
        ("ppo", "observation", "nan"),
        ("ppo", "observation", "inf"),
        ("overlap", "observation", "nan"),
        ("ppo without memory", "observation", "-inf"),
        ("a2c", "reward", "-inf"),
        ("impala", "observation", "nan"),
        ("dqn", "reward", "inf"),
        ("r2d2", "observation", "nan"),
        ("sac", "reward", "nan"),
    ],
)
@pytest.mark.usefixtures("shared_interpreter")
def test_a_bad_number_stops_the_run_before_it_is_learned_from(tmp_path, kind, where, number):
    # Step 40 of environment 1 is the last of the fifth batch; its observation is read one step later.
    options = config(kind, env_kwargs=(f"where={where}", f"number={number}", "steps=40"))
    folder, error = run(tmp_path, options)
    what = {"reward": "reward", "observation": "next observation 'observation'"}[where]
    assert str(error).startswith(
        f"The {what} of environment 1 at step 7 of its batch (environment step 158) was {number}, but only finite"
    )
    assert is_good(folder)
    assert [path.stem for path in sorted(folder.checkpoints.iterdir())] == ["000000000064", "000000000128"]
    assert len(read_metrics(folder.metrics)[1]) == 4


def test_an_observation_after_a_reset(tmp_path):
    """The observation of a reset, which the policy reads although no step returned it."""
    _, error = run(tmp_path, config(env_kwargs=("where=reset", "steps=9")))
    assert str(error).startswith(
        "The observation 'observation' of environment 1 at step 1 of its batch (environment st"
    )


@pytest.mark.usefixtures("plots")
def test_continuous_actions(tmp_path):
    options = config(env_kwargs=("where=observation", "continuous=True", "steps=40"))
    folder, error = run(tmp_path, options)
    assert "next observation 'observation' of environment 1" in str(error)
    assert is_good(folder)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ppo", "reward"),
        ("ppo", "observation"),
        ("ppo, own trunks", "observation"),
        ("overlap", "observation"),
        ("a2c", "observation"),
        ("impala", "reward"),
        ("dqn", "reward"),
        ("r2d2", "observation"),
    ],
)
@pytest.mark.usefixtures("shared_interpreter")
def test_a_bad_batch_can_be_skipped(tmp_path, kind, where):
    options = config(kind, env_kwargs=(f"where={where}", "steps=37-42"), on_nonfinite="skip")
    folder, outcome = run(tmp_path, options)
    assert (outcome.status, outcome.env_steps) == ("finished", 384)
    rows = read_metrics(folder.metrics)[1]
    # The fifth batch is dropped; the remaining bad steps are in the sixth.
    assert [int(row["skipped"]) for row in rows] == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert [int(row["env_steps"]) for row in rows] == [32 * (n + 1) for n in range(12)]
    assert [math.isnan(float(row["grad_norm"])) for row in rows][4:] == [True, True, *[False] * 6]
    assert is_good(folder)
    assert all(math.isfinite(float(row["return_mean_20"])) for row in rows[1:])
    state = load_checkpoint(latest_checkpoint(folder.checkpoints))
    assert state["faults"] == {"skipped": 2, "in_a_row": 0, "ending": None}
    # Three rows have played 96 steps, ten episodes of nine steps; row 1 has lost some.
    assert 36 <= state["stats"]["episodes"] < 40
    assert set(state["stats"]["returns"]) == {9.0}


def test_a_skipped_batch_begins_new_trajectories_from_zero(tmp_path):
    options = config("dqn", env_kwargs=("steps=12",), on_nonfinite="skip", total_steps=96)
    folder = RunFolder(tmp_path)
    folder.create(options)
    trainer = Trainer(options, folder, console=Console(file=io.StringIO()))
    seen, learn = [], trainer.algorithm.learn
    trainer.algorithm.learn = lambda batch: seen.append(batch.clone()) or learn(batch)
    trainer.run()
    trainer.close()
    before, after = seen
    ids = [part["collector", "traj_ids"] for part in (before, after)]
    assert [(ids[0][row] == ids[1][row, 0]).any().item() for row in range(4)] == [False] * 4
    assert after["is_init"][:, 0, 0].tolist() == [False, True, False, False]
    assert not after["state_h"][1, 0].any()
    assert after["state_h"][0, 0].any()
    assert after["observation"][:, 0, 0].tolist() == pytest.approx([0.7, 0.0, 0.7, 0.7])


def test_ten_bad_batches_in_a_row_stop_the_run(tmp_path):
    options = config(env_kwargs=("steps=1-1000",), on_nonfinite="skip", total_steps=3200)
    folder, error = run(tmp_path, options)
    assert "The reward of environment 1 at step 0 of its batch (environment step 290) was nan, the 10th batch" in str(
        error
    )
    assert len(read_metrics(folder.metrics)[1]) == 9
    assert is_good(folder)


@pytest.mark.parametrize("kind", ["ppo", "dqn", "r2d2", "sac", "td3"])
def test_losses_that_are_not_finite(tmp_path, kind, monkeypatch):
    """Finite data, but weights ruined by a large step."""
    folder, error = run(tmp_path / "stop", config(kind, learning_rate=1e30, checkpoint_every=1))
    assert isinstance(error, NonFiniteError)
    assert not folder.checkpoints.exists() or is_good(folder)


class Explosion(torch.autograd.Function):
    """A non-finite gradient."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


@pytest.mark.parametrize(
    ("kind", "what"), paired(["ppo", "ppo without memory", "dqn", "r2d2", "sac", "td3"], ["loss", "gradient"])
)
def test_steps_that_are_not_finite_are_not_made(tmp_path, kind, what, monkeypatch):
    """In two updates, one of several gradient steps is bad: the run stops there, or skips it."""
    parts = {"sac": ("loss_qvalue", "grad_norm_critic", "critic_optimizer"), "dqn": ("loss", "grad_norm", "optimizer")}
    parts |= {"ppo": ("loss_critic", "grad_norm", "optimizer"), "r2d2": parts["dqn"], "td3": parts["sac"]}
    key, norm, optimizer = parts[kind.split()[0]]
    name = {"loss": key, "gradient": norm}[what]

    def train(path, options):
        folder = RunFolder(path)
        folder.create(options)
        trainer = Trainer(options, folder, console=Console(file=io.StringIO()))
        count = 0
        call = trainer.algorithm.loss.tensors

        def bad(batch, **networks):
            nonlocal count
            losses, count = call(batch, **networks), count + 1
            if count in ((40, 70) if kind.startswith("ppo") else (20, 45)):
                value = losses[key]
                losses[key] = value * math.nan if what == "loss" else Explosion.apply(value)
            return losses

        monkeypatch.setattr(trainer.algorithm.loss, "tensors", bad)
        try:
            return folder, trainer, trainer.run()
        except NonFiniteError as error:
            return folder, trainer, error
        finally:
            trainer.close()

    folder, trainer, error = train(tmp_path / "stop", config(kind))
    assert f"{name} was " in str(error)
    assert str(error).startswith("In update ")
    assert is_good(folder)
    folder, trainer, outcome = train(tmp_path / "skip", config(kind, on_nonfinite="skip"))
    assert outcome.status == "finished"
    assert is_good(folder)
    rows = read_metrics(folder.metrics)[1]
    assert int(rows[-1]["skipped"]) == 2
    states = getattr(trainer.algorithm, optimizer).optimizer.state.values()
    made = {int(state["step"]) for state in states}
    per_update = 16 if kind.startswith("ppo") else 4
    assert made == {12 * per_update - 2}


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    options = config(total_steps=96, checkpoint_every=1)
    folder = RunFolder(tmp_path)
    folder.create(options)
    trainer = Trainer(options, folder, console=Console(file=io.StringIO()))
    calls = iter([None, None, "poison"])

    def poison():
        if next(calls):
            trainer.algorithm.scaler.moments.var.fill_(math.inf)
        return False

    with pytest.raises(
        NonFiniteError, match=r"All numbers of the run must be finite, but scaler.moments.var holds inf"
    ):
        trainer.run(poison)
    trainer.close()
    assert [path.stem for path in sorted(folder.checkpoints.iterdir())] == ["000000000032", "000000000064"]
    assert is_good(folder)


def test_a_run_stopped_by_a_bad_number_resumes_once_it_is_fixed(tmp_path, monkeypatch):
    folder, error = run(tmp_path, config(env_kwargs=("steps=70",)))
    assert isinstance(error, NonFiniteError)
    trainer = Trainer(folder.read_config(), folder, console=Console(file=io.StringIO()))
    trainer.resume()
    monkeypatch.setattr("tests.trainers.faulty.Faulty._is_bad", lambda self, what: False)
    assert trainer.run().status in ("finished", "solved")
    trainer.close()
    assert len(read_metrics(folder.metrics)[1]) == 12


def test_an_evaluation_refuses_them(tmp_path):
    for where, said in (("reward", "a reward at step 14"), ("observation", "an observation at step 14")):
        options = config(env_kwargs=(f"where={where}", "steps=15", "row=3"), total_steps=32)
        folder, _ = run(tmp_path / where, options)
        with pytest.raises(
            NonFiniteError, match=f"must return finite numbers, but {said} of the evaluation isn't: fix"
        ):
            evaluate_run(folder, episodes=100)
