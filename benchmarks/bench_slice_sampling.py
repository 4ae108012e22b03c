"""Time to sample slices, by the number of stored steps; appends to results/slice_sampling.csv.

64 slices of 32 steps each are drawn from trajectories of about 200 steps, with an append of 64 steps before each sample
(an append invalidates any caches of a library). If torchrl is installed, it is measured in the same run, in turn with
recurl. Usage::

    python benchmarks/bench_slice_sampling.py                    # 10^4, 10^5 and 10^6 steps: two minutes
    python benchmarks/bench_slice_sampling.py --steps 10000000   # other sizes
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "slice_sampling.csv"
SLICES, LENGTH, APPEND, HIDDEN = 64, 32, 64, 16
CASES = ("random steps", "slices", "ragged slices", "prioritized slices")


def main() -> None:
    """Measure every case at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=200)
    chosen = parser.parse_args()
    check_tests()
    torch.set_num_threads(1)
    libraries = ["recurl", *(["torchrl"] if importlib.util.find_spec("torchrl") else [])]
    for case in CASES:
        measure(case, libraries, chosen.steps, chosen.repeats)


def check_tests() -> None:
    """Exit if the tests fail."""
    tests = Path(__file__).parents[1] / "tests" / "data" / "replay_buffers" / "test_recompute.py"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of the replay buffers fail: no numbers before they pass.")


def measure(case: str, libraries: list[str], sizes: list[int], repeats: int) -> None:
    """Time appends and samples of one case, with all libraries and sizes in turn, under the same conditions."""
    buffers = {(library, size): filled(library, case, size) for library in libraries for size in sizes}
    buffers = {key: buffer for key, buffer in buffers.items() if buffer is not None}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in buffers}
    for repeat in range(repeats + 5):
        data = steps(APPEND, start=repeat * APPEND)
        for key, buffer in buffers.items():
            begin = time.perf_counter()
            buffer.extend(data)
            middle = time.perf_counter()
            buffer.sample()
            times[key].append((middle - begin, time.perf_counter() - middle))
    for (library, size), pairs in times.items():
        append_s, sample_s = zip(*pairs[5:], strict=True)
        report(
            {
                "date": time.strftime("%Y-%m-%d"),
                **machine(),
                "case": case,
                "library": library,
                "version": importlib.metadata.version(library),
                "steps": size,
                "repeats": repeats,
                "sample_us_median": round(1e6 * statistics.median(sample_s)),
                "sample_us_p10": round(1e6 * statistics.quantiles(sample_s, n=10)[0]),
                "append_us_median": round(1e6 * statistics.median(append_s)),
                "append_us_p10": round(1e6 * statistics.quantiles(append_s, n=10)[0]),
            }
        )


def filled(library: str, case: str, size: int) -> Any:
    """Return a full buffer of ``size`` steps, or None if the library does not support the case."""
    data = importlib.import_module(f"{library}.data")
    samplers = importlib.import_module(f"{library}.data.replay_buffers.samplers")
    make = {
        "random steps": lambda: samplers.RandomSampler(),
        "slices": lambda: samplers.SliceSampler(slice_len=LENGTH),
        "ragged slices": lambda: samplers.SliceSampler(slice_len=LENGTH, strict_length=False),
        "prioritized slices": lambda: samplers.PrioritizedSliceSampler(size, 0.7, 0.5, slice_len=LENGTH),
    }[case]
    try:
        sampler = make()
    except RuntimeError as error:  # torchrl's priorities need a compiled extension that fits the installed torch
        print(f"{library} can't do {case}: {error}")
        return None
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(size), sampler=sampler, batch_size=SLICES * LENGTH
    )
    for start in range(0, size, 10_000):
        buffer.extend(steps(min(10_000, size - start), start))
    return buffer


def steps(count: int, start: int) -> TensorDict:
    """Return steps like those of a collector with an LSTM policy, in trajectories of 200."""
    number = start + torch.arange(count)
    done = (number % 200 == 199).unsqueeze(-1)
    states, following = ({key: torch.zeros(count, 1, HIDDEN) for key in ("h", "c")} for _ in range(2))
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    return TensorDict(
        {
            "observation": torch.randn(count, 8),
            "action": torch.zeros(count, dtype=torch.int64),
            "is_init": (number % 200 == 0).unsqueeze(-1),
            **states,
            "collector": {"traj_ids": number // 200},
            "next": {"observation": torch.randn(count, 8), "reward": torch.zeros(count, 1), **following, **flags},
        },
        [count],
    )


def machine() -> dict[str, object]:
    """Return the factors that results depend on."""
    return {
        "commit": commit(),
        "device": f"{platform.machine()} CPU, 1 thread",
        "torch": torch.__version__,
        "tensordict": importlib.metadata.version("tensordict"),
    }


def report(row: dict[str, object]) -> None:
    """Add a row to the results and print it."""
    append(RESULTS, row)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
