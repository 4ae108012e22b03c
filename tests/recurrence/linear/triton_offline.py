# ruff: noqa: T201 - a script that prints
"""Compile the linear recurrence kernels without a GPU; arguments: capability, cases.

Prints one line per kernel: ``name: registers spilled_bytes shared_bytes barriers loads``; loads: from memory,
before the first multiplication.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurl.recurrence.cuda.linear.config import chunk_for
from recurl.recurrence.cuda.linear.kernels import backward_kernel, forward_kernel

from ..triton_offline import dumped, resources

NUMBERS = {
    "float32": ("*fp32", "real"),
    "bfloat16": ("*bf16", "real"),
    "float64": ("*fp64", "real"),
    "complex64": ("*i64", "packed"),
    "complex128": ("*fp64", "pairs"),
}


def compiled(direction: str, name: str, constant: bool, width: int, capability: int) -> Any:
    kernel = {"forward": forward_kernel, "backward": backward_kernel}[direction]
    pointer, kind = NUMBERS[name]
    chunk = chunk_for(direction, width, getattr(torch, name))
    constants: dict[str, Any] = {
        "WIDTH": width,
        "BLOCKS": -(-width // chunk.columns),
        "CONSTANT": constant,
        "TO_A": True,
        "TO_B": True,
        "TO_STATES": False,
        "KIND": kind,
        "ACC": tl.float32 if name == "bfloat16" else tl.float64,
        "STEPS": chunk.steps,
        "ROWS": chunk.rows,
        "COLUMNS": chunk.columns,
        "GROUP": chunk.group,
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    numbers = dict.fromkeys(("groups_at", "tokens", "states_row"), "i32")
    types = {"board": "*i64", "starts": "*u8", **numbers, **dict.fromkeys(constants, "constexpr")}
    if constant:
        types["grad_a"] = "*fp32" if name == "bfloat16" else "*fp64"
    types = {name: types.get(name, pointer) for name in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    numbers = ("groups_at", "states_row")  # divisible by 16, except with few channels
    attributes = {(k,): aligned for k, name in enumerate(types) if types[name].startswith("*") or name in numbers}
    source = ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"maxnreg": chunk.registers})


def first_loads(cubin: bytes) -> int:
    """Return the number of loads from memory before the first multiplication of real numbers."""
    loads, multiplication, _ = re.split(r"\b([FD](?:MUL|FMA)\b)", dumped(cubin, "sass"), maxsplit=1)
    assert multiplication
    return len(re.findall(r"\bLDG\b", loads))


def main() -> None:
    for case in sys.argv[2:]:
        direction, name, form, width = case.split(",")
        found = compiled(direction, name, form == "constant", int(width), int(sys.argv[1]))
        barriers = found.asm["ptx"].count("bar.sync")
        loads = first_loads(found.asm["cubin"])
        print(f"{case}:", *resources(found.asm["cubin"]), found.metadata.shared, barriers, loads, flush=True)


if __name__ == "__main__":
    main()
