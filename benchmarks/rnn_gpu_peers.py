"""Recurrent layers of other libraries on a GPU, forward and backward with all weight gradients: one JSON line a case.

Each peer and case has a process of its own, so that builds run side by side and one that fails ends nothing else. Once
all are built, or the time for that is over, they are timed one after another: milliseconds of GPU time without host
gaps (busy), and wall time. A line of a peer that doesn't build or run has "error" instead: the last line it printed.
What isn't a library that pip finds is taken from ``--haste``, the source archive of haste_pytorch from PyPI.

Without resets: FlashRNN (one head of H units: LSTM fused in CUDA or Triton, GRU and LSTM alternating with cuBLAS;
bfloat16 is its default), Haste (float32) and cuDNN as the baseline. With resets: TorchRL, the way of rsl_rl (rows are
split at resets and padded to the longest part for cuDNN), that of CleanRL (``nn.LSTM`` step by step, with states
multiplied by zero at a reset) and that of PureJaxRL (flax cells in ``jax.lax.scan``). Usage::

    python benchmarks/rnn_gpu_peers.py --seconds 120 --haste haste_pytorch-0.5.0rc0.tar.gz
    python benchmarks/rnn_gpu_peers.py --peers cudnn torchrl-pad rsl_rl cleanrl jax --resets 0.02
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.util
import itertools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import cpp_extension

from bench_rnn_gpu import Step, busy, cudnn, torchrl, wall
from rnn_gpu_layer import DEVICE, Layer, Problem

Make = Callable[[Layer, Problem], Step]
CASES = ("64:64x512", "128:512x64", "256:64x512", "256:512x64")
READY = "ready"
TIMING = 8.0  # seconds to keep for each process that is to be timed, at most


def toolchain(folder: Path) -> None:
    """Let nvcc and the linker find CUDA's libraries in the wheels of NVIDIA, if the toolkit lacks them."""
    major, minor = torch.cuda.get_device_capability()
    os.environ.update(TORCH_CUDA_ARCH_LIST=f"{major}.{minor}", TORCH_EXTENSIONS_DIR=str(folder / "extensions"))
    home = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda")
    if (home / "include" / "cublas_v2.h").exists():
        return
    found = importlib.util.find_spec("nvidia")
    roots = [
        path for place in (found.submodule_search_locations or () if found else ()) for path in Path(place).iterdir()
    ]
    links = folder / "links"
    links.mkdir(parents=True, exist_ok=True)
    for library in (path for root in roots for path in (root / "lib").glob("lib*.so.*")):
        link = links / f"{library.name.partition('.so')[0]}.so"
        if not link.exists():
            link.symlink_to(library)
    includes = [str(root / "include") for root in roots if (root / "include").is_dir()]
    os.environ.update(CPATH=os.pathsep.join(includes), LIBRARY_PATH=str(links))


def gradients(module: torch.nn.Module, x: Tensor, grad: Tensor, run: Callable[[], Tensor]) -> Step:
    """Return the step that computes all gradients of ``run()``."""
    return lambda: torch.autograd.grad(run(), [x, *module.parameters()], grad)


def rows_of(layer: Layer, problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return x and the gradient of the output, ``[B, T, H]``."""
    shape = problem.rows, problem.length, problem.hidden
    x, grad = (value.detach().view(shape).to(dtype) for value in (layer.x, layer.grad))
    return x.requires_grad_(), grad


def flashrnn(layer: Layer, problem: Problem, backend: str, dtype: torch.dtype) -> Step:
    """One head of H units, and the product with the inputs before it."""
    module = importlib.import_module("flashrnn.flashrnn.flashrnn")
    properties = torch.cuda.get_device_properties(DEVICE)
    # Its own query of the GPU reads fields that CUDA 13 has removed; nothing else of it is replaced.
    module.get_gpu_info = lambda device_id: {  # type: ignore[attr-defined]
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": properties.regs_per_multiprocessor,
        "multiProcessorCount": properties.multi_processor_count,
        "sharedMemPerBlockOptin": properties.shared_memory_per_block_optin,
    }
    # It sleeps up to ten seconds before a build, for several builds in one folder.
    importlib.import_module("flashrnn.flashrnn.cuda_init").random = SimpleNamespace(random=lambda: 0.0)  # type: ignore[attr-defined]
    gates, biases, hidden = {"lstm": (4, 4), "gru": (3, 4)}[problem.cell] + (problem.hidden,)
    x, grad = rows_of(layer, problem, dtype)

    def uniform(*shape: int) -> Tensor:
        value = torch.rand(shape, device=DEVICE) * 2 - 1
        return (value / hidden**0.5).to(dtype).requires_grad_()

    w, r, b = uniform(gates * hidden, hidden), uniform(gates, 1, hidden, hidden), uniform(biases, 1, hidden)
    name = str(dtype).removeprefix("torch.")

    def step() -> object:
        inputs = F.linear(x, w).view(problem.rows, problem.length, gates, 1, hidden)
        states, _ = module.flashrnn(inputs, r, b, function=problem.cell, backend=backend, dtype=name)
        return torch.autograd.grad(states[0], [x, w, r, b], grad.unsqueeze(2).to(states.dtype))

    return step


def haste(layer: Layer, problem: Problem, archive: Path | None, folder: Path) -> Step:
    """The kernels of its LSTM and GRU, built from its source archive, once for all cases."""
    if archive is None:
        raise FileNotFoundError("--haste is not given")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "haste_pytorch").exists():
            unpack_haste(archive, folder)
        sources = sorted(map(str, folder.glob("haste_pytorch/*.c*")))
        sys.modules["haste_pytorch_lib"] = cpp_extension.load(
            "haste_pytorch_lib",
            sources,
            extra_include_paths=[str(folder / "haste_pytorch")],
            extra_cuda_cflags=["-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"],  # set by torch
            extra_ldflags=["-lcublas"],
            build_directory=str(folder),
            with_cuda=True,
        )
    sys.path.insert(0, str(folder))
    kind = getattr(importlib.import_module("haste_pytorch"), problem.cell.upper())
    rnn = kind(problem.hidden, problem.hidden, batch_first=True).to(DEVICE)
    x, grad = rows_of(layer, problem)
    return gradients(rnn, x, grad, lambda: rnn(x)[0])


def unpack_haste(archive: Path, folder: Path) -> None:
    """Put the sources of both layers and the Python modules into ``haste_pytorch``, without the other layers' kernels.

    torch's builder takes the suffix .cu.cc for C++, and ``support.cc`` names all layers.
    """
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    root, made = next(folder.glob("haste*/lib")).parent, folder / "haste_unpacked"
    shutil.copytree(root / "frameworks/pytorch", made, ignore=shutil.ignore_patterns("[!lg]*.cc", "layer_norm*.cc"))
    shutil.copytree(root / "lib", made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.cc"))
    for path in [*root.glob("lib/lstm*.cu.cc"), *root.glob("lib/gru*.cu.cc")]:
        shutil.copy(path, made / path.with_suffix("").name)
    inits = "lstm_init", "gru_init"
    declared, called = ("".join(form.format(name) for name in inits) for form in ("void {}(py::module&); ", "{}(m); "))
    module = f"#include <torch/extension.h>\n{declared}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ {called}}}\n"
    (made / "module.cc").write_text(module)
    made.rename(folder / "haste_pytorch")


def torch_layer(problem: Problem) -> Any:
    """Return torch.nn's layer, steps first."""
    return getattr(torch.nn, problem.cell.upper())(problem.hidden, problem.hidden, device=DEVICE)


def rsl_rl(layer: Layer, problem: Problem) -> Step:
    """Parts of rows, padded to the longest, and cuDNN; parts start from zeros."""
    utils = importlib.import_module("rsl_rl.utils")
    rnn = torch_layer(problem)
    x, grad = rows_of(layer, problem)
    dones = F.pad(layer.is_init[:, 1:].byte(), (0, 1)).t().unsqueeze(2)

    def run() -> Tensor:
        padded, masks = utils.split_and_pad_trajectories(x.transpose(0, 1), dones)
        return utils.unpad_trajectories(rnn(padded)[0], masks).transpose(0, 1)

    return gradients(rnn, x, grad, run)


def cleanrl(layer: Layer, problem: Problem) -> Step:
    """One call of cuDNN per step, with the states multiplied by zero at a reset."""
    rnn = torch_layer(problem)
    x, grad = rows_of(layer, problem)
    kept = (~layer.is_init).float()
    zeros = torch.zeros(1, problem.rows, problem.hidden, device=DEVICE)

    def run() -> Tensor:
        states: Any = (zeros, zeros) if problem.cell == "lstm" else zeros
        found = []
        for token, keep in zip(x.unbind(1), kept.unbind(1), strict=True):
            mask = keep.view(1, -1, 1)
            states = tuple(mask * state for state in states) if problem.cell == "lstm" else mask * states
            y, states = rnn(token.unsqueeze(0), states)
            found.append(y[0])
        return torch.stack(found, 1)

    return gradients(rnn, x, grad, run)


def jax_scan(layer: Layer, problem: Problem) -> Step:
    """A scan of flax's cell, whose states are replaced by zeros at a reset; compiled."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax: Any = importlib.import_module("jax")
    linen: Any = importlib.import_module("flax.linen")
    cell = {"lstm": linen.OptimizedLSTMCell, "gru": linen.GRUCell}[problem.cell](problem.hidden)
    x, grad, starts = (
        jax.dlpack.from_dlpack(value.detach().transpose(0, 1).contiguous())
        for value in (*rows_of(layer, problem), layer.is_init.float())
    )
    states = cell.initialize_carry(jax.random.key(0), x[0].shape)
    weights = cell.init(jax.random.key(0), states, x[0])

    def loss(weights: Any, x: Any) -> Any:
        def one(states: Any, token: Any) -> Any:
            value, start = token
            states = jax.tree.map(lambda state: jax.numpy.where(start[:, None] > 0, 0.0, state), states)
            return cell.apply(weights, states, value)

        return (jax.lax.scan(one, states, (x, starts))[1] * grad).sum()

    run = jax.jit(jax.grad(loss, (0, 1)))
    return lambda: jax.block_until_ready(run(weights, x))


def peers(archive: Path | None, folder: Path) -> dict[str, tuple[str, bool, Make]]:
    """Return by name: the cells, whether resets are known, and the factory of the step; the slowest to build first."""
    both, single, half = "lstm gru", torch.float32, torch.bfloat16
    return {
        "flashrnn-fused-bf16": ("lstm", False, partial(flashrnn, backend="cuda_fused", dtype=half)),
        "flashrnn-fused": ("lstm", False, partial(flashrnn, backend="cuda_fused", dtype=single)),
        "flashrnn-triton-bf16": ("lstm", False, partial(flashrnn, backend="triton_fused", dtype=half)),
        "flashrnn-triton": ("lstm", False, partial(flashrnn, backend="triton_fused", dtype=single)),
        "flashrnn-cuda-bf16": (both, False, partial(flashrnn, backend="cuda", dtype=half)),
        "flashrnn-cuda": (both, False, partial(flashrnn, backend="cuda", dtype=single)),
        "haste": (both, False, partial(haste, archive=archive, folder=folder)),
        "cudnn": (both, False, partial(cudnn, dtype=single)),
        "cudnn-bf16": (both, False, partial(cudnn, dtype=half)),
        "torchrl-pad": (both, True, partial(torchrl, backend="pad")),
        "torchrl-scan": (both, True, partial(torchrl, backend="scan")),
        "torchrl-triton": (both, True, partial(torchrl, backend="triton")),
        "rsl_rl": (both, True, rsl_rl),
        "cleanrl": (both, True, cleanrl),
        "jax": (both, True, jax_scan),
    }


def child(name: str, problem: Problem, archive: Path | None, folder: Path) -> None:
    """Build and run a step, wait for a line, time it, and print the result."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what builders print is no answer
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with tempfile.TemporaryDirectory() as own:  # FlashRNN's builds of other cases may have the same name
        toolchain(Path(own))
        step = peers(archive, folder)[name][2](Layer(problem), problem)
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        print(READY, file=answers, flush=True)
        sys.stdin.readline()
        total, _ = busy(step, 2)
        print(json.dumps({"busy": round(total, 4), "wall": round(wall(step, 5), 4)}), file=answers, flush=True)


class Child:
    """A process that builds and times one peer on one case.

    Args:
        name: the peer.
        problem: the case.
        archive: path of the source archive of Haste, or None.
        folder: for builds that cases share.
    """

    def __init__(self, name: str, problem: Problem, archive: Path | None, folder: Path) -> None:
        self.row: dict[str, Any] = {"cell": problem.cell, "H": problem.hidden, "B": problem.rows, "T": problem.length}
        self.row |= {"resets": problem.resets, "what": name}
        case = [problem.cell, *map(str, (problem.hidden, problem.rows, problem.length, problem.resets))]
        command = [sys.executable, __file__, "--child", name, *case, str(folder)]
        command += ["--haste", str(archive)] if archive else []
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "MAX_JOBS": os.environ.get("MAX_JOBS", "8")},
        )
        self.begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return round(time.monotonic() - self.begin, 1)

    def read(self) -> str:
        """Return the next line, which is empty at the end of the output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def time(self, seconds: float) -> dict[str, Any]:
        """Let it measure, and return the row."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            assert self.process.stdout is not None
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.read() if selector.select(seconds) else None
        return self.row | (json.loads(line) if line else {"error": self.stop("did not end in time")})

    def stop(self, reason: str) -> str:
        """End it, and return its last line about an error, or else ``reason``."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        causes = [line for line in lines if "error" in line.lower()]
        return (causes or lines or [reason])[-1][:300] if self.process.returncode > 0 else reason


def run_all(jobs: list[tuple[str, Problem]], arguments: argparse.Namespace, folder: Path) -> None:
    """Start the processes, at most ``--jobs`` that build at once, then time those that are ready."""
    until = time.monotonic() + arguments.seconds
    waiting, building, ready = list(jobs), list[Child](), list[Child]()
    with selectors.DefaultSelector() as selector:
        while (waiting or building) and time.monotonic() < until - min(
            TIMING * (1 + len(ready)), arguments.seconds / 3
        ):
            while waiting and len(building) < arguments.jobs:
                building.append(Child(*waiting.pop(0), arguments.haste, folder))
                selector.register(building[-1].process.stdout, selectors.EVENT_READ, building[-1])  # type: ignore[arg-type]
            for key, _ in selector.select(1.0):
                one: Child = key.data
                selector.unregister(key.fileobj)
                building.remove(one)
                if one.read() == READY:
                    ready.append(one)
                else:
                    show(one.row | {"error": one.stop("no error was printed"), "seconds": one.seconds})
    for one in building:
        show(one.row | {"error": f"not built in {one.seconds} s; {one.stop('')}".rstrip("; ")})
    for name, problem in waiting:
        row = {"cell": problem.cell, "H": problem.hidden, "B": problem.rows, "T": problem.length}
        show({**row, "resets": problem.resets, "what": name, "error": "not started, out of time"})
    for one in ready:
        show(one.time(max(1.0, until - time.monotonic())))
        one.stop("")


def show(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def sizes_of(text: str) -> tuple[int, int, int]:
    """Return H, B and T of a case."""
    found = re.fullmatch(r"(\d+):(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a case is H:BxT, such as {CASES[0]}; got {text!r}")
    hidden, rows, length = map(int, found.groups())
    return hidden, rows, length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = peers(None, Path())
    parser.add_argument(
        "--peers", nargs="*", default=[name for name in known if name != "torchrl-triton"], choices=known
    )
    parser.add_argument("--cells", nargs="*", default=["lstm", "gru"], choices=["lstm", "gru"])
    parser.add_argument("--cases", nargs="*", type=sizes_of, default=[*map(sizes_of, CASES)], help="H:BxT")
    parser.add_argument("--resets", nargs="*", type=float, default=[0.0, 0.02], help="probability of a reset per step")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for everything")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that build at once")
    parser.add_argument("--haste", type=Path, help="the source archive of haste_pytorch")
    parser.add_argument("--child", nargs=7, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU, and torch finds none")
    if arguments.child:
        name, cell, *sizes, resets, folder = arguments.child
        child(name, Problem(cell, *map(int, sizes), float(resets)), arguments.haste, Path(folder))
        return
    if shutil.which("nvcc") is None and cpp_extension.CUDA_HOME is None:
        print("nvcc is missing: FlashRNN's CUDA kernels and Haste can't be built", file=sys.stderr)
    jobs = list[tuple[str, Problem]]()
    for name, case, cell, resets in itertools.product(
        arguments.peers, arguments.cases, arguments.cells, arguments.resets
    ):
        cells, knows, _ = known[name]
        if cell in cells.split() and knows == (resets > 0):
            jobs.append((name, Problem(cell, *case, resets)))
    if not jobs:
        parser.error("none of these peers serves these cells with these resets")
    with tempfile.TemporaryDirectory() as folder:
        run_all(jobs, arguments, Path(folder))


if __name__ == "__main__":
    main()
