import json

import pytest

from recurl.errors import ArgumentError
from recurl.trainers import PPOConfig, RunFolder

CONFIG = PPOConfig(env="recurl/TMaze-v0")


def test_create_replaces_an_earlier_run(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.check_free(overwrite=False)
    folder.create(CONFIG)
    for file in (folder.metrics, folder.curve, folder.path / "notes.txt"):
        file.write_text("old")
    folder.checkpoints.mkdir()
    (folder.checkpoints / "1.pt").write_text("old")
    with pytest.raises(ArgumentError, match=r"holds a run already.*--resume.*--overwrite"):
        folder.check_free(overwrite=False)
    folder.check_free(overwrite=True)
    folder.create(CONFIG)
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "notes.txt"]
    assert folder.read_config() == CONFIG


def test_folders_that_are_no_runs(tmp_path):
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ArgumentError, match="is not empty and holds no run"):
            RunFolder(tmp_path).check_free(overwrite=overwrite)
    with pytest.raises(ArgumentError, match="is not a folder"):
        RunFolder(tmp_path / "file").check_free(overwrite=True)
    with pytest.raises(ArgumentError, match=r"Can't write the run folder .* name another"):
        RunFolder(tmp_path / "file" / "run").create(CONFIG)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no run"),
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object, got list"),
        (json.dumps({"env": "x", "colour": 1}), "Unknown options"),
    ],
)
def test_configs_that_cannot_be_read(tmp_path, text, message):
    folder = RunFolder(tmp_path)
    if text is not None:
        folder.config.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        folder.read_config()
