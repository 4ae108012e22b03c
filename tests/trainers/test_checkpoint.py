import os

import pytest
import torch

from recurl.errors import ArgumentError
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_round_trip_and_two_newest_are_kept(tmp_path):
    for step in (1, 20, 3):
        save_checkpoint(tmp_path, step, {"x": torch.full((2,), step), "nested": [{"a": (1, "b")}]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000003.pt", "000000000020.pt"]
    state = load_checkpoint(latest_checkpoint(tmp_path))
    assert state["x"].tolist() == [20, 20]
    assert state["nested"] == [{"a": (1, "b")}]


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"x": 1})
    with pytest.raises(AttributeError):
        save_checkpoint(tmp_path, 2, {"x": lambda: None})
    assert latest_checkpoint(tmp_path) == path
    assert load_checkpoint(path)["x"] == 1


def test_no_code_from_the_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format_version": 1, "x": Attack()}, tmp_path / "1.pt")
    with pytest.raises(ArgumentError, match="broken or not a checkpoint"):
        load_checkpoint(tmp_path / "1.pt")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("cut", [0, 10, -20])
def test_broken_files(tmp_path, cut):
    path = save_checkpoint(tmp_path, 1, {"x": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ArgumentError, match="is broken or not a checkpoint: delete it"):
        load_checkpoint(path)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ArgumentError, match="There is no checkpoint in"):
        latest_checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="There is no checkpoint"):
        load_checkpoint(tmp_path / "1.pt")
    for number, content in enumerate(({"format_version": 99}, torch.zeros(1))):
        torch.save(content, tmp_path / f"{number}.pt")
        with pytest.raises(ArgumentError, match="must have format version 2, got"):
            load_checkpoint(tmp_path / f"{number}.pt")
