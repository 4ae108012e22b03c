# ruff: noqa: T201 - a script that prints
"""Compile the attention kernels without a GPU; arguments: capability, cases, each with the numbers of tiles if others.

Prints one line per kernel: ``name: registers spilled_bytes shared_bytes wgmma``, the last the number of asynchronous
products.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurl.recurrence.attention.kernels import AttentionInputs
from recurl.recurrence.cuda.attention import launch
from recurl.recurrence.cuda.attention.config import Tiles, aligned, tiles_for
from recurl.sequences.index import Boundaries

from ..triton_offline import resources

KERNELS = {
    "forward": launch.forward_kernel,
    "queries": launch.queries_kernel,
    "keys": launch.keys_kernel,
    "read": launch.read_kernel,
    "read_backward": launch.read_backward_kernel,
    "step": launch.step_kernel,
}
POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
OWN = {"start": "*i64", "flags": "*u8", "totals": "*fp32", "deltas": "*fp32"}
NUMBERS = ("tokens", "token_stride", "place_stride", "spacing")


def compiled(
    name: str, dtype: str, size: int, past: int, hidden: int, precision: str, capability: int, others: list[int]
) -> Any:
    kernel, heads, kind = KERNELS[name], 4, getattr(torch, dtype)
    query, maps = torch.empty(1, heads, size, dtype=kind), torch.empty(heads, size, hidden + 1, dtype=kind)
    position, windows = query.new_empty(1, heads, past + 1), query.new_empty(1, past, hidden + 1)
    boundaries = Boundaries(torch.ones(1, dtype=torch.bool), (1,))
    inputs = AttentionInputs(query, query, query, position, windows, maps, maps, boundaries, precision)
    tiles = tiles_for("forward" if name in ("forward", "read") else "backward", size, hidden + 1, kind, precision)
    tiles = Tiles(*others) if others else tiles
    of = {"forward": launch.constants_of, "queries": launch.constants_of, "keys": launch.keys_constants_of}
    constants = of.get(name, launch.stored_constants_of)(inputs, tiles) | {"SPAN": aligned(hidden + 1)}
    if name == "step":
        constants = launch.step_constants(heads, size, past, hidden + 1, precision)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {**OWN, **dict.fromkeys(NUMBERS, "i32"), **dict.fromkeys(constants, "constexpr")}
    types = {key: types.get(key, POINTERS[dtype]) for key in kernel.arg_names}
    attributes = {(k,): [["tt.divisibility", 16]] for k, key in enumerate(types) if types[key].startswith("*")}
    source = ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    for case in sys.argv[2:]:
        name, dtype, size, past, hidden, precision, *others = case.split(",")
        sizes = (int(size), int(past), int(hidden))
        found = compiled(name, dtype, *sizes, precision, int(sys.argv[1]), [int(one) for one in others])
        print(
            f"{case}:",
            *resources(found.asm["cubin"]),
            found.metadata.shared,
            found.asm["ptx"].count("wgmma"),
            flush=True,
        )


if __name__ == "__main__":
    main()
