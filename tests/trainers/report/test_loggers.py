"""Loggers of a run: tags, required packages, and resumed runs."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.trainers import PPOConfig
from recurl.trainers.report.loggers import LOGGERS, LoggerContext, check_packages, make_loggers
from recurl.trainers.report.wandb_logger import WandbLogger
from recurl.trainers.run.outcome import Outcome

UPDATE = {"update": 1, "env_steps": 64, "return_mean_20": 1.5, "steps_per_s": 9.0, "grad_norm": 0.25}
EVALUATION = {"update": 1, "env_steps": 64, "eval_return": 2.5}


def test_tensorboard_has_grouped_tags(tmp_path):
    (logger,) = make_loggers("tensorboard", LoggerContext(tmp_path, tmp_path / "events", {}, None))
    logger.on_update(UPDATE)
    logger.on_evaluation(EVALUATION)
    logger.on_end(None)
    read = EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {
        "episodes/return_mean_20",
        "evaluation/return",
        "learning/grad_norm",
        "run/steps_per_s",
        "run/update",
    }
    assert [(event.step, event.value) for event in read.Scalars("evaluation/return")] == [(64, 2.5)]


def test_none_is_none(tmp_path):
    assert make_loggers("none", LoggerContext(tmp_path, tmp_path, {}, None)) == []
    assert list(tmp_path.iterdir()) == []


def test_an_option_for_each():
    for name in LOGGERS:
        assert PPOConfig(env="recurl/TMaze-v0", logger=name).logger == name
    with pytest.raises(ArgumentError, match=r"--logger must be one of .*, got 'wandbb'\. Did you mean wandb\?"):
        PPOConfig(env="recurl/TMaze-v0", logger="wandbb")


@pytest.mark.parametrize(("logger", "extra"), [("tensorboard", "train"), ("wandb", "wandb")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, logger, extra):
    monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(MissingDependencyError, match=rf"{logger} is not installed: pip install 'recurl\[{extra}\]'"):
        check_packages(logger)
    check_packages("none")


@pytest.mark.slow
def test_wandb_offline_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for status in ("stopped", "failed"):
        logger = WandbLogger(tmp_path, {"cell": "gru"})
        logger.on_update(UPDATE)
        logger.on_evaluation(EVALUATION)
        logger.on_end(Outcome(status, 64, 0.0, 0.0, 1.5))
        ids.append((tmp_path / "wandb" / "run_id").read_text())
    assert ids[0] == ids[1]
    files = list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert files
    written = b"".join(file.read_bytes() for file in files)  # the data uploaded by `wandb sync`
    for word in (b"env_steps", b"learning/grad_norm", b"0.25", b"evaluation/return", b"2.5"):
        assert word in written
