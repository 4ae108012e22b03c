# ruff: noqa: T201 - a script that prints
"""Compare prepared launches with Triton's, on a fake driver that launches nothing; kernels are compiled for sm_90.

Prints one line per check, ``name: number of differences``. Needs a separate process, because the driver is global.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.knobs import runtime
from triton.runtime.driver import driver

from recurl.core.errors import UnsupportedError
from recurl.recurrence.cuda import pointwise
from recurl.recurrence.cuda.matrix.forward import forward_kernel
from recurl.recurrence.cuda.prepared import prepared

started: list[tuple[Any, ...]] = []
hooked: list[bool] = []


class Launcher:
    """Records launches."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = str(source.signature), str(source.attrs), metadata.hash

    def __call__(self, x: int, y: int, z: int, stream: int, function: object, *arguments: Any) -> None:
        _, _, enter, _, *values = arguments  # options and hooks
        hooked.append(bool(getattr(enter, "calls", enter)))
        pointers = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        started.append((self.signature, (x, y, z), stream, pointers))


class Driver:
    """Fake driver with one GPU."""

    launcher_cls = Launcher
    device, looked_up = 0, 0

    @property
    def utils(self) -> Driver:
        return self

    def load_binary(self, *_: object) -> tuple[object, ...]:
        return object(), object(), 0, 0, 1024

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        self.looked_up += 1
        return 7 * self.looked_up  # the stream is queried at every launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def arguments_of(offset: int, column: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return arguments of ``pointwise.previous_kernel``."""
    stored = torch.zeros(64 + offset, dtype=dtype)[offset:]
    after = torch.zeros(tokens, 16)
    starts = torch.zeros(tokens, dtype=torch.uint8)
    return stored, 16, column, after, starts, torch.zeros(tokens, 16), tokens * 16


def differing() -> int:
    """Launch every kind of arguments twice, prepared and through Triton, and count differences."""
    wrong, constants = 0, {"HIDDEN": 16, "BLOCK": 128, "num_warps": 4}
    kinds = [(0, 1, 64), (1, 1, 64), (0, 3, 64), (0, 16, 64), (0, 1, 63), (0, 1, 128)]
    for dtype in (torch.float32, torch.bfloat16):
        for kind in kinds:
            arguments = arguments_of(*kind, dtype)
            started.clear()
            pointwise.previous_kernel[(2,)](*arguments, **constants)
            for _ in range(3):
                prepared(pointwise.previous_kernel, 2, **constants)(*arguments)
            expected, *found = [(kernel, grid, values) for kernel, grid, _, values in started]
            wrong += found != [expected] * 3
    return wrong


def streams_kept() -> int:
    """Check that every launch uses the current stream instead of that of the first."""
    arguments = arguments_of(0, 1, 64, torch.float32)
    started.clear()
    for _ in range(3):
        prepared(pointwise.previous_kernel, 2, HIDDEN=16, BLOCK=128, num_warps=4)(*arguments)
    return 3 - len({stream for _, _, stream, _ in started})


def hooks_missed() -> int:
    """Check that a hook registered after the first launch is passed on with the launches, until it is removed."""
    arguments = arguments_of(0, 1, 64, torch.float32)
    launch, hook = prepared(pointwise.previous_kernel, 2, HIDDEN=16, BLOCK=128, num_warps=4), print
    launch(*arguments)
    found: list[bool] = []
    for change in (runtime.launch_enter_hook.add, runtime.launch_enter_hook.remove):
        change(hook)
        hooked.clear()
        launch(*arguments)
        found += hooked
    return 2 - (found == [True, False]) * 2


def unrefused() -> int:
    """Check that a GPU with too little shared memory for a kernel is refused, and what it has is named."""
    states, starts = torch.zeros(16, 16), torch.zeros(1, dtype=torch.int64)
    of_rows = (states, 16, 16)
    arguments = (
        *of_rows,
        *of_rows,
        *of_rows,
        states,
        states,
        states,
        0,
        0,
        0,
        0,
        1,
        starts,
        *[states] * 6,
        1,
        1,
        1,
        1,
        1,
    )
    sizes = {"K": 16, "V": 16, "BLOCK_K": 16, "BLOCK_V": 16, "CHUNK": 16, "BLOCKS": 1, "PRECISION": "ieee"}
    flags = dict.fromkeys(("DELTA", "HAS_STATES", "AFTER", "KEEP"), False)
    compiler.max_shared_mem = lambda _: 64
    try:
        prepared(forward_kernel, 1, **sizes, **flags)(*arguments)
    except UnsupportedError as refused:
        return int("(shared memory), the GPU has 64. Use fewer units" not in str(refused))
    return 1


def main() -> None:
    compiler.max_shared_mem = lambda _: 232448
    driver.set_active(Driver())
    print("launches:", differing())
    print("streams:", streams_kept())
    print("hooks:", hooks_missed())
    print("too large:", unrefused())


if __name__ == "__main__":
    main()
