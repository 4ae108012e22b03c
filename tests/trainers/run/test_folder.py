import contextlib
import errno
import json
import os
import shutil

import pytest

from recurl.core.errors import ArgumentError, LockedError, StorageError
from recurl.trainers import PPOConfig, RunFolder

CONFIG = PPOConfig(env="recurl/TMaze-v0")
OTHER = PPOConfig(env="recurl/TMaze-v0", seed=1)


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def leave_a_run(folder, config=CONFIG):
    folder.create(config)
    for file in (folder.metrics, folder.curve, folder.path / "notes.txt"):
        file.write_text("old")
    folder.checkpoints.mkdir()
    (folder.checkpoints / "1.pt").write_text("old")


def test_a_run_is_replaced_on_request(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.check_free(overwrite=False)
    leave_a_run(folder)
    for refuse in (lambda: folder.check_free(overwrite=False), lambda: folder.create(OTHER)):
        with pytest.raises(ArgumentError, match=r"already holds a run.*--resume.*--overwrite"):
            refuse()
    assert folder.read_config() == CONFIG
    folder.check_free(overwrite=True)
    folder.create(OTHER, overwrite=True)
    assert names(folder) == [".lock", "config.json", "notes.txt"]
    assert folder.read_config() == OTHER


def test_the_provenance_of_every_start_is_kept(tmp_path):
    folder = RunFolder(tmp_path / "run")
    leave_a_run(folder)
    folder.note_start({"env_steps": 0})
    folder.note_start({"env_steps": 64, "command": "a\nb é"})
    assert [json.loads(line) for line in folder.versions.read_text().splitlines()] == [
        {"env_steps": 0},
        {"env_steps": 64, "command": "a\nb é"},
    ]
    folder.versions.with_name("versions.jsonl.7.partial").write_text("of a killed process")
    folder.create(OTHER, overwrite=True)
    assert names(folder) == [".lock", "config.json", "notes.txt"]


def test_the_provenance_is_not_written_through_a_link(tmp_path):
    folder, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    folder.create(CONFIG)
    other.write_text("mine")
    folder.versions.symlink_to(other)
    with pytest.raises(StorageError, match="it is a symbolic link"):
        folder.note_start({"env_steps": 0})
    assert other.read_text() == "mine"


def test_files_left_by_a_lock_and_a_killed_process_do_not_count(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.hold():
        pass
    (tmp_path / "config.json.12.partial").write_text("{")
    folder.create(CONFIG)
    assert names(folder) == [".lock", "config.json"]


def test_a_run_that_another_process_holds_is_left_alone(tmp_path):
    folder = RunFolder(tmp_path)
    leave_a_run(folder)
    before = names(folder)
    with RunFolder(tmp_path).hold(), pytest.raises(LockedError, match=r"Another process .* is using"):
        folder.create(OTHER, overwrite=True)
    assert names(folder) == before
    assert folder.read_config() == CONFIG
    with folder.hold():
        folder.create(OTHER, overwrite=True)


@pytest.mark.parametrize("step", [*range(12), 20])
def test_a_death_while_a_run_is_replaced_mixes_no_two(tmp_path, monkeypatch, step):
    """Wherever it is interrupted, the folder never mixes options of one run with checkpoints of another."""
    folder = RunFolder(tmp_path)
    leave_a_run(folder)
    left = iter(range(step))

    def dying(function):
        def call(*arguments, **options):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for owner, name in ((shutil, "rmtree"), (os, "fsync"), (os, "replace"), (os, "unlink")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    with contextlib.suppress(KeyboardInterrupt):
        folder.create(OTHER, overwrite=True)
    monkeypatch.undo()
    replaced = folder.read_config() == OTHER
    assert replaced or (folder.read_config() == CONFIG and step < 20)
    assert not (replaced and (folder.checkpoints.exists() or folder.metrics.exists()))


def test_folders_that_are_no_runs(tmp_path):
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ArgumentError, match="is not empty and holds no run"):
            RunFolder(tmp_path).check_free(overwrite=overwrite)
    with pytest.raises(ArgumentError, match="is not a folder"):
        RunFolder(tmp_path / "file").check_free(overwrite=True)
    with pytest.raises(StorageError, match=r"Can't write .*file/run \(Not a directory\).* Use --run-dir to"):
        RunFolder(tmp_path / "file" / "run").create(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_unremovable_file_is_reported(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    leave_a_run(folder)

    def refuse(*_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match=r"\(Permission denied\): use a folder that you can write to.*--run-dir"):
        folder.create(OTHER, overwrite=True)
    assert folder.read_config() == CONFIG


def test_notices_are_warnings_without_a_handler(tmp_path):
    with pytest.warns(UserWarning, match="odd"):
        RunFolder(tmp_path).notify("odd")
    notices = []
    RunFolder(tmp_path, notices.append).notify("odd")
    assert notices == ["odd"]
    assert RunFolder(tmp_path, print) == RunFolder(tmp_path)
    assert repr(RunFolder(tmp_path)) == f"RunFolder(path={tmp_path!r})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no run"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00", "is not JSON"),
        ("[1]", "must contain a JSON object, got list"),
        (json.dumps({"env": "x", "colour": 1}), r"config.json can't be used: Unknown options"),
        (json.dumps({"env": "x", "num_envs": 0}), r"config.json can't be used: --num-envs must be positive"),
        (json.dumps({"env": "x", "num_envs": "8"}), r"config.json can't be used: "),
        (json.dumps({}), r"config.json can't be used: "),
    ],
)
def test_configs_that_cannot_be_read(tmp_path, text, message):
    folder = RunFolder(tmp_path)
    if text is not None:
        folder.config.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        folder.read_config()
