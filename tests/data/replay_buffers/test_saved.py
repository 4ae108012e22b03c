"""Saved buffers: size, restoration, and rejection of damaged or foreign folders and states."""

import contextlib
import copy
import os
import pickle
import random
import shutil
import zlib

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from recurl.core.archive import load_archive, save_archive
from recurl.core.errors import ArgumentError, UsageError
from recurl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

SIZE, LANES = 1200, 3


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def make(storage=LazyTensorStorage, sampler=None):
    return TensorDictReplayBuffer(
        storage=storage(SIZE, ndim=2),
        sampler=PrioritizedSliceSampler(SIZE, 0.9, 0.5, slice_len=4, strict_length=False)
        if sampler is None
        else sampler,
        batch_size=20,
        generator=torch.Generator().manual_seed(0),
    )


def steps(first, count):
    number = torch.arange(first, first + count).expand(LANES, -1)
    done = (number % 7 == 6).unsqueeze(-1)
    nested = TensorDict({"done": done, "observation": number.unsqueeze(-1).float() + 1}, [LANES, count])
    lane = torch.arange(LANES).unsqueeze(-1).expand(-1, count)
    return TensorDict({"observation": number.unsqueeze(-1).float(), "lane": lane, "next": nested}, [LANES, count])


def go_on(buffer, first):
    """Return the buffer's results from here on."""
    said = []
    for round_ in range(3):
        buffer.extend(steps(first + 5 * round_, 5))
        sample = buffer.sample()
        buffer.update_priority(sample["index"], sample["observation"].flatten() % 3, sample["collector", "write_step"])
        said.append(sample)
    return [*said, buffer[:]]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("count", [40, 395, 400, 1000])
def test_only_filled_positions_are_saved(tmp_path, storage, count):
    buffer, by_state, by_folder = make(storage), make(), make(storage)
    for first in range(0, count, 20):
        buffer.extend(steps(first, min(20, count - first)))
    state = buffer.state_dict()
    rows = LANES * min(count, SIZE // LANES)
    assert {len(value) for value in state["storage"]["entries"].values()} == {rows}
    assert state["index"]["first"].numel() == rows
    save_archive(state, tmp_path / "state.pt")
    numbers = rows * (4 + 8 + 1 + 4)
    assert (tmp_path / "state.pt").stat().st_size < numbers + 16 * SIZE + 4 * rows + 20_000
    by_state.load_state_dict(load_archive(tmp_path / "state.pt"))
    buffer.dumps(tmp_path / "folder")
    assert TensorDict.load_memmap(tmp_path / "folder" / "storage").shape == (rows,)
    by_folder.loads(tmp_path / "folder")
    expected = go_on(buffer, count)
    assert_same(go_on(by_state, count), expected)
    assert_same(go_on(by_folder, count), expected)


def as_before(state):
    """Return the state in the format 1, in which whole buffers were saved, with a table of runs."""
    state = copy.deepcopy(state)
    state["format"] = 1
    index = state["index"]
    filled, capacity = index["first"].shape[1], index["capacity"]
    lanes = torch.arange(LANES).unsqueeze(-1).expand(-1, filled)
    oldest = max(0, index["written"] - capacity)
    runs, numbers = (
        torch.stack([lanes, index.pop("first").clamp_min(oldest)]).flatten(1).unique(dim=1, return_inverse=True)
    )
    index |= {"_run": numbers.int(), "_lane": runs[0], "_first": runs[1], "free": torch.zeros(0, dtype=torch.int64)}

    def whole(value):
        lanes = value.unflatten(0, (LANES, filled))
        room = torch.full((LANES, capacity, *lanes.shape[2:]), 77).to(lanes.dtype)
        room[:, :filled] = lanes
        return room.flatten(0, 1)

    state["storage"]["entries"] = {key: whole(value) for key, value in state["storage"]["entries"].items()}
    index["_run"] = whole(index["_run"]).clamp_max(len(runs[0]) - 1)
    del state["sampler"]["sums"]
    return state


def test_states_of_whole_buffers_load():
    buffer, other = make(), make()
    buffer.extend(steps(0, 50))
    other.load_state_dict(as_before(buffer.state_dict()))
    assert_same(go_on(other, 50), go_on(buffer, 50))


def test_folders_without_checksums_load(tmp_path):
    buffer, other = make(), make()
    buffer.extend(steps(0, 50))
    buffer.dumps(tmp_path / "saved")
    state = as_before(buffer.state_dict())
    shutil.rmtree(tmp_path / "saved" / "storage")
    entries = TensorDict({}, [SIZE])
    for key, value in state.pop("storage")["entries"].items():
        entries.set(key, value)
    entries.memmap(tmp_path / "saved" / "storage")
    (tmp_path / "saved" / "storage" / "lanes").write_text(str(LANES))
    torch.save(state, tmp_path / "saved" / "buffer.pt")
    other.loads(tmp_path / "saved")
    assert_same(go_on(other, 50), go_on(buffer, 50))


def saved(path, storage):
    if storage is ListStorage:
        buffer = ReplayBuffer(storage=ListStorage(20))
        buffer.extend([1, "two", 3.0])
    else:
        buffer = make(storage)
        buffer.extend(steps(0, 30))
    buffer.dumps(path)
    return sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())


def fresh(storage):
    return ReplayBuffer(storage=ListStorage(20)) if storage is ListStorage else make(storage)


STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


@pytest.mark.parametrize("storage", STORAGES)
def test_no_file_of_a_folder_runs_code(tmp_path, storage):
    payload = Payload(tmp_path / "made")
    for number, name in enumerate(saved(tmp_path / "saved", storage)):
        for kind in ("pickle", "torch"):
            folder = tmp_path / f"{number}-{kind}"
            shutil.copytree(tmp_path / "saved", folder)
            if kind == "pickle":
                (folder / name).write_bytes(pickle.dumps(payload))
            else:
                torch.save({"x": payload}, folder / name)
            with pytest.raises(ArgumentError, match=f"{folder}"):
                fresh(storage).loads(folder)
    assert not (tmp_path / "made").exists()


def test_no_pickled_entry_runs_code(tmp_path):
    """Entries that tensordict itself would unpickle, in folders with and without checksums."""
    made = tmp_path / "made"
    for number, seal in enumerate((True, False)):
        folder = tmp_path / str(number)
        saved(folder, LazyTensorStorage)
        storage = folder / "storage"
        shutil.rmtree(storage)
        TensorDict({"observation": torch.zeros(90, 1), "text": NonTensorData(Payload(made), [90])}, [90]).memmap(
            storage
        )
        assert list(storage.rglob("*.pickle"))
        (storage / "lanes").write_text("3")
        if seal:
            files = {}
            for file in storage.rglob("*"):
                if file.is_file():
                    content = file.read_bytes()
                    files[file.relative_to(storage).as_posix()] = [len(content), zlib.crc32(content)]
            save_archive({"facts": {"lanes": 3}, "files": files}, storage / "contents.pt")
        with pytest.raises(ArgumentError, match="must hold a TensorDict of tensors and nothing else"):
            make().loads(folder)
    assert not made.exists()


@pytest.mark.parametrize("storage", STORAGES)
def test_damaged_and_missing_files_are_named(tmp_path, storage):
    generator = random.Random(0)
    for name in saved(tmp_path / "saved", storage):
        content = (tmp_path / "saved" / name).read_bytes()
        place = generator.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.randrange(8)
        archive = name.suffix == ".pt"
        for damaged in (None, content[: len(content) // 2], b"", content + b"more", bytes(flipped)):
            if archive and damaged == bytes(flipped):
                continue  # some bits of a container are insignificant: see the tests of archives
            if archive and damaged is not None and len(damaged) > len(content):
                continue  # also insignificant
            if damaged is None:
                (tmp_path / "saved" / name).unlink()
            else:
                (tmp_path / "saved" / name).write_bytes(damaged)
            with pytest.raises(ArgumentError, match=rf"{tmp_path / 'saved'}.*"):
                fresh(storage).loads(tmp_path / "saved")
            (tmp_path / "saved" / name).write_bytes(content)
    fresh(storage).loads(tmp_path / "saved")


def test_foreign_folders(tmp_path):
    with pytest.raises(ArgumentError, match=r"There is no file .*buffer\.pt"):
        make().loads(tmp_path / "none")
    saved(tmp_path / "saved", LazyTensorStorage)
    content = load_archive(tmp_path / "saved" / "buffer.pt")
    (tmp_path / "saved" / "storage" / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"notes\.txt is damaged"):
        make().loads(tmp_path / "saved")
    (tmp_path / "saved" / "storage" / "notes.txt").unlink()
    save_archive({"facts": 3}, tmp_path / "saved" / "storage" / "contents.pt")
    with pytest.raises(ArgumentError, match="must hold the checksums of the other files there"):
        make().loads(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "storage")
    with pytest.raises(ArgumentError, match="must be a folder of memory-mapped tensors"):
        make().loads(tmp_path / "saved")
    for wrong in ([], {}, 3, {**content, "index": 3}, {**content, "max_size": "many"}, {**content, "sampler": None}):
        save_archive(wrong, tmp_path / "saved" / "buffer.pt")
        with pytest.raises(ArgumentError, match=r"The saved buffer|must be a folder"):
            make().loads(tmp_path / "saved")
    with pytest.raises(ArgumentError, match="must have a format of"):
        make().load_state_dict({**content, "storage": None, "format": 4})


def test_inconsistent_states():
    buffer = make()
    buffer.extend(steps(0, 30))
    state = buffer.state_dict()
    index = {**state["index"], "first": torch.full_like(state["index"]["first"], 9_999)}
    with pytest.raises(ArgumentError, match="index of trajectories is inconsistent"):
        make().load_state_dict({**state, "index": index})
    with pytest.raises(ArgumentError, match="must have the same number of rows"):
        make().load_state_dict({**state, "storage": {**state["storage"], "lanes": 1}})
    for part in ("index", "storage", "keys", "sampler"):
        for name in state[part]:
            for wrong in (None, "text", -1, torch.zeros(2, 2), np.zeros(3), [], 0.5):
                changed = {**state, part: {**state[part], name: wrong}}
                with contextlib.suppress(ArgumentError):  # some are valid
                    make().load_state_dict(changed)


def resealed(storage):
    """Recompute the checksums of a folder."""
    files = {}
    for file in storage.rglob("*"):
        if file.is_file() and file.name != "contents.pt":
            content = file.read_bytes()
            files[file.relative_to(storage).as_posix()] = [len(content), zlib.crc32(content)]
    save_archive({"facts": {"lanes": 3}, "files": files}, storage / "contents.pt")


@pytest.mark.parametrize("seal", [True, False])
def test_loading_changes_no_file(tmp_path, seal):
    """A link, and a shape larger than its file: mapping it for writing would extend the file outside."""
    saved(tmp_path / "saved", LazyTensorStorage)
    storage, outside = tmp_path / "saved" / "storage", tmp_path / "outside"
    outside.write_bytes(bytes(224))
    meta = storage / "meta.json"
    meta.write_text(meta.read_text().replace("[90", "[900000"))
    for link in (False, True):
        if link:
            (storage / "observation.memmap").unlink()
            (storage / "observation.memmap").symlink_to(outside)
        if seal:
            resealed(storage)
        else:
            (storage / "contents.pt").unlink(missing_ok=True)
            (storage / "lanes").write_text("3")
        before = {file: file.stat().st_size for file in storage.rglob("*")}
        with pytest.raises(ArgumentError, match=r"but has 360|but has 720|but has 90|is a link or something else"):
            make().loads(tmp_path / "saved")
        assert {file: file.stat().st_size for file in storage.rglob("*")} == before
    assert outside.read_bytes() == bytes(224)


def test_loaded_data_is_a_copy(tmp_path):
    saved(tmp_path / "saved", LazyTensorStorage)
    file = tmp_path / "saved" / "storage" / "observation.memmap"
    before, other = file.read_bytes(), make()
    other.loads(tmp_path / "saved")
    other.extend(steps(0, 390))
    assert file.read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_anything_but_files_is_refused(tmp_path, kind):
    for number, name in enumerate(saved(tmp_path / "saved", LazyTensorStorage)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "saved", folder)
        (folder / name).rename(tmp_path / f"moved{number}")
        if kind == "link":
            (folder / name).symlink_to(tmp_path / f"moved{number}")
        elif kind == "fifo":
            os.mkfifo(folder / name)
        else:
            (folder / name).mkdir()
        with pytest.raises(ArgumentError, match=r"link|regular|folder|damaged|lacks|storage/lanes"):
            make().loads(folder)


def test_dumps_replaces_no_link(tmp_path):
    buffer, there = make(), tmp_path / "there"
    buffer.extend(steps(0, 30))
    buffer.dumps(there)
    (tmp_path / "link").symlink_to(there)
    with pytest.raises(UsageError, match=r"link can't be replaced \(it is a symbolic link\)"):
        buffer.dumps(tmp_path / "link")
    (tmp_path / "there.new").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"there\.new can't be replaced"):
        buffer.dumps(there)
    make().loads(there)


@pytest.mark.parametrize(
    ("name", "wrong"), [("length", torch.zeros(3)), ("length", 0), ("max_priority", -1.0), ("max_priority", "x")]
)
def test_wrong_numbers_of_a_sampler_are_refused_when_loaded(name, wrong):
    buffer = make()
    buffer.extend(steps(0, 30))
    state = buffer.state_dict()
    with pytest.raises(ArgumentError, match=f"saved .*{name}"):
        make().load_state_dict({**state, "sampler": {**state["sampler"], name: wrong}})


def test_keys_of_any_letters(tmp_path):
    keys = ["a b", "x/y", "k.z", "ä", "100%", ("n:1", "b c")]
    data = TensorDict({key: torch.randn(6, 2) for key in keys}, [6])
    data["next"] = TensorDict({"done": torch.zeros(6, 1, dtype=torch.bool)}, [6])
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    buffer.extend(data)
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert (other[:].select(*keys) == buffer[:].select(*keys)).all()


def test_a_longer_file_is_refused_before_it_is_read(tmp_path):
    saved(tmp_path / "saved", LazyTensorStorage)
    with (tmp_path / "saved" / "storage" / "observation.memmap").open("r+b") as file:
        file.truncate(50 << 30)
    with pytest.raises(ArgumentError, match="is damaged"):
        make().loads(tmp_path / "saved")
