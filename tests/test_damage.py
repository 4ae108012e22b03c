import io
import zipfile

import pytest
import torch

from recurl.archive import damage

VALUE = {"a": torch.arange(7.0), "b": [1, 2.5, "x"], "c": torch.arange(3)}


@pytest.fixture(scope="module")
def saved():
    file = io.BytesIO()
    torch.save(VALUE, file)
    return file.getvalue()


def read(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def same(found):
    return found["b"] == VALUE["b"] and all(torch.equal(found[key], VALUE[key]) for key in "ac")


@pytest.mark.slow
def test_a_flip_of_any_bit_is_found_or_changes_nothing(saved):
    assert damage(saved) is None
    assert damage(io.BytesIO(saved)) is None
    found = 0
    for bit in range(0, len(saved) * 8, 3):
        flipped = bytearray(saved)
        flipped[bit // 8] ^= 1 << bit % 8
        if damage(bytes(flipped)) is not None:
            found += 1
            continue
        try:
            value = read(bytes(flipped))
        except RuntimeError:  # torch's reader is the stricter one here
            continue
        assert same(value), bit
    assert found > len(saved)


@pytest.mark.parametrize("size", [0, 1, 100, -1, -30, -300])
def test_a_file_that_is_cut(saved, size):
    assert damage(saved[:size]) is not None


def test_a_member_marked_as_a_folder_is_damage(saved):
    """Torch reads nothing of it, and takes what happens to be in memory."""
    flipped = bytearray(saved)
    place = saved.rindex(b"PK\x01\x02", 0, saved.rindex(b"archive/data/1"))
    flipped[place + 38] ^= 0x10
    assert damage(bytes(flipped)) == "'archive/data/1' is marked as a folder"


def test_sizes_that_differ_are_damage(saved):
    flipped = bytearray(saved)
    place = saved.rindex(b"PK\x01\x02", 0, saved.rindex(b"archive/data/1"))
    flipped[place + 25] ^= 1  # of the size of what is stored
    assert damage(bytes(flipped)) == "'archive/data/1' has two sizes"


def test_compressed_members_are_verified_too():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr("text", "word " * 1000)
    data = file.getvalue()
    assert damage(data) is None
    flipped = bytearray(data)
    flipped[45] ^= 1
    assert damage(bytes(flipped)) is not None
