# ruff: noqa: T201 - a script that prints
"""Compile the GPU kernel of mazes without a GPU; prints ``cells per side: bytes spilled, bytes of shared memory``."""

import sys

import triton
from tests.recurrence.triton_offline import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurl.envs.tasks.popgym.hunt_and_kill_gpu import carve_kernel

TYPES = {"starts": "*i64", "chances": "*fp64", "squares": "*i8", "rows": "i32"}


def main(capability: int) -> None:
    side = 9
    constants = {"SIDE": side, "PLACES": triton.next_power_of_2(side * (side + 1))}
    types = {**TYPES, **dict.fromkeys(constants, "constexpr")}
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(ASTSource(carve_kernel, types, constants), target=target, options={"num_warps": 1})
    print(f"{side}: {resources(made.asm['cubin'])[1]} {made.metadata.shared}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
