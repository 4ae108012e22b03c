"""Train every task, and every algorithm with every cell, for a few updates on a GPU, captured and compiled.

Run this before a release and after changes to lowering, compiled steps, CUDA graphs or tasks. The cases are:

* each task of recurl and of POPGym, PPO with a GRU, at the sizes of ``recurl bench popgym``;
* each algorithm with each cell, on the masked pendulum where actions are continuous, else on masked CartPole;
* ``CountRecall``, whose compiled step is the largest, with each cell.

A case runs updates until its CUDA graphs have been captured, and then two more, which replay them; all reported metrics
must be finite. The last warning of recurl, such as one about a failed compilation, is in its row. Cases run in
parallel, each in a separate process. Appends a row per case to ``results/gpu_runs.csv``. A case that passed at this
commit, on this GPU and with these versions, is skipped, so an interrupted check can be continued. Exits with 1 if a
case failed. Usage::

    python benchmarks/check_gpu_runs.py                          # all cases
    python benchmarks/check_gpu_runs.py --only CountRecall s5    # cases with these words in their names
    python benchmarks/check_gpu_runs.py --seconds 500            # start no case after that; rerun to continue
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

import recurl
from recurl.envs.tasks.popgym import POPGYM_TASKS, popgym_id
from recurl.experiments.popgym.settings import setting
from recurl.recurrence import CELLS
from recurl.trainers.algorithms.table import ALGORITHMS, make_algorithm
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "gpu_runs.csv"
CARTPOLE, PENDULUM = "recurl/MaskedCartPole-v1", "recurl/MaskedPendulum-v1"
NATIVE = ("recurl/Bandit-v0", CARTPOLE, PENDULUM, "recurl/RepeatPrevious-v0", "recurl/TMaze-v0")
CONTINUOUS = ("sac", "td3")
MEMORIES = (*CELLS, "none")
UPDATES = (
    6  # of which the last two replay every graph: collectors record the third batch, gradient steps the third call
)
LIMIT = 400  # seconds of one case
SMALL = {"num_envs": 64, "rollout_steps": 32, "hidden_size": 64, "logger": "none"}
REPLAY = {"learning_starts": 64 * 32, "buffer_size": 50_000, "gradient_steps": 2}


class Case(NamedTuple):
    """A training."""

    env: str
    algorithm: str
    cell: str

    def __str__(self) -> str:
        return f"{self.env}, {self.algorithm}, {self.cell}"


def cases() -> Iterator[Case]:
    """Yield all cases, without repetition."""
    recall = [popgym_id(task) for task in POPGYM_TASKS if task.startswith("CountRecall")]
    found = [
        *(Case(env, "ppo", cell) for env in recall for cell in MEMORIES),
        *(Case(env, "ppo", "gru") for env in (*NATIVE, *map(popgym_id, POPGYM_TASKS))),
        *(
            Case(PENDULUM if algorithm in CONTINUOUS else CARTPOLE, algorithm, cell)
            for algorithm in ALGORITHMS
            for cell in MEMORIES
        ),
        *(Case(CARTPOLE, "sac", cell) for cell in MEMORIES),
    ]
    yield from dict.fromkeys(found)


def main() -> int:
    """Run the missing cases, and print those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="words that a case's name must contain")
    parser.add_argument("--device", default="cuda", help="cpu compiles without graphs, to try this script")
    parser.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--logs", type=Path, help="folder for the stderr of failing cases")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(train(Case(*options.case), options.device))
        return 0
    chosen = [case for case in cases() if all(word in str(case) for word in options.only)]
    versions = {
        "commit": options.commit,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "recurl": recurl.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    passed = done(options.csv, versions)
    missing = [case for case in chosen if case not in passed]
    print(f"{len(chosen)} cases, {len(chosen) - len(missing)} passed before; {versions}", flush=True)
    started = time.perf_counter()

    def one(case: Case) -> tuple[Case, str, float] | None:
        if time.perf_counter() - started > options.seconds:
            return None
        return run(case, options.device, options.logs)

    failed = left = 0
    with ThreadPoolExecutor(options.parallel) as pool:
        for done_case in as_completed([pool.submit(one, case) for case in missing]):
            found = done_case.result()
            if found is None:
                left += 1
                continue
            case, outcome, seconds = found
            row = {"date": datetime.now(UTC).date().isoformat(), **case._asdict(), "outcome": outcome}
            append(options.csv, {**row, "seconds": f"{seconds:.0f}", "updates": UPDATES, **versions})
            failed += not outcome.startswith("ok")
            print(f"{case}: {outcome}", flush=True)
    print(f"{len(chosen) - failed - left} of {len(chosen)} ok, {failed} failed, {left} left to another call")
    return int(failed > 0)


def done(path: Path, versions: dict[str, str]) -> set[Case]:
    """Return the cases that have passed with these versions."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["outcome"].startswith("ok")]
    same = (row for row in rows if all(row[name] == value for name, value in versions.items()))
    return {Case(row["env"], row["algorithm"], row["cell"]) for row in same}


def run(case: Case, device: str, logs: Path | None) -> tuple[Case, str, float]:
    """Train in another process; return the result of :func:`train`, or the last line of an error."""
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
    command = [sys.executable, __file__, "--device", device, "--case", *case]
    begin = time.perf_counter()
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return case, f"no end in {LIMIT} s", time.perf_counter() - begin
    if logs is not None and ended.returncode != 0:
        (logs / f"{str(case).replace('/', '-').replace(', ', '_')}.log").write_text(ended.stderr)
    said = [line for line in (ended.stderr if ended.returncode else ended.stdout).splitlines() if line.strip()]
    outcome = said[-1] if said else f"status {ended.returncode}"
    return case, outcome[:300], time.perf_counter() - begin


def train(case: Case, device: str) -> str:
    """Run the updates of a case in this process; return "ok" and recurl's last warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        learner: Any = make_algorithm(config_of(case, device))
        for _ in range(UPDATES):
            numbers = learner.learn(learner.collect())
            if learner.fault is not None:
                sys.exit(f"{learner.fault} isn't finite: {numbers}")
        learner.close()
    package = str(Path(recurl.__file__).parent)
    lines = [str(warning.message) for warning in warned if warning.filename.startswith(package)]
    return f"ok: {lines[-1]}" if lines else "ok"


def config_of(case: Case, device: str) -> Any:
    """Return the options of a case."""
    kind = ALGORITHMS[case.algorithm].config
    options: dict[str, Any] = dict(SMALL)
    if case.algorithm == "ppo" and case.env.startswith("recurl/popgym"):
        options = setting("fast", {})
    elif case.algorithm in ("dqn", "r2d2", "sac", "td3"):
        options |= REPLAY
    programs = {"device": device, "compile": True, "cuda_graph": device.startswith("cuda")}
    own = {"env": case.env, "cell": case.cell, "vectorization": "device", "total_steps": 10**9}
    return kind(**{**options, **own, **programs})


if __name__ == "__main__":
    sys.exit(main())
