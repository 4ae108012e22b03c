"""Pytest plugin that records calls of the C++ library, with the memory before and after each; tools/arm.py uses it.

Recorded are the portable kernels: the first calls of each function in every test. ``replay.cpp`` reads the file, whose
name is in the environment variable ``RECURL_RECORD``. All numbers in it are int64 in native byte order, strings follow
their length.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from recurl.native import library
from recurl.native.structures import (
    Adam,
    Layer,
    Linear,
    Op,
    Parameter,
    Pass,
    Place,
    Program,
    Step,
    StepWeights,
    Structure,
    Surrogate,
    Weight,
)

CALLS = 4  # recorded calls of a function with the same kinds of numbers in a test
BYTES = 1_000_000  # largest memory of a recorded call
RAW, FLOAT32, FLOAT64, INT64, BFLOAT16 = range(5)
KINDS = {torch.float32: FLOAT32, torch.float64: FLOAT64, torch.int64: INT64, torch.bfloat16: BFLOAT16}
KINDS |= {torch.complex64: FLOAT32, torch.complex128: FLOAT64}

RECORDER = pytest.StashKey["Recorder"]()

FUNCTIONS: dict[str, tuple[type[Structure] | None, ...]] = {
    "forward": (Layer,),
    "gates": (Layer,),
    "backward": (Layer,),
    "linear_forward": (Linear,),
    "linear_backward": (Linear,),
    "step": (Step, StepWeights),
    "run": (Program, Place, None, None),
    "pass_forward": (Pass,),
    "pass_backward": (Pass,),
    "surrogate": (Pass, Surrogate),
    "adam": (Adam,),
}
"""Structures that the arguments point to; None for a number."""


def pointed_to(of: Any) -> dict[str, tuple[type[Structure] | type[ctypes.c_int64], int]]:
    """Return the fields that point to structures or numbers of the program, with their counts."""
    match of:
        case Program():
            return {"columns": (ctypes.c_int64, of.inner), "ops": (Op, of.count)}
        case Op() if of.step:
            return {"step": (Step, 1), "layers": (StepWeights, Step.from_address(of.step).layers)}
        case Pass():
            given = Program.from_address(of.program).given
            places = {"given": (Place, given), "grads": (Place, given)}
            return {"program": (Program, 1), **places, "weights": (Weight, of.weight_count)}
        case Adam():
            return {"parameters": (Parameter, of.count)}
    return {}


class Block(NamedTuple):
    """Contiguous memory: what pointers in it point to, by offset, and its kind of numbers."""

    address: int
    size: int
    kind: int
    pointers: dict[int, int]


class Memory:
    """Memory of the tensors whose address was asked for; they are kept, so that no other takes their place."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._kept: dict[int, tuple[int, int, Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        """Add the whole memory of a tensor."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address and size and address not in self._kept:
            bisect.insort(self._starts, address)
            self._kept[address] = size, KINDS.get(tensor.dtype, RAW), tensor.detach()

    def block_at(self, address: int) -> Block:
        """Return the memory that contains an address."""
        start = self._starts[bisect.bisect_right(self._starts, address) - 1]
        size, kind, _ = self._kept[start]
        assert start <= address < start + size, "a pointer of a call is not that of a tensor"
        return Block(start, size, kind, {})


class Snapshot:
    """All memory that a call reads and writes."""

    def __init__(self, memory: Memory) -> None:
        self.blocks: dict[int, Block] = {}
        self._memory = memory

    def structure(self, address: int, kind: Any, count: int) -> None:
        """Add ``count`` structures or numbers at an address, and what they point to."""
        if not count or address in self.blocks:
            return
        block = self.blocks[address] = Block(address, ctypes.sizeof(kind) * count, RAW, {})
        for place in range(count if issubclass(kind, Structure) else 0):
            one = kind.from_address(address + place * ctypes.sizeof(kind))
            inner = pointed_to(one)
            for name, of, *_ in kind._fields_:
                pointer = getattr(one, name)
                if of is not ctypes.c_void_p or not pointer:
                    continue
                if name in inner:
                    self.structure(pointer, *inner[name])
                    if not inner[name][1]:
                        continue
                else:
                    found = self._memory.block_at(pointer)
                    self.blocks.setdefault(found.address, found)
                block.pointers[place * ctypes.sizeof(kind) + getattr(kind, name).offset] = pointer

    def contents(self) -> list[bytes]:
        """Return the bytes of all blocks."""
        return [ctypes.string_at(address, block.size) for address, block in self.blocks.items()]

    def place(self, pointer: int) -> tuple[int, int]:
        """Return the number of the block that contains an address, and the offset in it."""
        for number, block in enumerate(self.blocks.values()):
            if block.address <= pointer < block.address + block.size:
                return number, pointer - block.address
        raise AssertionError("a pointer of a call points to no recorded memory")


class Call:
    """Stand-in of a function of the library."""

    def __init__(self, recorder: Recorder, function: str, real: Any) -> None:
        self.__dict__.update(recorder=recorder, function=function, real=real)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)  # types of its arguments

    def __call__(self, *arguments: Any) -> int:
        return self.recorder.call(self.function, self.real, arguments)


class Recorder:
    """Stand-in of the loaded library that has only portable kernels."""

    def __init__(self, real: ctypes.CDLL, path: Path) -> None:
        self._real, self._path = real, path
        self._test, self._calls = "", Counter[tuple[Any, ...]]()
        self.memory = Memory()
        path.write_bytes(b"")

    def start(self, test: str) -> None:
        """Begin a test."""
        self._test, self._calls = test, Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        function = name.removeprefix("recurl_native_")
        if function == "has":
            return lambda isa: isa.value == 0
        return Call(self, function, real) if function in FUNCTIONS else real

    def call(self, function: str, real: Any, arguments: tuple[Any, ...]) -> int:
        """Call the library, and record it."""
        snapshot, kept, given = Snapshot(self.memory), list[Any](), list[int]()
        for argument, kind in zip(arguments, FUNCTIONS[function], strict=True):
            count = 1
            if isinstance(argument, bytes):
                kept.append(ctypes.create_string_buffer(argument, len(argument)))
                given.append(ctypes.addressof(kept[-1]))
                count = len(argument) // ctypes.sizeof(kind)
            else:
                given.append(argument if isinstance(argument, int) else ctypes.addressof(argument._obj))
            if kind is not None:
                snapshot.structure(given[-1], kind, count)
        blocks = snapshot.blocks.values()
        self._calls[key := (function, *sorted({block.kind for block in blocks}))] += 1
        if self._calls[key] > CALLS or sum(block.size for block in blocks) > BYTES:
            return real(*arguments)
        before = snapshot.contents()
        status = real(*arguments)
        kinds = FUNCTIONS[function]
        places = [snapshot.place(one) if kind else (-1, one) for one, kind in zip(given, kinds, strict=True)]
        self._write(function, status, places, snapshot, before)
        return status

    def _write(
        self, function: str, status: int, places: list[tuple[int, int]], snapshot: Snapshot, before: list[bytes]
    ) -> None:
        with self._path.open("ab") as file:

            def numbers(*values: int) -> None:
                file.write(struct.pack(f"{len(values)}q", *values))

            for text in (function, self._test):
                numbers(len(text.encode()))
                file.write(text.encode())
            numbers(status, len(places), *(number for place in places for number in place), len(before))
            for block, first, last in zip(snapshot.blocks.values(), before, snapshot.contents(), strict=True):
                numbers(block.kind, block.size, block.address % 64, len(block.pointers))
                for offset, pointer in block.pointers.items():
                    numbers(offset, *snapshot.place(pointer))
                file.write(first)
                file.write(last)


def pytest_configure(config: pytest.Config) -> None:
    """Replace the loaded library."""
    recorder = Recorder(library.load(), Path(os.environ["RECURL_RECORD"]))
    config.stash[RECORDER] = recorder
    address = Tensor.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        recorder.memory.add(tensor)
        return address(tensor)

    Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
    library.load = lambda: recorder  # type: ignore[assignment]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name the calls by their test."""
    item.config.stash[RECORDER].start(item.nodeid)
