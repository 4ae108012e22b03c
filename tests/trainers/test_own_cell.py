"""Cells in the trainers: --cell module:Class or a name with options, in training, resuming, evaluation, export."""

from __future__ import annotations

import json

import pytest
import torch

from recurl.cli.main import main
from recurl.core.errors import ArgumentError
from recurl.trainers import PPOConfig, RunFolder, load_agent

pytestmark = pytest.mark.usefixtures("no_curves")

CELL = "tests.own_cells:FastWeights"
SMALL = ["--env", "recurl/RepeatPrevious-v0", "--env-kwargs", "k=1", "episode_length=8", "--hidden-size", "8"]
SMALL += ["--num-envs", "4", "--rollout-steps", "16", "--eval-episodes", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "cell", "file"),
    [
        ("ppo", CELL, "policy.pt2"),
        pytest.param("ppo", CELL, "policy.onnx", marks=pytest.mark.full),
        ("r2d2", "examples.mingru:MinGRU", "policy.onnx"),
        pytest.param("dqn", "ffm", "policy.onnx", marks=pytest.mark.full),
        ("ppo", "s5(state_size=6, norm=False)", "policy.onnx"),
        pytest.param("r2d2", "rglru(conv_width=3)", "policy.onnx", marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("brief_verification")
def test_trains_resumes_evaluates_and_exports(algorithm, cell, file, tmp_path):
    run, path = str(tmp_path / "run"), tmp_path / "run" / "config.json"
    assert main(["train", algorithm, *SMALL, "--cell", cell, "--total-steps", "128", "--run-dir", run]) == 0
    config = json.loads(path.read_text())
    assert config["cell"] == cell
    path.write_text(json.dumps(config | {"total_steps": 192}))
    assert main(["train", "--resume", run]) == 0
    assert main(["evaluate", run, "--episodes", "2"]) == 0
    assert main(["export", run, "--format", "torch" if file.endswith("pt2") else "onnx"]) == 0
    assert json.loads((tmp_path / "run" / f"{file}.json").read_text())["cell"] == cell


def test_a_cell_keeps_its_own_initialization(tmp_path):
    """The trainers initialize LSTM and GRU with orthogonal matrices and zero biases."""
    folder = RunFolder(tmp_path / "run")
    assert main(["train", "ppo", *SMALL, "--cell", CELL, "--total-steps", "64", "--run-dir", str(folder.path)]) == 0
    _, agent = load_agent(folder, on_cpu=True)
    states = [key for key in agent.policy.out_keys if key[0] == "next"]
    assert states == [("next", "state_memory"), ("next", "state_count")]
    names = [name for name, _ in agent.named_parameters() if ".cell." in name]
    assert {name.rpartition(".")[2] for name in names} == {"key_l0", "query_l0", "value_l0"}
    assert all(torch.isfinite(parameter).all() for parameter in agent.parameters())


def test_a_backend_that_does_not_serve_the_cell_is_refused():
    with pytest.raises(ArgumentError, match=r"--backend: .*'cpu' can't run this module.*FastWeights.* or 'loop'\.$"):
        PPOConfig(env="recurl/TMaze-v0", cell=CELL, backend="cpu")
