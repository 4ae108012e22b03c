"""Loading of policies, and rejected sources."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import recurl
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.trainers import PPOConfig, RunFolder, evaluate_run, export_run
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from recurl.trainers.policies.policy import Policy
from tests.trainers.small_runs import trained

MEMORY = "recurl/RepeatPrevious-v0"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

EYE = np.eye(4, dtype=np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "memory", PPOConfig, MEMORY, {"cell": "lstm"})


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recurl.trainers.export.policy_file.verify", lambda *_: None)
        return export_run(run, "torch", tmp_path_factory.mktemp("file") / "policy.pt2")


def test_from_a_path_a_run_or_a_file(run, file):
    expected, _ = recurl.load(run).predict(EYE)
    for source in (str(run.path), run.path, file, str(file)):
        policy = recurl.load(source)
        assert isinstance(policy, Policy)
        assert np.array_equal(policy.predict(EYE)[0], expected)
    assert repr(recurl.load(run)).startswith(f"Policy(the policy in {run.path}, Box(")


def test_the_best_checkpoint(run, tmp_path):
    folder = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    with pytest.raises(
        ArgumentError, match=r"has no best checkpoint, which recurl train --eval-every .* use the newest"
    ):
        recurl.load(folder, "best")
    newest = latest_checkpoint(folder.checkpoints)
    agent = load_checkpoint(newest)["algorithm"]["agent"]
    bias = next(name for name in agent if name.startswith("actor") and name.endswith("bias") and len(agent[name]) == 4)
    agent[bias][2] = 100.0
    save_checkpoint(folder.best, int(newest.stem), {"algorithm": {"agent": agent}})
    assert recurl.load(folder, checkpoint="best").predict(EYE)[0].tolist() == [2, 2, 2, 2]
    assert np.array_equal(recurl.load(folder).predict(EYE)[0], recurl.load(run).predict(EYE)[0])
    best, newest = (evaluate_run(folder, episodes=3, checkpoint=name) for name in ("best", "newest"))
    assert best != newest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recurl.trainers.export.policy_file.verify", lambda *_: None)
        exported = recurl.load(export_run(folder, "torch", checkpoint="best"))
    assert exported.predict(EYE)[0].tolist() == [2, 2, 2, 2]


def test_mistakes(run, file, tmp_path):
    def refused(match, *arguments, error=ArgumentError):
        with pytest.raises(error, match=match):
            recurl.load(*arguments)

    near = str(run.path)
    refused(rf"There is no run {near}y: name the folder .* Did you mean {near}\?", f"{near}y")
    refused(r"There is no run no/such: name the folder that recurl train wrote, or a file .*\.pt2 or \.onnx", "no/such")
    refused(r"There is no checkpoint|holds no run", tmp_path)
    (tmp_path / "policy.txt").touch()
    refused(r"a file that ends with \.pt2 or \.onnx or \.recurl, got .*policy\.txt", tmp_path / "policy.txt")
    refused("--checkpoint must be one of newest, best, got 'bets': did you mean best?", run, "bets")
    refused("An exported file holds one policy, so checkpoint must be left out, got 'best': export", file, "best")
    refused("load takes a run folder, a RunFolder or an exported file, got int", 3, error=ArgumentTypeError)
    refused(r"missing\.pt2 can't be read \(No such file", tmp_path / "missing.pt2")
    for name in (file, Path(f"{file}.json")):
        shutil.copy(name, tmp_path)
    about = json.loads((tmp_path / "policy.pt2.json").read_text())
    (tmp_path / "policy.pt2.json").write_text(json.dumps({**about, "observations": {"space": {"kind": "Box"}}}))
    refused("A space must be written as space_to_json does", tmp_path / "policy.pt2")
    del about["observations"]
    (tmp_path / "policy.pt2.json").write_text(json.dumps(about))
    refused("was exported without its spaces, by an earlier version", tmp_path / "policy.pt2")


@pytest.mark.usefixtures("brief_verification")
def test_onnxruntime_may_be_missing(run, tmp_path, monkeypatch):
    path = export_run(run, "onnx", tmp_path / "policy.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"onnxruntime is not installed: pip install 'recurl\[export\]'"):
        recurl.load(path)
