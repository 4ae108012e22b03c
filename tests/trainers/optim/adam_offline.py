# ruff: noqa: T201 - a script that prints
"""Compile the Adam kernels without a GPU; prints ``kernel: bytes spilled, bytes of shared memory``."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurl.trainers.optim import triton_adam_kernels
from tests.recurrence.triton_offline import resources

TYPES = {"count": "i32", "parameters": "i32", "settings": "*fp64", "addresses": "*i64", "chunks": "*i64"}
KERNELS = {
    triton_adam_kernels.squares_kernel: {"PROGRAMS": 256, "BLOCK": 1024},
    triton_adam_kernels.decide_kernel: {"PROGRAMS": 256, "PARAMETERS": 32},
    triton_adam_kernels.adam_kernel: {"BLOCK": 1024},
}


def main(capability: int) -> None:
    for kernel, constants in KERNELS.items():
        types = {name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in kernel.arg_names}
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(ASTSource(kernel, types, constants), target=target, options={"num_warps": 4})
        print(f"{kernel.fn.__name__}: {resources(made.asm['cubin'])[1]} {made.metadata.shared}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
