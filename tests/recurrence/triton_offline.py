# ruff: noqa: T201
"""Compile the plain Triton kernels for a GPU that isn't here: ``python -m tests.recurrence.triton_offline CAPABILITY``.

Prints one line per kernel: ``name: registers spilled_bytes shared_bytes``. Runs in a process of its own, because the
tests beside it load the same kernels into the interpreter.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurl.recurrence.triton import backward, forward
from recurl.recurrence.triton.config import tile_for

POINTERS = {"bounds": "*i64", "starts": "*u8", "flags": "*i32"}
INTEGERS = re.compile(r".*_(row|column|begin|end)$")


def signature(names: list[str], constants: dict[str, object], types: dict[str, str]) -> dict[str, str]:
    result: dict[str, str] = {}
    for name in names:
        if name in constants:
            result[name] = "constexpr"
        elif INTEGERS.match(name):
            result[name] = "i32"
        else:
            result[name] = {**POINTERS, **types}.get(name, "*fp32")
    return result


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack (spills) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def compile_kernel(direction: str, lstm: bool, hidden: int, precision: str, capability: int) -> tuple[int, int, int]:
    tile = tile_for(direction, hidden, 4 if lstm else 3, precision)
    kernel = {"forward": forward.forward_kernel, "backward": backward.backward_kernel}[direction]
    flag = {"forward": "KEEP", "backward": "TO_STORED"}[direction]
    constants = {
        "HIDDEN": hidden,
        "LSTM": lstm,
        flag: True,
        "PRECISION": precision,
        "ROWS": tile.rows,
        "UNITS": tile.units,
        "MEMBERS": tile.members,
        "BLOCK_K": tile.block_k,
        "RESIDENT": tile.resident,
    }
    narrow = "*bf16" if precision == "bf16" else "*fp32"
    gates = "*fp16" if precision in ("bf16", "tf32") else "*fp32"
    types = {"input_gates": narrow, "grad_gates": narrow, "gates": gates}
    source = ASTSource(kernel, signature(kernel.arg_names, constants, types), constants, {})
    options = {"num_warps": tile.warps, "num_stages": 1, "launch_cooperative_grid": tile.members > 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = resources(compiled.asm["cubin"])
    return registers, spilled, compiled.metadata.shared


def main() -> None:
    capability = int(sys.argv[1])
    for case in sys.argv[2:]:
        direction, cell, hidden, precision = case.split(",")
        found = compile_kernel(direction, cell == "lstm", int(hidden), precision, capability)
        print(f"{case}:", *found, flush=True)


if __name__ == "__main__":
    main()
