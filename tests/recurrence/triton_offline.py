# ruff: noqa: T201 - a script that prints
"""Compile the Triton kernels without a GPU; arguments: capability, cases.

Prints one line per kernel: ``name: registers spilled_bytes shared_bytes``. Runs in a separate process, because other
tests load the same kernels into the interpreter.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from recurl.recurrence.cuda import arrange, pointwise
from recurl.recurrence.cuda.choose import Layer, chosen_for
from recurl.recurrence.cuda.family import GluonFamily
from recurl.recurrence.cuda.layout import GateLayout, padded
from recurl.recurrence.cuda.portable import backward, forward
from recurl.recurrence.cuda.portable.config import tile_for
from recurl.recurrence.cuda.precision import PRECISIONS
from recurl.recurrence.cuda.products import kernel as large_product
from recurl.recurrence.cuda.products import launch as products
from recurl.recurrence.cuda.step import kernel as step_kernel
from recurl.recurrence.cuda.step.config import tile_for_step
from tests.recurrence.gpus import WITHOUT_NVRTC

POINTERS = {"bounds": "*i64", "starts": "*u8", "flags": "*i32"}
INTEGERS = re.compile(r".*_(row|column|begin|end)$|tokens|share|total|programs|.*columns")


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


def dumped(cubin: bytes, what: str) -> str:
    """Return what cuobjdump says about a compiled kernel: its ``resource-usage``, or its instructions, ``sass``."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, f"--dump-{what}", file.name], capture_output=True, text=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of stack (spills) of a compiled kernel."""
    text = dumped(cubin, "resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def walk_constants(direction: str, cell: str, hidden: int, precision: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return constants and pointer types shared by portable and resident kernels."""
    flag = {"forward": "KEEP", "backward": "TO_STORED"}[direction]
    narrow = "*bf16" if precision == "bf16" else "*fp32"
    gates = "*fp16" if precision in ("bf16", "tf32") else "*fp32"
    types = {"input_gates": narrow, "grad_gates": narrow, "buffer": narrow, "gates": gates}
    return {"HIDDEN": hidden, "LSTM": cell == "lstm", flag: True}, types


def portable(direction: str, cell: str, hidden: int, precision: str) -> tuple[ASTSource, dict[str, object]]:
    tile = tile_for(direction, hidden, 4 if cell == "lstm" else 3, precision)
    kernel = {"forward": forward.forward_kernel, "backward": backward.backward_kernel}[direction]
    constants, types = walk_constants(direction, cell, hidden, precision)
    constants |= {
        "PRECISION": precision,
        "ROWS": tile.rows,
        "UNITS": tile.units,
        "MEMBERS": tile.members,
        "BLOCK_K": tile.block_k,
        "RESIDENT": tile.resident,
    }
    source = ASTSource(kernel, signature(kernel.arg_names, constants, types), constants, {})
    return source, {"num_warps": tile.warps, "num_stages": 1, "launch_cooperative_grid": tile.members > 1}


def on_chip(kind: str, direction: str, cell: str, hidden: int, precision: str) -> tuple[ASTSource, dict[str, object]]:
    """Return a Gluon kernel as launched for a batch of few rows or of more."""
    rows = {"resident": 1 if hidden > 128 else 4096, "tiles": 512}[kind]
    chosen = chosen_for(Layer(WITHOUT_NVRTC, cell, hidden, precision, rows))
    assert chosen is not None
    family = getattr(chosen, direction)
    assert isinstance(family, GluonFamily)
    assert family.folder == kind
    layout, kernel = GateLayout(cell == "lstm", hidden, chosen.width, interleaved=True), family.kernel(direction)
    options = family.constants(direction, layout, PRECISIONS[precision])
    constants, types = walk_constants(direction, cell, hidden, precision)
    operands = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[
        family.operands(direction, layout, PRECISIONS[precision])
    ]
    types |= {"weights": operands, "buffer": operands}
    constants |= {name: value for name, value in options.items() if name in kernel.arg_names}
    types = signature(kernel.arg_names, constants, types)
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(kernel.arg_names) if types[name].startswith("*")}
    return GluonASTSource(kernel, types, constants, attributes), {
        name: value for name, value in options.items() if name not in constants
    }


def small(name: str, cell: str, hidden: int, precision: str) -> tuple[ASTSource, dict[str, object]]:
    module = {"arrange": arrange, "restore": arrange, "pack": arrange}.get(name, pointwise)
    kernel = getattr(module, f"{name}_kernel")
    block, rows = {"arrange": (128, 8), "pack": (64, 64), "restore": (256, 1)}.get(name, (1024, 32))
    every: dict[str, object] = {
        "HIDDEN": hidden,
        "WIDTH": padded(hidden),
        "LSTM": cell == "lstm",
        "INTERLEAVED": True,
        "BLOCK": block,
    }
    every |= {"ROWS": rows, "COLUMNS": 128, "GATES": 4 if cell == "lstm" else 3, "FORWARD": True, "SPLIT": True}
    every |= {"BEFORE": True, "DEPTH": 32}
    every |= {"IN_BIAS": True, "HIDDEN_BIAS": True, "PRECISION": precision}
    if name == "turn":
        every["WIDTH"] = 256
    constants = {key: value for key, value in every.items() if key in kernel.arg_names}
    types = signature(kernel.arg_names, constants, {"gates": "*fp16", "before": "*bf16"})
    return ASTSource(kernel, types, constants, {}), {"num_warps": 4}


def product(tile: str, what: str) -> tuple[GluonASTSource, dict[str, object]]:
    """Return a large product kernel with this tile: over tokens in tf32 or exact, or over columns with a bias."""
    kernel = large_product.large_product_kernel
    constants = products.constants_for(int(tile), what != "biased", what != "tf32", what == "biased")
    types = signature(kernel.arg_names, constants, dict.fromkeys(("rows", "width", "depth"), "i32"))
    aligned = [["tt.divisibility", 16]]
    attributes = {(kernel.arg_names.index(name),): aligned for name in types if name not in (*constants, "columns")}
    return GluonASTSource(kernel, types, constants, attributes), {"num_warps": constants["WARPS"]}


def step(cell: str, hidden: int, rows: int, precision: str) -> tuple[ASTSource, dict[str, object]]:
    tile = tile_for_step(rows, hidden, 132)
    kernel = step_kernel.step_kernel
    constants: dict[str, object] = {"LSTM": cell == "lstm", "PRECISION": precision}
    constants |= dict.fromkeys(("IN_BIAS", "HIDDEN_BIAS", "RESETS", "FEATURES"), True)
    constants |= {"ROWS": tile.rows, "UNITS": tile.units, "DEPTH": tile.depth, "STAGES": tile.stages}
    tensor = "*bf16" if precision == "bf16" else "*fp32"
    numbers = {"rows": "i32", "inputs": "i32", "hidden": "i32", "is_init": "*u8"}
    types = signature(kernel.arg_names, constants, dict.fromkeys(kernel.arg_names, tensor) | numbers)
    aligned = [["tt.divisibility", 16]] if hidden % 16 == 0 else []
    attributes = {(i,): aligned for i, name in enumerate(kernel.arg_names) if aligned and name not in constants}
    return ASTSource(kernel, types, constants, attributes), {"num_warps": tile.warps}


def source_of(case: str) -> tuple[Any, dict[str, object]]:
    kind, *words = case.split(",")
    if kind == "step":
        cell, hidden, rows, precision = words
        return step(cell, int(hidden), int(rows), precision)
    if kind == "product":
        return product(*words)
    name, cell, hidden, precision = words
    make = {"portable": portable, "pointwise": small}.get(kind) or partial(on_chip, kind)
    return make(name, cell, int(hidden), precision)


def main() -> None:
    capability = int(sys.argv[1])
    for case in sys.argv[2:]:
        source, options = source_of(case)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(f"{case}:", *resources(compiled.asm["cubin"]), compiled.metadata.shared, flush=True)


if __name__ == "__main__":
    main()
