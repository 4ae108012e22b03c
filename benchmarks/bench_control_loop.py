"""One robot at 1,000 Hz: how long a step of a policy takes, and how many miss their deadline; in control_loop.csv.

The policy is that of a PPO run on recurl/MaskedArm-v0, after one update: encoder, normalization, memory and head. It is
called by a loop that sleeps until the next tick:

* ``eager``: ``recurl.load(RUN).predict``.
* ``compiled``: ``recurl.load(RUN).compiled()``, one call of recurl's C++ library.
* ``torch``: the program exported with ``--format torch``, called with tensors.
* ``onnxruntime``: the file exported with ``--format onnx``, in a session of one thread.
* ``c``: the same file in ``examples/deploy/control_loop.c``, with the shared library of the wheel of onnxruntime.

All get the same observations, and their actions must agree. A step takes from the call to the action, is late by how
long after the tick it was called, and has missed if its action came after the next tick. One thread each; Python's
garbage collector is on. Policies that can't run here are named and left out. Usage::

    python benchmarks/bench_control_loop.py
    python benchmarks/bench_control_loop.py --fifo 80 --cpu 3 --seconds 60  # real-time priority on one core; as root
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import recurl
from recurl.native.library import missing
from recurl.trainers import PPOConfig, RunFolder, Trainer, export_run
from recurl.trainers.export.formats import FORMATS
from results_file import append, commit

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "control_loop.csv"
DEPLOY = ROOT / "examples" / "deploy"
HEADERS = ROOT / "tests" / "trainers" / "export" / "onnxruntime"  # what the example uses; the wheel has no headers
POLICIES = ("eager", "compiled", "torch", "onnxruntime", "c")
QUANTILES = {"median": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
WARM_UP = 100

Act = Callable[[np.ndarray, bool], Any]


def main() -> None:
    """Measure every requested combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--hz", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop")
    parser.add_argument("--fifo", type=int, metavar="PRIORITY", help="scheduling policy SCHED_FIFO")
    parser.add_argument("--cpu", type=int, help="the core to run on")
    parser.add_argument("--onnxruntime", type=Path, help="unpacked release of ONNX Runtime for the C program")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    wanted = [policy for policy in options.policies if _possible(policy)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "c" in wanted:
            build(folder, options.onnxruntime)
        for cell in options.cells:
            for hidden in options.hidden:
                measure(folder, cell, hidden, wanted, options)


def _possible(policy: str) -> bool:
    """Return whether a policy can run here; say why, if it can't."""
    reason = None
    if policy == "compiled":
        reason = missing()
    elif policy == "c" and shutil.which("cc") is None:
        reason = "there is no C compiler"
    if reason is not None:
        print(f"{policy} is left out: {reason}", flush=True)
    return reason is None


def measure(folder: Path, cell: str, hidden: int, wanted: Sequence[str], options: argparse.Namespace) -> None:
    """Train a policy for an update, and run each of its forms."""
    run = RunFolder(folder / f"{cell}{hidden}")
    sizes = {"num_envs": 4, "rollout_steps": 32, "total_steps": 128, "hidden_size": hidden}
    config = PPOConfig(env="recurl/MaskedArm-v0", cell=cell, drop_observations=("privileged",), device="cpu", **sizes)
    run.create(config)
    trainer = Trainer(config, run, console=Console(quiet=True))
    trainer.run()
    trainer.close()
    steps = round(options.hz * options.seconds)
    observations = np.random.default_rng(0).uniform(-1, 1, (steps, 6)).astype(np.float32)
    expected = None
    for policy in wanted:
        act = None if policy == "c" else ACTS[policy](run)
        path = export_run(run, "onnx") if policy == "c" else None
        load = os.getloadavg()[0]
        with _priority(options.fifo):
            if act is None:
                late, took, actions = in_c(folder / "control_loop", path, observations, options.hz)
            else:
                late, took, actions = loop(act, observations, options.hz)
        expected = actions if expected is None else expected
        np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-4)
        row = {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu(),
            "load": f"{load:.1f}",
            "priority": "normal" if options.fifo is None else f"fifo {options.fifo}",
            "cell": cell,
            "hidden": hidden,
            "policy": policy,
            "hz": f"{options.hz:g}",
            "steps": steps,
            **{f"{name}_us": f"{np.quantile(took, at):.1f}" for name, at in QUANTILES.items()},
            "late_p999_us": f"{np.quantile(late, 0.999):.1f}",
            "late_max_us": f"{late.max():.1f}",
            "missed": int((late + took > 1e6 / options.hz).sum()),
            "commit": options.commit,
            "torch": torch.__version__,
            "onnxruntime": importlib.import_module("onnxruntime").__version__,
            "python": platform.python_version(),
        }
        append(options.csv, row)
        print(*row.values(), flush=True)


@contextmanager
def _priority(fifo: int | None) -> Generator[None]:
    """Give this process, and programs started inside the block, a real-time priority, if one is asked for."""
    if fifo is not None:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(fifo))
    yield
    if fifo is not None:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def loop(act: Act, observations: np.ndarray, hz: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Call a policy at every tick. Returns how late it was called and how long it took, in us, and the actions."""
    for _ in range(WARM_UP):
        act(observations[0], True)
    period = round(1e9 / hz)
    late, took = (np.zeros(len(observations), np.int64) for _ in range(2))
    actions = np.zeros((len(observations), 2))
    tick = time.monotonic_ns() + period
    for step, observation in enumerate(observations):
        while (left := tick - time.monotonic_ns()) > 0:
            time.sleep(left * 1e-9)
        start = time.monotonic_ns()
        actions[step] = act(observation, step == 0)
        took[step] = time.monotonic_ns() - start
        late[step] = start - tick
        tick += period
        while tick <= time.monotonic_ns():  # a tick that has passed is left out
            tick += period
    return late / 1e3, took / 1e3, actions


def eager(run: RunFolder) -> Act:
    """Return the policy of a run."""
    policy, state = recurl.load(run), None

    def act(observation: np.ndarray, start: bool) -> Any:
        nonlocal state
        action, state = policy.predict({"observation": observation}, None if start else state)
        return action

    return act


def compiled(run: RunFolder) -> Act:
    """Return the policy of a run as one call of the C++ library."""
    policy, state = recurl.load(run).compiled(), None

    def act(observation: np.ndarray, start: bool) -> Any:
        nonlocal state
        action, state = policy(observation, None if start else state)
        return action

    return act


def exported(run: RunFolder) -> Act:
    """Return the exported program of a run."""
    step = torch.export.load(export_run(run, "torch")).module()
    sizes = [part["shape"][1:] for part in describe(run, "torch")["inputs"][2:]]
    states = [torch.zeros(1, *size) for size in sizes]

    def act(observation: np.ndarray, start: bool) -> Any:
        nonlocal states
        with torch.no_grad():
            action, *states = step(torch.from_numpy(observation[None]), torch.tensor([start]), *states)
        return action[0].numpy()

    return act


def in_onnxruntime(run: RunFolder) -> Act:
    """Return the exported ONNX file of a run, in a session of one thread."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(export_run(run, "onnx"), options)
    states = {
        part["name"]: np.zeros((1, *part["shape"][1:]), np.float32) for part in describe(run, "onnx")["inputs"][2:]
    }

    def act(observation: np.ndarray, start: bool) -> Any:
        nonlocal states
        inputs = {"observation": observation[None], "is_init": np.array([start]), **states}
        action, *after = session.run(None, inputs)
        states = dict(zip(states, after, strict=True))
        return action[0]

    return act


ACTS: dict[str, Callable[[RunFolder], Act]] = {
    "eager": eager,
    "compiled": compiled,
    "torch": exported,
    "onnxruntime": in_onnxruntime,
}


def describe(run: RunFolder, kind: str) -> dict[str, Any]:
    """Return the description of an exported file of a run."""
    return json.loads((run.path / f"policy{FORMATS[kind].suffix}.json").read_text())


def in_c(program: Path, path: Path, observations: np.ndarray, hz: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what ``loop`` does, of the program in C."""
    rows = enumerate(observations.tolist())
    lines = "\n".join(f"{int(step == 0)} {' '.join(map(repr, row))}" for step, row in rows)
    words = [program, path, f"{hz:g}"]
    end = subprocess.run(words, input=lines, capture_output=True, text=True, check=True)
    table = np.array([list(map(float, line.split(","))) for line in end.stdout.splitlines()])
    return table[:, 0], table[:, 1], table[:, 2:]


def build(folder: Path, release: Path | None = None, flags: str = "") -> Path:
    """Compile examples/deploy with the command that it names.

    Args:
        folder: where the program is written.
        release: unpacked release of ONNX Runtime; by default the library of Python's wheel, with our headers.
        flags: further words for the compiler.
    """
    if release is None:
        release = folder / "onnxruntime"
        (release / "lib").mkdir(parents=True)
        (release / "include").symlink_to(HEADERS)
        (library,) = Path(importlib.import_module("onnxruntime").__file__).parent.glob("capi/libonnxruntime.so.*")
        for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
            (release / "lib" / name).symlink_to(library)
    (command,) = re.findall(r"^ \*     cc (.*)$", (DEPLOY / "control_loop.c").read_text(), re.MULTILINE)
    own = f"cc {flags} {command} && mv control_loop {shlex.quote(str(folder))}"
    subprocess.run(own, shell=True, check=True, cwd=DEPLOY, env={**os.environ, "ORT": str(release.absolute())})
    return folder / "control_loop"


def cpu() -> str:
    """Return the name of the processor."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{platform.machine() if found is None else found[1].strip()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
