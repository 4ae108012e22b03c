"""A custom algorithm, ``examples/reinforce.py``, through the registry and the command line."""

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recurl.cli import main
from recurl.cli.arguments import without_options
from recurl.core.errors import ArgumentError
from recurl.trainers import (
    ALGORITHMS,
    OPTIONS,
    Learner,
    PPOConfig,
    RunConfig,
    RunFolder,
    Trainer,
    find_algorithm,
    register,
)
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from recurl.trainers.report.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("no_curves")

ROOT = Path(__file__).parents[3]
NAME = "examples.reinforce:reinforce"
OWN = (  # noqa: SIM905 - written as on a command line
    "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 4 --rollout-steps 16 "
    "--eval-episodes 3 --gae-lambda 0.9"
).split()


@pytest.fixture(autouse=True)
def _table(monkeypatch):
    """Import the example again for every test, and restore the registry afterwards."""
    before = dict(ALGORITHMS)
    monkeypatch.syspath_prepend(ROOT)
    sys.modules.pop("examples.reinforce", None)
    yield
    sys.modules.pop("examples.reinforce", None)
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def train(folder, *more):
    return main(["train", NAME, *OWN, "--run-dir", str(folder), *more])


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "none"])
@pytest.mark.usefixtures("brief_verification")
def test_trains_resumes_evaluates_and_exports(tmp_path, capsys, cell):
    folder = RunFolder(tmp_path / "run")
    assert train(folder.path, "--cell", cell, "--total-steps", "256") == 0
    said = capsys.readouterr().out
    for words in (
        f"with reinforce ({cell})",
        "256/256 steps",
        "loss +",
        "Finished after 256 steps",
        "over 3 episodes",
    ):
        assert words in said
    assert f'"algorithm": "{NAME}"' in folder.config.read_text()
    fields, rows = read_metrics(folder.metrics)
    assert fields[-2:] == ["loss", "grad_norm"]
    assert len(rows) == 4
    folder.config.write_text(folder.config.read_text().replace('"total_steps": 256', '"total_steps": 384'))
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert "Finished after 384 steps" in capsys.readouterr().out
    assert main(["evaluate", str(folder.path), "--episodes", "5"]) == 0
    assert main(["export", str(folder.path), "--format", "torch"]) == 0
    assert main(["doctor", str(folder.path), "--steps", "16"]) == 0


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    config = find_algorithm(NAME).config(env="recurl/TMaze-v0", num_envs=4, rollout_steps=16, total_steps=256)

    def run(folder, resume, steps):
        trainer = Trainer(config, folder, console=Console(quiet=True))
        if resume:
            trainer.resume()
        status = trainer.run(lambda: trainer.algorithm.env_steps == steps).status
        trainer.close()
        return status

    whole, parts = (RunFolder(tmp_path / name) for name in ("whole", "parts"))
    for folder in (whole, parts):
        folder.create(config)
    assert run(whole, resume=False, steps=256) == "finished"
    assert run(parts, resume=False, steps=128) == "stopped"
    assert run(parts, resume=True, steps=256) == "finished"
    one, other = (load_checkpoint(latest_checkpoint(f.checkpoints))["algorithm"]["agent"] for f in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_new_process_finds_it(tmp_path, programs):
    assert train(tmp_path / "run", "--total-steps", "64") == 0
    command = [sys.executable, "-m", "recurl", "evaluate", str(tmp_path / "run"), "--episodes", "2"]
    done = programs.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"--algorithm {NAME} would use the module" in done.stderr
    done = programs.run([*command, "--trust-run"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "over 2 episodes" in done.stdout


def test_its_options_are_those_of_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["train", NAME, "--help"])
    said = capsys.readouterr().out
    assert "Options of REINFORCE: one gradient step per batch" in said
    assert "--gae-lambda FLOAT" in said
    assert "reinforce" in OPTIONS
    assert main(["train", NAME, *without_options(OWN, ["--gae-lambda"]), "--gae-lambda", "2"]) == 2
    assert "--gae-lambda must lie between 0 and 1, got 2" in capsys.readouterr().err


def test_names_already_in_use_or_missing():
    class Mine(PPOConfig):
        algorithm = "ppo"

    class Nameless(RunConfig):
        pass

    with pytest.raises(ArgumentError, match=r"Mine\.algorithm must not be the name of a built-in algorithm, got 'ppo'"):
        register(Mine, Learner)
    with pytest.raises(ArgumentError, match=r"Nameless\.algorithm must be a name such as 'ppo', got None"):
        register(Nameless, Learner)


def test_it_may_be_registered_again():
    first = find_algorithm(NAME)
    register(*first)
    assert find_algorithm("reinforce") == first


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere:reinforce",
            "module of the algorithm 'nowhere:reinforce' can't be imported: No module named 'nowhere'",
        ),
        ("..:reinforce", "can't be imported"),
        (":ppo", "can't be imported"),
        ("examples.reinforce:reinforced", "no algorithm 'examples.reinforce:reinforced': did you mean reinforce"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ArgumentError, match=message):
        find_algorithm(name)
