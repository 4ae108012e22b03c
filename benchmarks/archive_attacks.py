"""Hand-crafted ``torch.save`` files: pickles with arbitrary instructions, and arbitrary members."""

import io
import struct
import zipfile
from typing import Any

import torch


def container(members: dict[str, bytes]) -> bytes:
    """Return the bytes of a container with ``members``, bytes by name."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def archive(code: bytes, **storages: bytes) -> bytes:
    """Return the bytes of a file whose pickle is ``code``, with the data of its storages by key."""
    members = {f"data/{key.removeprefix('data')}": data for key, data in storages.items()}
    return container({"data.pkl": b"\x80\x02" + code + b".", "byteorder": b"little", **members})


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    *,
    key: str = "0",
    count: int = 1,
    kind: str = "FloatStorage",
    rest: bytes = b"\x89ccollections\nOrderedDict\n)R",
) -> bytes:
    """Return code that creates a tensor from a storage."""
    storage = (
        b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + number(count) + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + number(offset)
        + numbers(size)
        + numbers(stride)
        + rest
        + b"tR"
    )


def saved(value: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def shared_lists(levels: int = 60) -> bytes:
    """Return code of lists, each of which contains the previous one twice: 2 ** levels leaves."""
    code = b"]q\x00K\x01a"
    for level in range(levels):
        code += b"]q" + bytes([level + 1]) + b"(h" + bytes([level]) + b"h" + bytes([level]) + b"e"
    return code


def shared_tuples(levels: int = 60) -> bytes:
    code = b")q\x00"
    for level in range(levels):
        code += b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86q" + bytes([level + 1])
    return code


def last(code: bytes) -> bytes:
    """Return code whose value is the last one pushed by ``code``."""
    return b"(" + code + b"t"


NUMBER = struct.pack("<f", 1.0)
FOREIGN = {  # code, storages and expected message
    "a function": (b"cos\nmkdir\n" + text("attacked") + b"\x85R", {}, "os.mkdir"),
    "an allocation": (b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R", {}, "invalid bytes"),
    "an allocation by torch": (b"ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R", {}, "something that isn't a function"),
    "shared lists": (last(shared_lists()), {}, "referenced too often"),
    "shared tuples": (last(shared_tuples()), {}, "referenced too often"),
    "a cyclic list": (b"]q\x00h\x00a", {}, "referenced too often"),
    "a cyclic dict": (b"}q\x00X\x01\x00\x00\x00ah\x00s", {}, "referenced too often"),
    "deep lists": (b"]" * 5000 + b"a" * 4999, {}, "nested too deeply"),
    "deep tuples": (b")" + b"\x85" * 100_000, {}, "nested too deeply"),
    "a deep key": (b"}" + b")" + b"\x85" * 100_000 + b"Ns", {}, "A key must be"),
    "shared tuples as a key": (
        b"}" + shared_tuples()[:-2].replace(b")q\x00", b"K\x01q\x00") + b"Ns",
        {},
        "key must be|damaged|isn't a dict",
    ),
    "a tensor as a key": (b"}" + tensor((1,), (1,)) + b"Ns", {"data0": NUMBER}, "A key must be"),
    "equal hashes": (b"}" + b"".join(number((2**61 - 1) << shift) + b"Ns" for shift in range(80)), {}, "A key must be"),
    "stride 0": (tensor((10**9, 3), (0, 0)), {"data0": NUMBER}, "exceeds its storage"),
    "elements beyond the storage": (tensor((2,), (1,)), {"data0": NUMBER}, "exceeds its storage"),
    "an offset beyond the storage": (tensor((1,), (1,), 7), {"data0": NUMBER}, "exceeds its storage"),
    "a negative offset": (tensor((1,), (1,), -1), {"data0": NUMBER}, "not natural numbers"),
    "a negative stride": (tensor((1,), (-1,)), {"data0": NUMBER}, "not natural numbers"),
    "sizes beyond 64 bits": (tensor((2**100,), (1,)), {"data0": NUMBER}, "not natural numbers"),
    "no elements in huge dimensions": (tensor((0, 2**60, 2**60), (1, 1, 1)), {"data0": NUMBER}, "damaged"),
    "65 dimensions": (tensor((1,) * 65, (1,) * 65), {"data0": NUMBER}, "too many"),
    "another storage size": (tensor((1,), (1,), count=2), {"data0": NUMBER}, "differs from its data"),
    "a missing storage": (tensor((1,), (1,)), {}, "it lacks data/0"),
    "a conjugated tensor": (
        tensor(
            (1,), (1,), kind="ComplexFloatStorage", rest=b"\x89ccollections\nOrderedDict\n)R}" + text("conj") + b"\x88s"
        ),
        {"data0": NUMBER * 2},
        "conjugated",
    ),
    "a gradient of integers": (tensor((1,), (1,), kind="IntStorage", rest=b"\x88N"), {"data0": NUMBER}, "damaged"),
    "a huge memo": (b"Nr\xff\xff\xff\xff0.", {}, "an instruction"),
    "a long text": (b"X\xff\xff\xff\xffabc", {}, "fewer parts than declared"),
    "an unknown place in the memo": (b"h\x07", {}, "damaged"),
    "nothing": (b"", {}, "damaged"),
    "two values": (b"NN", {}, "damaged"),
    "attributes": (b"ccollections\nOrderedDict\n)R}" + text("items") + b"Nsb", {}, "an object with attributes"),
    "a tensor with a state": (tensor((1,), (1,)) + b"(tb", {"data0": NUMBER}, "an object with attributes"),
    "a storage": (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ",
        {"data0": NUMBER},
        "something other",
    ),
    "a long integer": (b"\x8b\xff\xff\xff\x7f", {}, "an instruction"),
}
