import os
import random
import shutil
import threading

import pytest
import torch
from torch.serialization import set_crc32_options

from recurl.core.errors import ArgumentError, ArgumentTypeError, StorageError
from recurl.trainers.files.checkpoints import (
    latest_checkpoint,
    load_checkpoint,
    load_newest,
    restoring,
    save_checkpoint,
)

STATE = {"x": torch.arange(100.0), "nested": [{"a": (1, "b")}], "empty": {}}


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_and_the_one_before_is_kept(tmp_path):
    for step in (1, 2, 20):
        save_checkpoint(tmp_path, step, {"x": torch.full((2,), step), "nested": [{"a": (1, "b")}]})
    assert names(tmp_path) == ["000000000002.pt", "000000000020.pt"]
    state = load_checkpoint(latest_checkpoint(tmp_path))
    assert state["x"].tolist() == [20, 20]
    assert state["nested"] == [{"a": (1, "b")}]
    assert state.keys() == {"format_version", "x", "nested"}


def test_a_run_that_is_rolled_back_leaves_no_later_checkpoint(tmp_path):
    for step in (1, 20, 3):
        save_checkpoint(tmp_path, step, {"x": step})
    assert names(tmp_path) == ["000000000001.pt", "000000000003.pt"]


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"x": 1})
    with pytest.raises(ArgumentTypeError, match=r"can be saved; x is builtins\.function"):
        save_checkpoint(tmp_path, 2, {"x": lambda: None})
    assert names(tmp_path) == [path.name]
    assert load_checkpoint(path)["x"] == 1


def test_files_left_by_a_killed_process_are_removed(tmp_path):
    (tmp_path / "000000000001.pt.7.partial").write_text("half")
    path = save_checkpoint(tmp_path, 2, {"x": 1})
    assert names(tmp_path) == [path.name]


def test_no_code_from_the_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save({"format_version": 1, "x": Attack()}, tmp_path / "1.pt", **options)
        with pytest.raises(ArgumentError, match="broken or not a checkpoint"):
            load_checkpoint(tmp_path / "1.pt")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("cut", [0, 10, -20])
def test_broken_files(tmp_path, cut):
    path = save_checkpoint(tmp_path, 1, {"x": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(
        ArgumentError, match=r"is broken or not a checkpoint \(.*\)\. Use the previous checkpoint, or a copy\."
    ):
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
    (tmp_path / "7.pt").mkdir()
    with pytest.raises(ArgumentError, match=r"7.pt is broken or not a checkpoint \(it is a folder\)"):
        load_checkpoint(tmp_path / "7.pt")


def test_no_flipped_bit_changes_a_value(tmp_path):
    path = save_checkpoint(tmp_path, 1, STATE)
    data, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(600):
        flipped, bit = bytearray(data), draw.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            state = load_checkpoint(path)
        except ArgumentError:
            refused += 1
        else:
            assert torch.equal(state["x"], STATE["x"])
            assert state["nested"] == STATE["nested"]
    assert 300 < refused < 600


def test_checksums_are_written_whatever_torch_is_set_to(tmp_path):
    set_crc32_options(False)
    try:
        path = save_checkpoint(tmp_path, 1, STATE)
    finally:
        set_crc32_options(True)
    assert torch.equal(load_checkpoint(path)["x"], STATE["x"])


def test_an_edited_checkpoint_is_refused_by_name(tmp_path):
    path = save_checkpoint(tmp_path, 1, STATE)
    for edit, said in (
        (lambda state: state["x"].add_(1), "x has another value"),
        (lambda state: state.pop("x"), r"x was float32 \[100\], is absent"),
        (lambda state: state.update(contents=1), "its table of contents is invalid"),
    ):
        state = torch.load(path, weights_only=True)
        edit(state)
        torch.save(state, tmp_path / "2.pt")
        with pytest.raises(
            ArgumentError, match=rf"was modified after it was written \({said}\): only unmodified files written by "
        ):
            load_checkpoint(tmp_path / "2.pt")
    state = {**load_checkpoint(path), "x": torch.zeros(3)}
    assert load_checkpoint(save_checkpoint(tmp_path, 2, state))["x"].tolist() == [0, 0, 0]


def test_the_newest_undamaged_one_is_used_with_a_notice(tmp_path):
    first, second = (save_checkpoint(tmp_path, step, {"x": step}) for step in (1, 2))
    notices = []
    assert load_newest(tmp_path, notices.append)[0] == second
    assert notices == []
    second.write_bytes(second.read_bytes()[:-9])
    path, state = load_newest(tmp_path, notices.append)
    assert (path, state["x"]) == (first, 1)
    (notice,) = notices
    assert notice.startswith(f"The checkpoint {second} is broken")
    assert notice.endswith("Using the previous one, 000000000001.pt.")
    first.write_bytes(b"")
    with pytest.raises(ArgumentError, match=rf"{second.name} is broken .*{first.name} is broken .*There is no other"):
        load_newest(tmp_path, notices.append)


def test_another_version_is_no_damage(tmp_path):
    save_checkpoint(tmp_path, 1, {"x": 1})
    torch.save({"format_version": 3}, tmp_path / "000000000002.pt")
    with pytest.raises(ArgumentError, match="must have format version 2, got 3"):
        load_newest(tmp_path, print)


@pytest.mark.slow
def test_reading_while_a_run_writes(tmp_path):
    """The newest checkpoint is repeatedly removed while it is read."""
    save_checkpoint(tmp_path, 1, {"x": 1})
    done = threading.Event()

    def write():
        for step in range(2, 200):
            save_checkpoint(tmp_path, step, {"x": step})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    last, reads = 0, 0
    while not done.is_set():
        path, state = load_newest(tmp_path, pytest.fail)
        assert int(path.stem) == state["x"] >= last
        last, reads = state["x"], reads + 1
    thread.join()
    assert reads > 3


def test_checkpoints_that_always_vanish(tmp_path, monkeypatch):
    monkeypatch.setattr("recurl.trainers.files.checkpoints._SECONDS", 0.0)
    save_checkpoint(tmp_path, 1, {"x": 1})

    def gone(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("recurl.trainers.files.checkpoints.open_regular", gone)
    with pytest.raises(ArgumentError, match=r"disappear while they are read: copy the folder"):
        load_newest(tmp_path, print)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=r"Can't write .*file/checkpoints \(Not a directory\): use another folder"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, {})


@pytest.mark.parametrize(
    "error", [KeyError("agent"), TypeError("x"), RuntimeError("size\nmismatch"), IndexError(), OSError()]
)
def test_whatever_does_not_fit_is_one_error(tmp_path, error):
    with (
        pytest.raises(ArgumentError, match=r"1.pt doesn't fit the run's config.json: \w+Error"),
        restoring(tmp_path / "1.pt"),
    ):
        raise error


def test_errors_of_recurl_pass(tmp_path):
    with pytest.raises(ArgumentError, match=r"^mine$"), restoring(tmp_path):
        raise ArgumentError("mine")


def test_long_reasons_are_cut(tmp_path):
    with pytest.raises(ArgumentError) as caught, restoring(tmp_path):
        raise RuntimeError("word " * 1000)
    assert len(str(caught.value)) < 600
    shutil.rmtree(tmp_path)
