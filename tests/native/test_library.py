"""Loading the C++ library: what is checked, and that Python's structures and numbers are those of the header."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.execution.compiled import descent
from recurl.native import library, program
from recurl.native.structures import STRUCTURES, Layer, Structure
from recurl.recurrence import BACKENDS, LSTM, Support

SOURCES = Path(library.__file__).parent / "src"
HEADER = re.sub(r"//.*", "", (SOURCES / "recurl_native.h").read_text())
SUPPORT = Support(LSTM, torch.device("cpu"))
needs_library = pytest.mark.skipif(
    not library.instruction_sets(), reason="there was no compiler when recurl was installed"
)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    library.missing.cache_clear()
    yield
    library.missing.cache_clear()


def test_says_why_it_is_missing(fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "librecurl_native.so")
    with pytest.raises(UnsupportedError, match=r"was not built when recurl was installed. Install a C\+\+ compiler"):
        BACKENDS.choose("cpu", SUPPORT)
    assert BACKENDS.choose("fastest", SUPPORT).name == "loop"
    (tmp_path / "librecurl_native.so").write_text("not a library")
    library.missing.cache_clear()
    with pytest.raises(UnsupportedError, match=r"can't be loaded .*invalid ELF header|can't be loaded .*too short"):
        BACKENDS.choose("cpu", SUPPORT)


@needs_library
def test_refuses_a_library_of_another_version(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ABI", 99)
    with pytest.raises(UnsupportedError, match=r"its compiled part has version [0-9]+, recurl needs 99"):
        BACKENDS.choose("cpu", SUPPORT)


@needs_library
def test_refuses_a_library_with_another_structure(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Adam(Structure):
        _fields_ = (*STRUCTURES["recurl_adam"]._fields_, ("decay", ctypes.c_double))

    monkeypatch.setitem(STRUCTURES, "recurl_adam", Adam)
    with pytest.raises(UnsupportedError, match=r"in its compiled part recurl_adam has 88 bytes, recurl needs 96"):
        BACKENDS.choose("cpu", SUPPORT)


def declared(name: str) -> list[tuple[str, object]]:
    """Fields of a structure of the header, with their types as those of ctypes."""
    body = HEADER.split(f"typedef struct {name} {{")[1].split(f"}} {name};")[0]
    fields: list[tuple[str, object]] = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"((?:const )?\w+)\s*(.*)", declaration, re.DOTALL).groups()
        numbers = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
        stars = kind.endswith("*")
        for one in names.split(","):
            field, count = re.fullmatch(r"[\s*]*(\w+)(?:\[(\d+)\])?", one).groups()
            single = ctypes.c_void_p if stars or "*" in one else numbers[kind]
            fields.append((field, single * int(count) if count else single))
    return fields


def test_all_structures_of_the_header_are_known_in_its_order() -> None:
    assert re.findall(r"typedef struct (\w+) {", HEADER) == list(STRUCTURES)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_header(name: str) -> None:
    fields = [("from" if field == "source" else field, kind) for field, kind in STRUCTURES[name]._fields_]
    assert fields == declared(name)
    assert ctypes.sizeof(STRUCTURES[name]) == 8 * (len(fields) + 4 * (name == "recurl_op"))


@needs_library
def test_the_library_lists_the_sizes_of_all_structures() -> None:
    sizes = library.load().recurl_native_sizes
    sizes.restype = ctypes.POINTER(ctypes.c_int64)
    assert [sizes()[place] for place in range(len(STRUCTURES) + 1)] == [*map(ctypes.sizeof, STRUCTURES.values()), 0]


def test_packed_structures_are_those_of_ctypes() -> None:
    for name, structure in STRUCTURES.items():
        if name != "recurl_op":  # not packed
            packer, fields = structure.packer(2), 2 * structure.numbers()
            packed = packer.pack(*range(fields))
            assert packer.size == 2 * ctypes.sizeof(structure)
            read = (structure * 2).from_buffer_copy(packed)
            found = [getattr(one, field) or 0 for one in read for field, _ in structure._fields_]
            assert found == list(range(fields))


def test_the_version_is_that_of_the_header() -> None:
    assert f"#define RECURL_NATIVE_ABI {library._ABI}\n" in HEADER


@pytest.mark.parametrize(
    ("enum", "names"),
    [
        ("cell", library.CELLS),
        ("isa", (*library.INSTRUCTION_SETS, "isa_count")),
        ("dtype", (*library.DTYPES, torch.bfloat16)),
        ("op_kind", program._KINDS),
        ("activation", program.ACTIVATIONS),
        ("source", program.SOURCES),
        ("distance", descent.DISTANCES),
    ],
)
def test_numbers_are_those_of_the_header(enum: str, names: tuple[object, ...]) -> None:
    body = HEADER.split(f"enum recurl_{enum} {{")[1].split("}")[0]
    found = re.findall(r"RECURL_(\w+) = (\d+)", body)
    assert [int(number) for _, number in found] == list(range(len(names)))
    expected = [str(name).removeprefix("torch.") for name in names]
    assert [name.removeprefix("FROM_").lower() for name, _ in found] == expected


@needs_library
def test_unknown_instruction_set_is_refused_by_the_library() -> None:
    arguments = library.StructArguments(Layer())
    arguments.set_numbers(isa=7)
    with pytest.raises(UnsupportedError, match=r"an instruction set that this processor lacks"):
        arguments.call("forward")


@needs_library
def test_out_of_memory_is_an_error() -> None:
    arguments = library.StructArguments(Layer())
    arguments.set_numbers(hidden=2**46, outputs=1, inputs=1)
    with pytest.raises(MemoryError, match=r"could not allocate"):
        arguments.call("forward")
