import io
import zipfile

import numpy as np
import pytest
import torch

from recurl.core.archive import damage

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


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_members_that_are_read_in_pieces_are_checked_whole(place):
    file = io.BytesIO()
    torch.save(torch.arange(3 << 18), file)  # 6 MiB
    data = bytearray(file.getvalue())
    assert damage(bytes(data)) is None
    data[int(place * len(data))] ^= 1
    assert damage(bytes(data)) is not None


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
    """torch reads nothing and returns uninitialized memory."""
    flipped = bytearray(saved)
    place = saved.rindex(b"PK\x01\x02", 0, saved.rindex(b"archive/data/1"))
    flipped[place + 38] ^= 0x10
    assert damage(bytes(flipped)) == "'archive/data/1' is marked as a folder"


def test_sizes_that_differ_are_damage(saved):
    flipped = bytearray(saved)
    place = saved.rindex(b"PK\x01\x02", 0, saved.rindex(b"archive/data/1"))
    flipped[place + 25] ^= 1  # of the stored size
    assert damage(bytes(flipped)) == "'archive/data/1' has two sizes"


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_refused(method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as container:
        container.writestr("text", "word " * 1000)
    assert damage(file.getvalue()) == "'text' is compressed or encrypted, which recurl never writes"


def test_files_of_numpy_and_the_standard_library_are_read():
    for options in ({}, {"allowZip64": False}):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", **options) as container:
            for number in range(3):
                container.writestr(f"text{number}", "word " * number)
        assert damage(file.getvalue()) is None
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3), b=np.zeros(0))
    assert damage(file.getvalue()) is None


def many(count):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as container:
        for number in range(count):
            container.writestr(f"member{number}", b"")
    return file.getvalue()


@pytest.mark.slow
def test_more_members_than_fit_into_16_bits_are_read():
    assert damage(many(66_000)) is None


def test_members_that_share_bytes_are_refused():
    """A quine: all entries of the directory refer to the same bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as container:
        for number in range(3):
            container.writestr(f"member{number}", b"x" * 1000)
        for info in container.infolist():
            info.header_offset = 0
    assert "overlaps another member" in damage(file.getvalue())


def test_two_members_of_one_name_are_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as container:
        container.writestr("member", b"one")
        container.writestr("Member", b"two")
    assert damage(file.getvalue()) == "two members have the same name"


def test_a_member_that_reaches_into_the_directory_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as container:
        container.writestr("member", b"x" * 10)
        (info,) = container.infolist()
        info.file_size = info.compress_size = 50
    assert damage(file.getvalue()) == "'member' overlaps the directory"


def test_two_descriptions_of_the_directory_that_differ_are_refused(saved):
    end, record = saved.rindex(b"PK\x05\x06"), saved.rindex(b"PK\x06\x06")
    for place in (record + 24, record + 32, record + 40, record + 48, end + 8, end + 10, end + 12, end + 16):
        changed = bytearray(saved)
        changed[place] ^= 3
        assert damage(bytes(changed)).startswith("its directory"), place
    assert damage(saved[:end] + b"more" + saved[end:]) is not None
    assert damage(saved + b"more") == "File is not a zip file"


def test_a_size_of_64_bits_is_refused_unless_it_is_there(saved):
    place = saved.rindex(b"PK\x01\x02", 0, saved.rindex(b"archive/data/1"))
    changed = bytearray(saved)
    changed[place + 20 : place + 28] = b"\xff" * 8
    assert "overlaps" in damage(bytes(changed))
