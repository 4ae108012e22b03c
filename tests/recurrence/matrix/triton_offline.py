# ruff: noqa: T201 - a script that prints
"""Compile the matrix recurrence kernels without a GPU; arguments: capability, cases.

A case is ``kernel,dtype,form,K,V`` with commas, and optionally the chunk, columns and warps. Prints one line per
kernel: ``case: registers spilled_bytes shared_bytes wgmma``, the last the number of asynchronous products.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurl.recurrence.cuda.matrix import backward, forward, pieces, solve, step
from recurl.recurrence.cuda.matrix.config import Sizes, Tile, padded, plan_for, step_tile_for

from ..triton_offline import resources

KERNELS = {
    "solve": solve.solve_kernel,
    "forward": forward.forward_kernel,
    "maps": pieces.maps_kernel,
    "backward": backward.backward_kernel,
    "gradient_maps": backward.backward_kernel,
    "carry": pieces.carry_kernel,
    "step": step.step_kernel,
}
NARROW = {"float32": ("*fp32", "tf32x3"), "bfloat16": ("*bf16", "bf16"), "float16": ("*fp16", "tf32")}
INPUTS = ("query", "key", "value", "output", "solved", "grad", "grad_query", "grad_key", "grad_value")
POINTERS = {"start_index": "*i64", "is_init": "*u8"}


def compiled(name: str, dtype: str, form: str, keys: int, values: int, others: tuple[int, ...], capability: int) -> Any:
    kernel, (pointer, precision) = KERNELS[name], NARROW[dtype]
    delta, resets = form.startswith("delta"), form.endswith("resets")
    plan = plan_for(Sizes(256, 4096, 4, keys, values, 16 if pointer != "*fp32" else 32, delta, 132))
    tile = getattr(plan, name, plan.backward)
    if name == "step":
        tile = step_tile_for(4096, 4, keys, values, 132)
    if others:
        plan, tile = replace(plan, chunk=others[0]), Tile(*others[1:], 1)
    blocks = -(-values // tile.columns)
    maps = name.endswith("maps") or name == "solve"
    if name == "maps" and delta:
        blocks += -(-keys // tile.columns)
    constants: dict[str, Any] = {
        "K": keys,
        "V": values,
        "BLOCK_K": padded(keys),
        "BLOCK_V": min(tile.columns, padded(values)),
        "CHUNK": plan.chunk,
        "BLOCKS": blocks,
        "DELTA": delta,
        "HAS_STATES": resets,
        "RESETS": resets,
        "MAPS": maps,
        "AFTER": resets and not maps,
        "KEEP": True,
        "TO_STATES": False,
        "REVERSE": False,
        "STAGES": tile.stages,
        "PRECISION": precision,
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    integers = ("heads", "length", "chunks", "pieces", "piece_chunks", "tokens", "piece_tokens")
    types = dict.fromkeys((*integers, "first_piece", "spacing"), "i32")
    types |= {name: "i32" for name in kernel.arg_names if name.endswith(("_token", "_head", "_row"))}
    types |= {name: "i32" for name in kernel.arg_names if name.endswith(("_key", "_value")) and name[:5] != "grad_"}
    types |= dict.fromkeys(("grad_after_key", "grad_after_value"), "i32")
    types |= {**dict.fromkeys(INPUTS, pointer), **POINTERS, **dict.fromkeys(constants, "constexpr")}
    if blocks > 1:
        types |= {"grad_query": "*fp32", "grad_key": "*fp32"}
    solved = "*bf16" if pointer == "*bf16" else "*fp32"
    types |= dict.fromkeys(("solved_key", "solved_value"), solved)
    if name in ("forward", "backward"):
        types["carried"] = solved
    if name in ("forward", "maps") and delta:
        types["value"] = solved
    types = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    strides = ("_token", "_head", "_row", "states_key", "after_key")
    attributes = {(k,): aligned for k, name in enumerate(types) if types[name][0] == "*" or name.endswith(strides)}
    ones = {name: 1 for name in ("states_value", "grad_after_value") if name in types}
    types |= dict.fromkeys(ones, "constexpr")
    source = ASTSource(kernel, types, {**constants, **ones}, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    for case in sys.argv[2:]:
        name, dtype, form, *numbers = case.split(",")
        keys, values, *others = map(int, numbers)
        found = compiled(name, dtype, form, keys, values, tuple(others), int(sys.argv[1]))
        print(
            f"{case}:",
            *resources(found.asm["cubin"]),
            found.metadata.shared,
            found.asm["ptx"].count("wgmma"),
            flush=True,
        )


if __name__ == "__main__":
    main()
