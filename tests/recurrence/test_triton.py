from __future__ import annotations

import ctypes
import itertools
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from recurl.recurrence import GRU, LSTM, Boundaries, LayerCall, LayerWeights, Options, Support
from recurl.recurrence.cuda import TritonKernels, cuda_launch, hardware, nvrtc, triton_compat
from recurl.recurrence.cuda import backend as backend_module
from recurl.recurrence.cuda.choose import Layer, chosen_for
from recurl.recurrence.cuda.cluster.config import Cluster
from recurl.recurrence.cuda.hardware import Hardware
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.portable.config import tile_for
from recurl.recurrence.cuda.precision import PRECISIONS
from recurl.recurrence.cuda.products import launch as products
from recurl.recurrence.cuda.resident.config import Resident
from recurl.recurrence.cuda.rows.config import Rows
from recurl.recurrence.cuda.tiles.config import Tiles
from tests.programs import Programs

from .gpus import H200, OTHERS, WITHOUT_NVRTC
from .kernel_tests import but_first, core_and_rest, opposites, run

pytestmark = pytest.mark.slow

ERRORS = {
    "ieee": 2e-6,
    "recompute": 2e-6,
    "layers": 2e-6,
    "group": 2e-6,
    "tf32": 2e-3,
    "saved": 0,
    "isolation": 0,
}
CHECKS = {f"{cell} {name}": limit for cell in ("lstm", "gru") for name, limit in ERRORS.items()} | {
    "bounds": 0,
    "arranged": 1e-6,
    "packed": 0,
    "turned": 0,
    "lstm projection": 2e-6,
    "lstm projection recompute": 2e-6,
    "lstm projection saved": 0,
}
CORE = "bounds", "turned", "lstm ieee", "gru recompute", "lstm projection"
# Kind, kernel, cell, hidden size and precision.
PORTABLE = [
    "portable,forward,lstm,64,tf32",
    "portable,backward,lstm,64,tf32",
    "portable,backward,gru,100,ieee",
    "portable,forward,lstm,128,bf16",
    "portable,forward,gru,96,ieee",
    "portable,backward,lstm,256,bf16",
    "portable,backward,gru,1024,tf32",
    "pointwise,bounds,lstm,64,ieee",
    "pointwise,previous,lstm,60,ieee",
    "pointwise,gates,gru,60,tf32",
    "pointwise,sums,gru,60,tf32",
    "pointwise,turn,gru,60,tf32",
    "pointwise,arrange,gru,60,tf32",
    "pointwise,restore,lstm,60,tf32",
    "pointwise,pack,gru,300,tf32",
]
RESIDENT = [
    f"resident,{direction},{cell},{size}"
    for direction, cell, size in opposites(["20,tf32", "64,tf32", "80,tf32", "128,tf32", "100,bf16", "200,bf16"])
]
GROUPS = [
    f"resident,{direction},{cell},{hidden},{precision}"
    for direction in ("forward", "backward")
    for cell, hidden, precision in (("lstm", 256, "tf32"), ("gru", 160, "tf32"), ("lstm", 200, "ieee"))
]
TILES = [
    "tiles,forward,lstm,512,tf32",
    "tiles,forward,gru,300,bf16",
    "tiles,forward,gru,352,tf32",
    "tiles,forward,lstm,1024,tf32",
    "tiles,backward,lstm,512,tf32",
    "tiles,backward,gru,480,tf32",
    "tiles,backward,lstm,512,bf16",
    "tiles,backward,gru,1024,tf32",
    "tiles,forward,gru,160,ieee",
    "tiles,backward,lstm,512,ieee",
]
PRODUCTS = ["product,128,tf32", "product,256,tf32", "product,128,exact", "product,128,biased"]
# By compute capability, with the shared memory of a program.
COMPILED = {
    "80": (PORTABLE, 163 * 1024),
    "90": ([*PORTABLE, *RESIDENT, *GROUPS, *TILES, *PRODUCTS], 227 * 1024),
    **{newer: (PORTABLE[:7], size * 1024) for newer, size in (("86", 99), ("89", 99), ("100", 227), ("120", 99))},
}
CORE_COMPILED = {
    "80": ["portable,forward,lstm,64,tf32", "pointwise,bounds,lstm,64,ieee"],
    "90": RESIDENT[:2],
    **{newer: ["portable,forward,lstm,64,tf32"] for newer in ("86", "89", "100", "120")},
}
# Bytes, elsewhere none. 128 slots of 32 units: some of the inputs prefetched for the next step are spilled.
SPILLED = {name: 48 for name in GROUPS if "ieee" in name} | {"tiles,backward,gru,1024,tf32": 120}


@pytest.mark.parametrize("names", core_and_rest(CORE, CHECKS))
def test_interpreted_kernels_agree_with_the_reference(names: list[str]) -> None:
    found = run("triton_interpreted", *names, TRITON_INTERPRET="1")
    assert [*found] == names
    assert {name: error for name, (error,) in found.items() if not float(error) <= CHECKS[name]} == {}


@pytest.mark.kernels
def test_prepared_launches_start_what_triton_starts(programs: Programs) -> None:
    found = run("triton_prepared", start=programs.run, TRITON_INTERPRET="0")
    assert found == {key: ["0"] for key in ("launches", "streams", "hooks", "too large")}


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.kernels)], ids=["core", "rest"])
@pytest.mark.parametrize("capability", COMPILED)
def test_compiled_kernels_hardly_spill_and_fit(capability: str, part: int, programs: Programs) -> None:
    cases, limit = COMPILED[capability]
    cases = [name for name in cases if (name not in CORE_COMPILED[capability]) == part]
    found = run("triton_offline", capability, *cases, start=programs.run, TRITON_INTERPRET="0")
    assert [*found] == cases
    for name, (_, spilled, shared) in found.items():
        assert int(spilled) <= SPILLED.get(name, 0), name
        assert int(shared) <= limit, name


TESTED = "tf32", "bf16", "ieee"


@pytest.mark.parametrize(
    ("direction", "cell", "size"),
    but_first(
        opposites(
            [
                *[(size, precision) for size in (160, 251, 320, 512) for precision in ("tf32", "bf16")],
                *[(112, "tf32"), (128, "tf32"), *((size, "ieee") for size in (96, 128, 160, 256, 384))],
            ]
        )
    ),
    ids=str,
)
def test_cluster_kernels_compile_and_hardly_spill(direction: str, cell: str, size: tuple[int, str]) -> None:
    hidden, precision = size
    chosen = chosen_for(Layer(H200, cell, hidden, precision, 300 if hidden <= 128 else 200))
    assert chosen is not None
    config = chosen.forward
    assert isinstance(config, Cluster)
    layout = GateLayout(cell == "lstm", hidden, chosen.width, interleaved=True)
    constants = config.constants(direction, layout, PRECISIONS[precision])
    flag = {"forward": "KEEP", "backward": "TO_STORED"}[direction]
    _, log = nvrtc.compiled("cluster/cluster.cu", {**constants, flag: True}, "sm_90", "--ptxas-options=-v")
    spilled, shared = re.search(r"(\d+) bytes spill stores", log), re.search(r"(\d+) bytes smem", log)
    assert spilled, log
    assert int(spilled[1]) <= (128 if precision == "ieee" else 48), log  # before the loop
    assert shared, log
    assert int(shared[1]) <= 48 * 1024
    assert int(shared[1]) + config.shared_for(chosen.width, precision == "ieee") <= 227 * 1024
    assert "warning" not in log


@pytest.mark.parametrize(
    ("direction", "cell", "size"),
    but_first(opposites(itertools.product((16, 33, 64, 72, 96), ("tf32", "ieee")))),
    ids=str,
)
def test_kernels_of_one_slot_compile_and_do_not_spill(direction: str, cell: str, size: tuple[int, str]) -> None:
    hidden, precision = size
    chosen = chosen_for(Layer(H200, cell, hidden, precision, 264))
    assert chosen is not None
    config = chosen.forward
    assert isinstance(config, Rows)
    layout = GateLayout(cell == "lstm", hidden, chosen.width, interleaved=True)
    constants = config.constants(direction, layout, PRECISIONS[precision])
    flag = {"forward": "KEEP", "backward": "TO_STORED"}[direction]
    _, log = nvrtc.compiled("rows/rows.cu", {**constants, flag: True}, "sm_90", "--ptxas-options=-v")
    assert " 0 bytes spill stores" in log
    assert "warning" not in log
    used = re.search(r"Used (\d+) registers", log)
    assert used
    assert int(used[1]) * config.threads_for(chosen.width) * config.programs <= 64 * 1024


def test_rows_of_many_units_hardly_spill() -> None:
    for hidden, direction, precision in ((112, "forward", "ieee"), (128, "forward", "ieee"), (112, "backward", "tf32")):
        chosen = chosen_for(Layer(H200, "gru", hidden, precision, 64))
        assert chosen is not None
        config = chosen.forward
        assert isinstance(config, Rows)
        layout = GateLayout(False, hidden, chosen.width, interleaved=True)
        flag = {"forward": "KEEP", "backward": "TO_STORED"}[direction]
        constants = {**config.constants(direction, layout, PRECISIONS[precision]), flag: True}
        _, log = nvrtc.compiled("rows/rows.cu", constants, "sm_90", "--ptxas-options=-v")
        spilled = re.search(r"(\d+) bytes spill stores", log)
        assert spilled, log
        assert int(spilled[1]) <= 96, log


CUDA = [  # kernels in CUDA C++ with the oldest architecture that has their instructions
    *[(Rows(1), 80, cell, hidden, "tf32") for cell, hidden in (("lstm", 96), ("gru", 64))],
    *[(Rows(4), 80, "lstm", 32, "ieee"), (Cluster(4, 32), 90, "lstm", 256, "tf32")],
    *[(Cluster(2, 66), 90, "gru", 128, "bf16"), (Cluster(8, 16), 90, "gru", 512, "tf32")],
]


@pytest.mark.parametrize(
    "architecture", [80, *(pytest.param(a, marks=pytest.mark.kernels) for a in (86, 89, 100, 120))]
)
def test_kernels_in_cuda_compile_for_every_architecture(architecture: int) -> None:
    for family, oldest, cell, hidden, precision in CUDA:
        for direction, flag in (("forward", "KEEP"), ("backward", "TO_STORED")):
            layout = GateLayout(cell == "lstm", hidden, hidden, interleaved=True)
            constants = {**family.constants(direction, layout, PRECISIONS[precision]), flag: True}
            if architecture < oldest:
                with pytest.raises(RuntimeError, match="is not supported for this GPU architecture"):
                    nvrtc.compiled(family.source, constants, f"sm_{architecture}")
                continue
            _, log = nvrtc.compiled(family.source, constants, f"sm_{architecture}", "--ptxas-options=-v")
            spilled, used = re.search(r"(\d+) bytes spill stores", log), re.search(r"Used (\d+) registers", log)
            assert spilled, log
            assert int(spilled[1]) <= 48, log
            assert used, log
            assert int(used[1]) * family.threads_for(hidden) * family.programs <= 64 * 1024


def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"cluster/cluster.cu for sm_90 with {'WIDTH': 256}: (.|\n)*LSTM"):
        nvrtc.compiled("cluster/cluster.cu", {"WIDTH": 256}, "sm_90")


def test_without_a_compiler_that_works_there_are_no_kernels_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("NVRTC doesn't compile nothing.cu")

    monkeypatch.setattr(cuda_launch, "_function", broken)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    cuda_launch.can_compile_on.cache_clear()
    with pytest.warns(
        UserWarning, match=r"can't be compiled for cpu, which runs others: NVRTC doesn't compile nothing.cu"
    ):
        assert not cuda_launch.can_compile_on(torch.device("cpu"))
    cuda_launch.can_compile_on.cache_clear()


def test_what_one_process_compiled_the_next_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilations: list[dict[str, Any]] = []

    def compiled(name: str, constants: dict[str, Any], architecture: str) -> tuple[bytes, str]:
        compilations.append({**constants, "architecture": architecture})
        return compile_truly(name, constants, architecture)

    compile_truly = nvrtc.compiled
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    code = cuda_launch.machine_code("nothing.cu", {"WIDTH": 256}, "sm_90")
    assert code[:4] == b"\x7fELF"
    assert cuda_launch.machine_code("nothing.cu", {"WIDTH": 256}, "sm_90") == code
    assert compilations == [{"WIDTH": 256, "architecture": "sm_90"}]
    cuda_launch.machine_code("nothing.cu", {"WIDTH": 256}, "sm_120")
    monkeypatch.setattr(nvrtc, "_source", lambda _: b'extern "C" __global__ void nothing_kernel() { __syncthreads(); }')
    assert cuda_launch.machine_code("nothing.cu", {"WIDTH": 256}, "sm_90") != code
    assert len(compilations) == 3


def test_a_launch_passes_addresses_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake driver that launches nothing."""
    started: list[tuple[Any, ...]] = []
    allowed: list[tuple[Any, ...]] = []

    def start(function: object, *rest: Any) -> int:
        *grid, shared, stream, parameters, extra = rest
        words = (ctypes.c_int64 * 3).from_address(parameters[0])
        started.append((function, grid, shared, stream, list(words), extra))
        return 0

    class Driver:
        """Fake driver with one GPU."""

        cuLaunchKernel = staticmethod(start)

        @staticmethod
        def cuFuncSetAttribute(function: object, name: int, size: int) -> int:
            allowed.append((function, name, size))
            return 0

        @staticmethod
        def get_current_stream(device: object) -> int:
            return 7

    monkeypatch.setattr(cuda_launch, "_driver", Driver)
    monkeypatch.setattr(triton_compat, "_driver", lambda: SimpleNamespace(active=Driver))
    monkeypatch.setattr(cuda_launch, "_function", lambda source, kernel, _, **constants: (kernel, constants))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch = cuda_launch.CudaLaunch("cluster/cluster.cu", "walk", 120, 256, 512, {"WIDTH": 256})
    for _ in range(2):
        a, b = torch.empty(3), torch.empty(3)
        launch(a, 2**40, b)
        function, *rest = started.pop()
        assert function == ("walk", {"WIDTH": 256})
        assert rest == [[120, 1, 1, 256, 1, 1], 512, 7, [a.data_ptr(), 2**40, b.data_ptr()], None]
    assert [(name, size) for _, name, size in allowed] == [(8, 512)]  # once
    monkeypatch.setattr(Driver, "cuLaunchKernel", staticmethod(lambda *_: 719))
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with CUDA's error 719"):
        launch(a, 1, b)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_group_holds_all_units(direction: str) -> None:
    for hidden in (1, 16, 17, 64, 100, 128, 300, 1024, 3000):
        for gates in (3, 4):
            for precision in ("ieee", "tf32", "bf16"):
                tile = tile_for(direction, hidden, gates, precision)
                assert tile.units * tile.members >= hidden
                assert tile.block_k >= hidden or not tile.resident


def kinds(
    cell: str, hidden: int, precision: str, rows: int, hardware: Hardware = WITHOUT_NVRTC
) -> tuple[type, type] | None:
    chosen = chosen_for(Layer(hardware, cell, hidden, precision, rows))
    assert chosen is None or chosen.width >= hidden
    return None if chosen is None else (type(chosen.forward), type(chosen.backward))


def test_gluon_kernels_serve_what_was_measured() -> None:
    assert kinds("lstm", 100, "tf32", 64) == (Resident, Resident)
    assert kinds("lstm", 100, "tf32", 4096) == (Resident, Resident)
    assert kinds("lstm", 100, "tf32", 1) == (Resident, Resident)
    assert kinds("gru", 128, "ieee", 4096) is None
    assert kinds("lstm", 64, "bf16", 64) == (Resident, Resident)
    assert kinds("gru", 256, "tf32", 64) == (Resident, Resident)
    assert kinds("lstm", 256, "ieee", 64) == (Resident, Resident)
    assert kinds("gru", 256, "tf32", 512) == (Tiles, Tiles)
    assert kinds("lstm", 512, "tf32", 1) == (Tiles, Tiles)
    assert kinds("lstm", 512, "ieee", 1) == (Tiles, Tiles)
    assert kinds("gru", 1000, "bf16", 1) == (Tiles, Tiles)
    for rows, walks in ((64, 1), (512, 2)):
        chosen = chosen_for(Layer(WITHOUT_NVRTC, "lstm", 512, "tf32", rows))
        assert chosen is not None
        assert isinstance(chosen.forward, Tiles)
        assert chosen.forward.walks == walks
    assert kinds("gru", 256, "tf32", 1, hardware=WITHOUT_NVRTC._replace(processors=3)) is None
    assert kinds("gru", 1024, "tf32", 1, hardware=WITHOUT_NVRTC._replace(processors=16)) is None


def test_unmeasured_chips_run_portable_kernels() -> None:
    for gpu in OTHERS.values():
        for hidden, rows in ((16, 1), (64, 64), (256, 512), (1024, 64)):
            assert chosen_for(Layer(gpu, "lstm", hidden, "tf32", rows)) is None


@pytest.mark.parametrize(
    ("cell", "hidden", "precision", "least", "most"),
    [
        *[
            (cell, hidden, precision, 1, None)
            for cell in ("lstm", "gru")
            for hidden in (129, 256)
            for precision in TESTED
        ],
        *[(cell, hidden, "ieee", 265, None) for cell in ("lstm", "gru") for hidden in (65, 96)],
        *[("lstm", 97, "ieee", 1, None), ("gru", 128, "ieee", 133, None), ("lstm", 128, "ieee", 1, None)],
        *[(cell, hidden, "ieee", 1, None) for cell in ("lstm", "gru") for hidden in (257, 384)],
        *[("gru", hidden, precision, 1, 240) for hidden in (257, 512) for precision in ("tf32", "bf16")],
        *[("lstm", hidden, "tf32", 1, 528) for hidden in (97, 128)],
        *[("lstm", 65, "tf32", 265, 528), ("gru", 97, "tf32", 133, 528)],
        *[("lstm", 65, "bf16", 1, 132), ("lstm", 128, "bf16", 1, 132), ("gru", 97, "bf16", 1, 132)],
    ],
)
def test_clusters_serve_what_was_measured(cell: str, hidden: int, precision: str, least: int, most: int | None) -> None:
    serves = Cluster, Cluster
    assert kinds(cell, hidden, precision, least, hardware=H200) == serves
    assert kinds(cell, hidden, precision, least) != serves
    assert least == 1 or kinds(cell, hidden, precision, least - 1, hardware=H200) != serves
    assert kinds(cell, hidden, precision, most or 10**6, hardware=H200) == serves
    assert most is None or kinds(cell, hidden, precision, most + 1, hardware=H200) != serves


def test_clusters_serve_nothing_else() -> None:
    others = (
        ("lstm", 513, "tf32"),
        ("lstm", 385, "ieee"),
        ("gru", 96, "bf16"),
        ("gru", 96, "tf32"),
        ("lstm", 64, "tf32"),
    )
    for case, rows in itertools.product(others, (1, 64, 200, 500, 5000)):
        assert kinds(*case, rows, hardware=H200) != (Cluster, Cluster)
    assert kinds("lstm", 512, "tf32", 1, hardware=H200._replace(clusters=(66, 30, 0))) == (
        Tiles,
        Tiles,
    )  # no cluster of eight fits


@pytest.mark.parametrize(
    ("hidden", "precision", "least", "most", "programs"),
    [
        *[(hidden, "tf32", 4, 528, 4) for hidden in (1, 16, 32)],
        *[(hidden, "tf32", 4, 528, 2) for hidden in (33, 48)],
        *[(64, "tf32", 4, 264, 2), (65, "tf32", 4, 264, 1), (96, "tf32", 4, 264, 1)],
        *[(32, "ieee", 1, None, 4), (33, "ieee", 1, None, 2), (64, "ieee", 1, None, 2)],
        *[(65, "ieee", 1, 264, 1), (96, "ieee", 1, 264, 1)],
    ],
)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_four_threads_a_unit_serve_what_was_measured(
    cell: str, hidden: int, precision: str, least: int, most: int | None, programs: int
) -> None:
    serves = Rows, Rows
    assert kinds(cell, hidden, precision, least - 1, hardware=H200) != serves or least == 1
    for rows in (least, most or 10**6):
        assert kinds(cell, hidden, precision, rows, hardware=H200) == serves
        assert kinds(cell, hidden, precision, rows) != serves
    assert most is None or kinds(cell, hidden, precision, most + 1, hardware=H200) != serves
    for rows, expected in ((1, programs), (4, 1), (132, 1), (133, min(2, programs)), (264, min(2, programs))):
        if rows >= least:
            chosen = chosen_for(Layer(H200, cell, hidden, precision, rows))
            assert chosen is not None
            assert chosen.forward == chosen.backward == Rows(expected)


def test_large_units_and_bfloat16_never_have_four_threads_a_unit() -> None:
    for case, rows in itertools.product(
        (("lstm", 97, "ieee"), ("gru", 113, "tf32"), ("gru", 16, "bf16")), (1, 64, 200)
    ):
        assert kinds(*case, rows, hardware=H200) != (Rows, Rows)


def test_sizes_between_powers_of_two_are_hardly_padded() -> None:
    widths = {(72, 64): 80, (72, 4096): 96, (104, 64): 128, (160, 64): 160, (200, 4096): 224, (320, 64): 320}
    for (hidden, rows), width in widths.items():
        chosen = chosen_for(Layer(H200, "lstm", hidden, "tf32", rows))
        assert chosen is not None
        assert chosen.width == width


@pytest.mark.parametrize("precision", ["tf32", "bf16", "ieee"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_wide_kernels_fit_and_come_out_even(cell: str, precision: str) -> None:
    gates, size, parts = 4 if cell == "lstm" else 3, 2 if precision == "bf16" else 4, 2 if precision == "ieee" else 1
    for hidden, rows in itertools.product(range(132, 1100, 11), (1, 300, 600, 5000)):
        chosen = chosen_for(Layer(WITHOUT_NVRTC, cell, hidden, precision, rows))
        assert chosen is not None
        if isinstance(chosen.forward, Tiles) and isinstance(chosen.backward, Tiles):
            columns = chosen.width * size // 128
            half = precision == "tf32" and chosen.width % 64 == 0  # float16 operands
            shares = chosen.backward.shares_for(chosen.width, gates * columns)
            deep = gates * columns // shares
            assert deep * shares == gates * columns
            assert chosen.width % (shares * chosen.backward.units) == 0
            for wide, blocks, weights in (
                (chosen.forward, columns // 2 if half else columns, gates * chosen.forward.units),
                (chosen.backward, deep, shares * chosen.backward.units),
            ):
                pages = wide.pages_for(blocks, weights, parts)
                assert pages == blocks or (wide.walks == 1 and pages == wide.stages < blocks)
                assert blocks % wide.blocks_at_once(pages, blocks) == 0
                assert 128 * parts * (wide.walks * wide.stages * wide.rows + pages * weights) <= 224 * 1024


def test_products_are_cut_into_whole_rounds() -> None:
    assert products.cut_for(32768, 4096, 1024, 132, exact=False) == (1, 256)
    assert products.cut_for(32768, 2048, 512, 132, exact=False) == (4, 256)
    assert products.cut_for(32768, 1280, 320, 132, exact=False) == (4, 128)
    for tokens, rows, columns in itertools.product((1, 31, 4096, 10**6), (96, 640, 4096), (40, 300, 1024)):
        for exact in (False, True):
            shares, tile = products.cut_for(tokens, rows, columns, 132, exact)
            assert 1 <= shares <= max(1, tokens // 1024)
            assert tile in ((128,) if exact else (128, 256))


def test_operands_of_tf32_are_half_as_wide_in_forward_tiles() -> None:
    for hidden, expected in ((512, torch.float16), (352, torch.float32)):
        chosen = chosen_for(Layer(WITHOUT_NVRTC, "lstm", hidden, "tf32", 512))
        assert chosen is not None
        layout = GateLayout(True, hidden, chosen.width, True)
        assert isinstance(chosen.forward, Tiles)
        for precision, dtype in (("tf32", expected), ("ieee", torch.float32), ("bf16", torch.bfloat16)):
            assert chosen.forward.operands("forward", layout, PRECISIONS[precision]) == dtype
        assert chosen.forward.operands("backward", layout, PRECISIONS["tf32"]) == torch.float32


def test_operators_announce_shapes_for_symbolic_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "hardware_of", lambda _: H200)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    tokens = mode.from_tensor(torch.empty(37), symbolic_context=sizes).shape[0]
    with mode:
        w_ih, w_hh, x, h = (
            torch.empty(*shape, device="cuda") for shape in ((900, 8), (900, 300), (tokens, 8), (tokens, 300))
        )
        boundaries = Boundaries(torch.empty(tokens, dtype=torch.bool, device="cuda"), (3, tokens))
        call = LayerCall(
            GRU, LayerWeights(w_ih, w_hh, None, None, None), x, (h,), boundaries, Options(precision="tf32")
        )
        gates, weight = TritonKernels().saved_like(call)
    assert gates.shape == (tokens, 4 * 320)
    assert weight.shape == (3 * 320, 8)


def test_torch_compile_asks_the_driver_outside_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def clusters_on(device: torch.device, sizes: tuple[int, ...], shared: int) -> tuple[int, ...]:
        return tuple(ctypes.c_int(30).value for _ in sizes)  # which torch.compile can't trace

    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=2**17, name="a GPU"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cuda_launch, "clusters_on", clusters_on)
    monkeypatch.setattr(cuda_launch, "can_compile_on", lambda _: True)
    hardware._query.cache_clear()

    def scaled(x: torch.Tensor) -> torch.Tensor:
        found = hardware.hardware_of(x.device)
        return x * found.processors + found.clusters[1]

    found = torch.compile(scaled, backend="eager", fullgraph=True)(torch.ones(2))
    hardware._query.cache_clear()
    assert found.tolist() == [162, 162]


@pytest.mark.parametrize(("capability", "clusters"), [((8, 6), (0, 0, 0)), ((9, 0), (7, 7, 7)), ((12, 0), (7, 7, 7))])
def test_only_chips_with_clusters_are_asked_for_them(
    capability: tuple[int, int], clusters: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "major", "minor", "multi_processor_count", "shared_memory_per_block_optin", "name"
    properties = SimpleNamespace(**dict(zip(names, (*capability, 82, 99 * 1024, "a GPU"), strict=True)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cuda_launch, "clusters_on", lambda device, sizes, shared: (7,) * len(sizes))
    for able in (True, False):
        monkeypatch.setattr(cuda_launch, "can_compile_on", lambda _, able=able: able)
        hardware._query.cache_clear()
        expected = Hardware(capability, 82, 99 * 1024, able, clusters if able else (0, 0, 0), "a GPU")
        assert hardware.hardware_of(torch.device("cuda")) == expected
    hardware._query.cache_clear()


def test_unsupported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TritonKernels()
    cuda = torch.device("cuda", 0)
    assert "it needs an NVIDIA GPU, the tensors are on cpu" in (
        kernels.unsupported(Support(LSTM, torch.device("cpu"))) or ""
    )
    monkeypatch.setattr(backend_module, "hardware_of", lambda _: H200._replace(capability=(7, 5)))
    assert "this GPU has 7.5" in (kernels.unsupported(Support(LSTM, cuda)) or "")
    monkeypatch.setattr(backend_module, "hardware_of", lambda _: H200)
    assert "got torch.float64" in (kernels.unsupported(Support(GRU, cuda, torch.float64)) or "")
    assert "hidden_size=16384 is too large" in (kernels.unsupported(Support(LSTM, cuda, hidden_size=16384)) or "")
    assert kernels.unsupported(Support(LSTM, cuda, hidden_size=1024, options=Options(True, "tf32"))) is None


def test_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonKernels()
    backend_module._missing_package.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.1.0")
    assert "it needs triton 3.6 or newer, found 3.1.0" in (backend.missing() or "")
    backend_module._missing_package.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'recurl[triton]'" in (backend.missing() or "")
    assert "pip install 'recurl[triton]'" in (backend.unsupported(Support(LSTM, torch.device("cuda", 0))) or "")
    backend_module._missing_package.cache_clear()
