"""Code called by a run can't end it with status 0, and environment calls have a uniform time limit."""

from __future__ import annotations

import pytest

from recurl.cli import main
from recurl.core.errors import ExitError
from recurl.trainers import PPOConfig, RunFolder
from tests.trainers.resumes import train

EXITING, SLOW = (f"tests.cli.exiting:recurl-test/{name}-v0" for name in ("Exiting", "Slow"))
SMALL = (  # noqa: SIM905 - reads as it is typed
    "--num-envs 2 --rollout-steps 16 --sequence-length 8 --minibatches 2 --hidden-size 8 "
    "--eval-episodes 1 --eval-max-steps 10 --logger none --checkpoint-every 1"
).split()


def started(folder, env, *words, steps=320):
    words = [*SMALL, *words, "--total-steps", str(steps)]
    return main(["train", "ppo", "--env", env, *words, "--run-dir", str(folder)])


@pytest.mark.parametrize("kind", ["exit", "raise"])
def test_an_environment_that_exits_in_a_step(kind, tmp_path, capsys):
    assert started(tmp_path / "run", EXITING, "--env-kwargs", f"kind={kind}") == 2
    said = capsys.readouterr().err
    raised = {"exit": r"SystemExit(0)", "raise": "GeneratorExit()"}[kind]
    assert f"other code that the run calls, raised {raised}, as sys.exit does: it must return, or raise" in said
    assert "Resume from the newest checkpoint, at 96 steps: recurl train --resume" in said
    assert "the traceback is in" in said


@pytest.mark.parametrize(
    ("words", "error_line"),
    [
        (["--env-kwargs", "at=make"], "at=make can't be created, SystemExit: 0"),
        (["--env-kwargs", "at=reset"], "at=reset can't be created, SystemExit: 0"),
        (["--env-kwargs", "at=close"], "raised SystemExit(0), as sys.exit does"),
        (
            ["--env-kwargs", "at=never", "--callback", "tests.cli.exiting:Callback"],
            "The callback Callback raised SystemExit in on_batch: 0. The run was ended. Resume from the newest",
        ),
    ],
    ids=["make", "reset", "close", "callback"],
)
def test_other_places(words, error_line, tmp_path, capsys):
    assert started(tmp_path / "run", EXITING, *words) == 2
    assert error_line in capsys.readouterr().err


def test_in_python_it_is_an_error_of_the_run(tmp_path):
    options = {"hidden_size": 8, "num_envs": 2, "rollout_steps": 16, "sequence_length": 8, "total_steps": 320}
    with pytest.raises(ExitError, match="raised SystemExit"):
        train(PPOConfig(env=EXITING, **options), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
@pytest.mark.parametrize(
    ("words", "kind", "error_line"),
    [(["--env-workers", "2"], "exit", "raised SystemExit: 0"), (["--overlap"], "hard", "exited with code 0")],
)
def test_in_other_processes(words, kind, error_line, tmp_path, capsys):
    assert started(tmp_path / "run", EXITING, "--env-kwargs", f"kind={kind}", *words) == 2
    said = capsys.readouterr().err
    assert error_line in said
    assert "steps: recurl train --resume" in said


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_are_forks")
def test_a_sweep_counts_a_run_as_finished_by_its_checkpoint(tmp_path, capsys):
    folder = tmp_path / "sweep"
    words = ["sweep", "ppo", "--env", EXITING, *SMALL, "--total-steps", "320", "--seeds", "1", "--run-dir", str(folder)]
    assert main([*words, "--env-kwargs", "kind=hard"]) == 1  # the process of the run exits with status 0
    assert "1 of 1 runs failed" in "".join(capsys.readouterr())
    assert ",failed,96," in (folder / "results.csv").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--env-workers", "2"], id="workers"),
        pytest.param(["--overlap"], id="overlap", marks=pytest.mark.full),  # whose worker has the same time limit
    ],
)
def test_how_long_a_step_may_take(words, tmp_path, capsys):
    assert started(tmp_path / "run", SLOW, *words, "--env-timeout", "0.1", steps=64) == 2
    said = capsys.readouterr().err
    assert "hangs: no answer and no step for 0.1 s. If a step of its environment may take longer" in said
    assert "raise the limit: --env-timeout, or timeout= in Python. " in said
    assert "recurl train --resume" in said or "start it again" in said
    assert started(tmp_path / "run", SLOW, *words, "--overwrite", "--env-timeout", "30", steps=64) == 0
    assert RunFolder(tmp_path / "run").read_config().env_timeout == 30
