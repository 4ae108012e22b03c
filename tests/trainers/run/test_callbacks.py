"""Callbacks: their arguments, when they are called, and what happens if one fails."""

import io
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from recurl.cli import main
from recurl.core.errors import ArgumentError, ArgumentTypeError, CallbackError, MissingDependencyError
from recurl.trainers import Callback, PPOConfig, R2D2Config, RunFolder, Trainer
from recurl.trainers.checkpoint import latest_checkpoint
from recurl.trainers.run.callbacks import HOOKS, check_callback, load_callback
from tests.trainers.run.test_trainer import config, differing, final_state, metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]


class Recorder(Callback):
    """Records its calls, and draws random numbers."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name not in HOOKS:
            return super().__getattribute__(name)

        def call(value):
            torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002 - the global generator
            self.calls.append((name, value))

        return call

    def values(self, hook):
        return [value for name, value in self.calls if name == hook]


def run(options, path, *callbacks, resume=False):
    trainer = Trainer(options, RunFolder(path), console=Console(file=io.StringIO()), callbacks=callbacks)
    try:
        trainer.resume() if resume else trainer.folder.create(options)
        return trainer.run()
    finally:
        trainer.close()


def test_all_of_it_in_order(tmp_path):
    recorder = Recorder()
    outcome = run(config(total_steps=128, eval_every=128, eval_episodes=4), tmp_path, recorder)
    assert [name for name, _ in recorder.calls] == [
        "on_start",
        *("on_batch", "on_update") * 2,
        "on_evaluation",
        "on_checkpoint",
        "on_end",
    ]
    ((trainer,), (end,)) = recorder.values("on_start"), recorder.values("on_end")
    assert (trainer.config.total_steps, end) == (128, outcome)
    assert recorder.values("on_batch")[0]["action"].shape[:2] == (4, 16)
    rows = recorder.values("on_update")
    assert [(row["update"], row["env_steps"]) for row in rows] == [(1, 64), (2, 128)]
    assert {"return_mean_20", "return_std_20", "grad_norm", "learning_rate"} <= rows[0].keys()
    assert recorder.values("on_checkpoint") == [latest_checkpoint(RunFolder(tmp_path).checkpoints)]


@pytest.mark.parametrize(
    ("logger", "options"),
    [
        ("tensorboard", {"kind": PPOConfig}),
        ("wandb", {"kind": R2D2Config}),
        ("tensorboard", {"overlap": True}),
        ("tensorboard", {"env": "CartPole-v1", "env_kwargs": ()}),
        ("tensorboard", {"vectorization": "device", "previous_reward": True}),
    ],
)
@pytest.mark.usefixtures("shared_interpreter")
def test_the_run_with_everything_on_is_the_run_without(tmp_path, monkeypatch, logger, options):
    if logger == "wandb":
        monkeypatch.setenv("WANDB_MODE", "offline")
    run(config(logger="none", **options), tmp_path / "without")
    evaluated = {"eval_every": 64, "eval_episodes": 3, "keep_best": True, "stop_eval_return": 1e9}
    path, recorder = tmp_path / "with", Recorder()
    run(config(logger=logger, callback=(f"{__name__}:Recorder",), **evaluated, **options), path, recorder)
    assert len(recorder.values("on_evaluation")) == 6
    assert metrics(path) == metrics(tmp_path / "without")
    one, other = final_state(path), final_state(tmp_path / "without")
    del one["config"], other["config"], one["evaluation"], other["evaluation"]
    assert differing(without_spaces(one), without_spaces(other)) == []


def without_spaces(state):
    """Drop the generators of spaces, which Gymnasium seeds from the operating system, and which are never used."""
    env = state["algorithm"]["collector"].get("env", {}).get("gym", {})
    if "objects" in env:
        begin, nodes = json.loads(env["objects"])
        spaces = [node for node in nodes if node[0] == "object" and node[1].startswith("gymnasium.spaces")]
        drawing = [
            reference[1] for space in spaces for name, reference in space[3] if name == "_np_random" and reference
        ]
        env["objects"] = json.dumps([begin, [None if place in drawing else node for place, node in enumerate(nodes)]])
    return state


class Failing:
    def __init__(self, hook):
        setattr(self, hook, self._fail)

    def _fail(self, value):
        raise RuntimeError("of no use")


@pytest.mark.parametrize("hook", ["on_batch", "on_update", "on_evaluation", "on_checkpoint"])
def test_one_that_fails_ends_the_run_with_a_checkpoint(tmp_path, hook):
    options, recorder = config(eval_every=64, eval_episodes=2, checkpoint_every=1), Recorder()
    run(options, tmp_path / "whole")
    with pytest.raises(CallbackError, match=rf"The callback Failing raised RuntimeError in {hook}: of no use") as found:
        run(options, tmp_path / "run", Failing(hook), recorder)
    assert isinstance(found.value.__cause__, RuntimeError)
    assert [name for name, _ in recorder.calls][-2:] == ["on_checkpoint", "on_end"]
    (end,) = recorder.values("on_end")
    assert end.status == "failed"
    assert len(recorder.values("on_update")) == (2 if hook == "on_checkpoint" else 1) - (hook == "on_checkpoint")
    assert run(options, tmp_path / "run", resume=True).status == "finished"
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert differing(final_state(tmp_path / "run"), final_state(tmp_path / "whole")) == []


@pytest.mark.parametrize("hook", ["on_start", "on_end"])
def test_one_that_fails_at_the_ends(tmp_path, hook):
    recorder = Recorder()
    with pytest.raises(CallbackError, match=f"in {hook}"):
        run(config(total_steps=128), tmp_path, Failing(hook), recorder)
    assert len(recorder.values("on_update")) == (0 if hook == "on_start" else 2)
    assert len(recorder.values("on_end")) == 1


def test_a_callback_ends_the_run(tmp_path):
    class Stop:
        def on_start(self, trainer):
            self.trainer = trainer

        def on_update(self, row):
            if row["env_steps"] == 128:
                self.trainer.stop()

    assert run(config(), tmp_path, Stop()).status == "stopped"
    assert len(metrics(tmp_path)) == 3


class Quitter:
    def on_update(self, row):
        raise KeyError("nothing")


def test_the_command_line_says_how_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    words = "--env recurl/TMaze-v0 --num-envs 4 --rollout-steps 16 --minibatches 2 --total-steps 128".split()  # noqa: SIM905 - written as on a command line
    folder = str(tmp_path / "run")
    assert main(["train", "ppo", *words, "--run-dir", folder, "--callback", f"{__name__}:Quitter"]) == 2
    said = capsys.readouterr().err
    assert "recurl: The callback Quitter raised KeyError in on_update: 'nothing'. The run was ended." in said
    assert f"Resume from the newest checkpoint, at 64 steps: recurl train --resume {folder}" in said
    trace = Path(said.splitlines()[-1].rpartition(" ")[2])
    assert 'raise KeyError("nothing")' in trace.read_text()
    trace.unlink()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Recorder", r"--callback takes module:Class, got 'Recorder'"),
        (f"{__name__}:Recordr", r"has no 'Recordr'\. Did you mean Recorder\?"),
        ("fractions:Fraction", r"--callback fractions:Fraction: A callback must have one of the methods on_start, .*"),
        (f"{__name__}:Failing", r"can't be created, TypeError: .*missing 1 required positional argument: 'hook'"),
    ],
)
def test_names_that_lead_nowhere(text, message):
    with pytest.raises(ArgumentError, match=message):
        load_callback(text)
    with pytest.raises(ArgumentError, match=message):
        Trainer(config(callback=(text,)), RunFolder(Path("nowhere")), console=Console())


def test_a_module_that_is_missing():
    with pytest.raises(MissingDependencyError, match=r"--callback: there is no module 'nowhere': install the package"):
        load_callback("nowhere:Recorder")


def test_objects_that_are_none():
    class Misspelt:
        def on_udpate(self, row): ...

    class AlsoRight(Misspelt):
        def on_start(self, run): ...

    with pytest.raises(ArgumentTypeError, match=r"on_udpate of the callback AlsoRight would never be called\. Did you"):
        check_callback(AlsoRight())
    with pytest.raises(ArgumentTypeError, match=r"got Misspelt\. Did you mean on_update\?"):
        check_callback(Misspelt())
    with pytest.raises(ArgumentTypeError, match=r"must be an object, got the class Quitter: call it"):
        check_callback(Quitter)
    assert __name__ in sys.modules


class Precision:
    """Record the matmul precision during a run."""

    def __init__(self):
        self.seen = []

    def on_update(self, row):
        self.seen.append(torch.get_float32_matmul_precision())


@pytest.mark.parametrize(("option", "during"), [("auto", "highest"), ("medium", "medium")])
def test_a_run_has_its_own_precision(option, during, tmp_path):
    before, watch = torch.get_float32_matmul_precision(), Precision()
    options = config(matmul_precision=option)
    run(options, tmp_path / "run", watch)
    assert set(watch.seen) == {during}
    assert torch.get_float32_matmul_precision() == before
    assert PPOConfig(env="recurl/TMaze-v0", device="cuda").torch_precision == "high"
