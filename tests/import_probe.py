"""Import packages, each in its own process, and print the duration and side effects as JSON.

Run as ``python import_probe.py PACKAGE ...``. torch and tensordict are imported and timed first. Each package is then
imported in a fork of that process, so only what it adds to them is measured.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from typing import Any


def state() -> dict[str, Any]:
    """Return the process state that an import must not change, as comparable values."""
    import numpy as np
    import tensordict
    import torch

    return {
        "environment variables": dict(os.environ),
        "working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.excepthook": repr(sys.excepthook),
        "warning filters": [repr(entry) for entry in warnings.filters],
        "root logger": [logging.root.level, [repr(handler) for handler in logging.root.handlers]],
        "signal handlers": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "threads": threading.active_count(),
        "process start method": multiprocessing.get_start_method(allow_none=True),
        "random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),  # noqa: NPY002 - the global state is checked
        "torch.random": torch.get_rng_state().tolist(),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch defaults": [repr(torch.get_default_dtype()), repr(torch.get_default_device()), torch.is_grad_enabled()],
        "torch matmul": [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32],
        "torch cudnn": [getattr(torch.backends.cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")],
        "torch determinism": [
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ],
        "torch validates distributions": torch.distributions.Distribution._validate_args,
        "CUDA is in use": torch.cuda.is_initialized(),
        "tensordict": [tensordict.lazy_legacy(), tensordict.list_to_stack()],
    }


def import_in_fork(packages: list[str]) -> dict[str, Any]:
    """Import packages in a fork of this process; return duration, changes, new modules and warnings."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_import(packages)).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a fork must never return to its parent's code
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"importing {packages} failed")
    return json.loads(report)


def _import(packages: list[str]) -> dict[str, Any]:
    modules, before = set(sys.modules), state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        start = time.process_time()
        for package in packages:
            importlib.import_module(package)
        seconds = time.process_time() - start
        # Inside the block, as leaving it would revert changes of the import to the filters.
        added = [repr(entry) for entry in warnings.filters if entry not in filters]
    after = state()
    return {
        "seconds": seconds,
        "modules": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
        "torch": sorted(name for name in set(sys.modules) - modules if name.startswith("torch.")),
        "triton": sorted(name for name in set(sys.modules) - modules if name.startswith("recurl.recurrence.cuda")),
        "changed": sorted(name for name in before if before[name] != after[name]),
        "filters": added,
        "warnings": [str(entry.message) for entry in caught],
    }


def main(packages: list[str]) -> None:
    """Print the report of every package, of all packages together, and of gymnasium alone."""
    start = time.process_time()
    importlib.import_module("torch")
    importlib.import_module("tensordict")
    seconds = time.process_time() - start
    groups = {package: [package] for package in packages} | {"all": packages, "gymnasium": ["gymnasium"]}
    reports = {name: import_in_fork(group) for name, group in groups.items()}
    sys.stdout.write(json.dumps({"torch and tensordict": seconds, "reports": reports}))


if __name__ == "__main__":
    main(sys.argv[1:])
