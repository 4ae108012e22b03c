import os
import pickle
import random
import re
import zipfile

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from recurl.core.archive import load_archive, save_archive
from recurl.core.errors import ArgumentError


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


VALUE = {"weights": torch.arange(100.0), "lists": [1, 2.5, "text", None, (True,)], "bytes": torch.arange(7).byte()}


def same(left, right):
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    return torch.equal(left, right) if isinstance(right, torch.Tensor) else left == right


def test_saved_values_are_read_back(tmp_path):
    save_archive(VALUE, tmp_path / "a.pt")
    with (tmp_path / "b.pt").open("wb") as file:
        save_archive(VALUE, file)
    for name in ("a.pt", "b.pt"):
        assert same(load_archive(tmp_path / name), VALUE)
        assert same(torch.load(tmp_path / name, weights_only=True), VALUE)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**200, -(2**200)])
def test_integers_of_any_size_keep_their_sign(tmp_path, value):
    save_archive([value], tmp_path / "a.pt")
    assert load_archive(tmp_path / "a.pt") == [value]


@pytest.mark.slow
def test_no_flipped_bit_changes_a_value(tmp_path):
    path, damaged = tmp_path / "good.pt", tmp_path / "damaged.pt"
    save_archive(VALUE, path)
    content = path.read_bytes()
    generator = random.Random(0)
    refused = 0
    places = [generator.randrange(len(content)) for _ in range(600)]
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", content)]
    entry = entries[[b"data/0" in content[start : start + 80] for start in entries].index(True)]
    directory = range(entry, entry + 80)  # torch reads the directory without checking
    bits = [(place, generator.randrange(8)) for place in places] + [
        (place, bit) for place in directory for bit in range(8)
    ]
    for place, bit in bits:
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        damaged.write_bytes(flipped)
        try:
            assert same(load_archive(damaged), VALUE)  # a flip in padding or in a date
        except ArgumentError:
            refused += 1
    assert refused > 300
    member = max(zipfile.ZipFile(path).infolist(), key=lambda info: info.file_size)
    start = content.index(VALUE["weights"].numpy().tobytes())
    for place in range(start, start + member.file_size, 7):
        flipped = bytearray(content)
        flipped[place] ^= 4
        damaged.write_bytes(flipped)
        with pytest.raises(ArgumentError, match="is damaged, or is not a file of recurl: the checksum of"):
            load_archive(damaged)


@pytest.mark.parametrize("size", [0, 1, 100, 0.5, 0.99])
def test_truncated(tmp_path, size):
    path = tmp_path / "a.pt"
    save_archive(VALUE, path)
    content = path.read_bytes()
    path.write_bytes(content[: size if isinstance(size, int) else int(size * len(content))])
    with pytest.raises(ArgumentError, match="is damaged, or is not a file of recurl"):
        load_archive(path)


def test_no_code_runs(tmp_path):
    for number, options in enumerate(({}, {"_use_new_zipfile_serialization": False})):
        torch.save({"x": Payload(tmp_path / "made")}, tmp_path / f"{number}.pt", **options)
    with pytest.raises(ArgumentError, match="must hold tensors and plain values"):
        load_archive(tmp_path / "0.pt")
    with pytest.raises(ArgumentError, match="is damaged, or is not a file of recurl: File is not a zip file"):
        load_archive(tmp_path / "1.pt")
    (tmp_path / "2.pt").write_bytes(pickle.dumps(Payload(tmp_path / "made")))
    with pytest.raises(ArgumentError, match="not a file of recurl"):
        load_archive(tmp_path / "2.pt")
    assert not (tmp_path / "made").exists()


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(ArgumentError, match=r"There is no file .*none.pt"):
        load_archive(tmp_path / "none.pt")
    with pytest.raises(ArgumentError, match="can't be read: it is a folder"):
        load_archive(tmp_path)


def test_checksums_are_written_whatever_torch_is_set_to(tmp_path):
    set_crc32_options(False)
    try:
        save_archive(VALUE, tmp_path / "a.pt")
        assert not get_crc32_options()
    finally:
        set_crc32_options(True)
    assert same(load_archive(tmp_path / "a.pt"), VALUE)
