"""Fuzz the readers of run, sweep and replay buffer folders; writes results/fuzz_folders.csv.

Every case is a copy of a real folder, changed by one to three mutations of ``folder_mutations``, and one reader of
recurl, run in a separate process. The reader must end within ten seconds with a result or a recurl error, run no code
named by the folder, change no file outside the folder, and use little memory. A seed and a number determine a case.
Linux only. Usage::

    python benchmarks/fuzz_folders.py --cases 2400 --seed 0
    python benchmarks/fuzz_folders.py --seed 0 --only 17          # repeat one case and show its output
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import tensordict
import torch
from rich.console import Console
from tensordict import TensorDict

import recurl
from folder_mutations import EVIL, MUTATIONS
from recurl.cli.main import main as command_line
from recurl.core.errors import RecurlError
from recurl.data import LazyTensorStorage, ListStorage, PrioritizedSliceSampler, ReplayBuffer, TensorDictReplayBuffer
from recurl.trainers import PPOConfig, RunFolder, Trainer
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from recurl.trainers.study.grid import make_jobs
from recurl.trainers.study.sweep import Sweep
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "fuzz_folders.csv"
SECONDS, MEGABYTES = 10, 400
ADDRESSES = 3 << 30  # bytes in addition to those of the interpreter
BAD = ("traceback", "executed", "written outside", "hang", "memory", "died")
ENV = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1",)}
SMALL = {"num_envs": 4, "rollout_steps": 8, "hidden_size": 4, "sequence_length": 4, "logger": "none", "threads": 1}
CODE = """
import pathlib
pathlib.Path({canary!r}).write_text(__name__)
class Evil:
    def __init__(self, *arguments, **options):
        pathlib.Path({canary!r}).write_text("called")
def evil(*arguments, **options):
    pathlib.Path({canary!r}).write_text("called")
"""


@dataclass
class Case:
    """A mutated folder, its reader, and the outcome."""

    number: int
    folder: str
    mutations: str
    reader: str
    outcome: str = ""
    said: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0


# The mutated folders


def options() -> PPOConfig:
    return PPOConfig(**ENV, **SMALL, total_steps=96, eval_every=32, eval_episodes=2, keep_best=True)


def make_run(path: Path, seed: int = 0) -> None:
    config = replace(options(), seed=seed)
    folder = RunFolder(path)
    folder.create(config)
    with contextlib.closing(Trainer(config, folder, console=Console(file=io.StringIO()))) as trainer:
        trainer.run()


def jobs() -> Any:
    return make_jobs(PPOConfig, {"gamma": ("0.9",)}, 2, lambda _: replace(options(), gamma=0.9))


def make_sweep(path: Path) -> None:
    sweep = Sweep(path, jobs(), print)
    with sweep.hold():
        for seed, job in enumerate(jobs()):
            make_run(path / job.name, seed)
            (path / f"{job.name}.log").write_text("trained\n")
            sweep._status[job.name] = "finished"
        sweep._write_results()


def a_buffer() -> TensorDictReplayBuffer:
    sampler = PrioritizedSliceSampler(60, 0.9, 0.5, slice_len=4, strict_length=False)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(60, ndim=2), sampler=sampler, batch_size=8)


def a_list() -> ReplayBuffer:
    return ReplayBuffer(storage=ListStorage(20))


def make_buffer(path: Path) -> None:
    buffer = a_buffer()
    done = (torch.arange(20) % 7 == 6).expand(3, -1).unsqueeze(-1)
    seen = torch.arange(20.0).expand(3, -1).unsqueeze(-1)
    following = TensorDict({"done": done, "observation": seen + 1}, [3, 20])
    buffer.extend(TensorDict({"observation": seen, "next": following}, [3, 20]))
    buffer.dumps(path)


def make_list(path: Path) -> None:
    buffer = a_list()
    buffer.extend([1, "two", 3.0, torch.zeros(2)])
    buffer.dumps(path)


MAKERS = {"run": make_run, "sweep": make_sweep, "buffer": make_buffer, "list": make_list}


# The readers


def run_command(*words: str) -> Callable[[Path], None]:
    """Return a reader that runs a command on the folder; ``OUT`` is a path for its output."""

    def read(folder: Path) -> None:
        given = [str(folder) if word == "RUN" else word.replace("OUT", f"{folder}.out") for word in words]
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = command_line(given)
        text = errors.getvalue()
        if "its traceback is in" in text:
            raise RuntimeError(f"a traceback was written: {text}")
        if code:
            raise RecurlError(text)

    return read


def read_sweep(folder: Path) -> None:
    with Sweep(folder, jobs(), lambda _: None).hold():
        pass


def read_buffer(folder: Path) -> None:
    buffer = a_buffer()
    buffer.loads(folder)
    buffer.sample()


READERS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "run": {
        "read_config": lambda folder: RunFolder(folder).read_config(),
        "load_checkpoint": lambda folder: load_checkpoint(latest_checkpoint(folder / "checkpoints")),
        "recurl.load": recurl.load,
        "recurl.load best": lambda folder: recurl.load(folder, "best"),
        "evaluate": run_command("evaluate", "RUN", "--episodes", "1"),
        "compare": run_command("compare", "RUN", "--out", "OUT.png"),
        "export": run_command("export", "RUN", "--format", "compiled", "--out", "OUT.recurl"),
        "doctor": run_command("doctor", "RUN"),
        "play": run_command("play", "RUN"),
        "resume": run_command("train", "--resume", "RUN", "--total-steps", "160"),
        "overwrite": run_command(
            *("train", "ppo", "--env", "recurl/RepeatPrevious-v0", "--run-dir", "RUN", "--overwrite"),
            *(
                "--num-envs",
                "4",
                "--rollout-steps",
                "8",
                "--hidden-size",
                "4",
                "--total-steps",
                "32",
                "--logger",
                "none",
            ),
        ),
    },
    "sweep": {"sweep": read_sweep, "compare": run_command("compare", "RUN", "--out", "OUT.png")},
    "buffer": {"loads": read_buffer},
    "list": {"loads": lambda folder: a_list().loads(folder)},
}
SHARES = {"run": 0.65, "sweep": 0.12, "buffer": 0.18, "list": 0.05}


# One case


class Place:
    """Folder of the fuzzer: the real folders, the guard, which must not be modified, and the case."""

    def __init__(self, path: Path) -> None:
        self.path, self.case, self.guard, self.canary = path, path / "cases" / "case", path / "guard", path / "canary"
        self.working = path / "working"
        for name, make in MAKERS.items():
            make(path / "real" / name)
            self.plant(path / "real" / name)
        self.working.mkdir()
        self.plant(self.working)
        (self.guard / "folder").mkdir(parents=True)
        for name in ("text", "folder/000000000096.pt", "folder/000000000032.pt", "folder/run_id"):
            (self.guard / name).write_text("outside")
        (self.guard / "numbers.memmap").write_bytes(bytes(224))
        shutil.copytree(self.guard, path / "guard.real")
        self.before = self.fingerprint()

    def plant(self, folder: Path) -> None:
        (folder / f"{EVIL}.py").write_text(CODE.format(canary=str(self.canary)))

    def fingerprint(self) -> str:
        found = hashlib.sha256()
        for path in sorted(self.guard.rglob("*")):
            found.update(str(path).encode())
            found.update(path.read_bytes() if path.is_file() else b"")
        return found.hexdigest()

    def fresh(self, kind: str) -> Path:
        if self.case.parent.exists():
            shutil.rmtree(self.case.parent)
        self.case.parent.mkdir()
        self.canary.unlink(missing_ok=True)
        shutil.copytree(self.path / "real" / kind, self.case)
        if self.fingerprint() != self.before:
            shutil.rmtree(self.guard)
            shutil.copytree(self.path / "guard.real", self.guard)
        return self.case


UNFIT = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError, BadZipFile, zlib.error)
"""Errors of a mutation that is not applicable after another one."""


def prepare(place: Place, number: int, seed: int) -> Case:
    draw = random.Random(f"{seed} {number}")
    kind = draw.choices([*SHARES], [*SHARES.values()])[0]
    folder = place.fresh(kind)
    reader = draw.choice([*READERS[kind]])
    said = []
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        mutation = draw.choice(MUTATIONS[kind])
        try:
            said.append(mutation(folder, draw, place.guard))
        except UNFIT as error:  # often for the second one
            said.append(f"no {getattr(mutation, '__name__', '')} ({type(error).__name__})")
    return Case(number, kind, "; ".join(said), reader)


def attack(place: Place, case: Case, *, seconds: float = SECONDS) -> Case:
    """Run the reader of a case in a child process, and determine the outcome."""
    reading, writing = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            report = read_in_child(place, case)
            os.write(writing, json.dumps(report).encode())
        finally:
            os._exit(0)
    os.close(writing)
    hung = False
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.perf_counter() - start > seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            hung = True
            break
        time.sleep(0.002)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    report = json.loads(text) if text else {"outcome": "died", "said": "", "megabytes": 0.0}
    case.seconds = time.perf_counter() - start
    case.outcome, case.said, case.megabytes = report["outcome"], report["said"], report["megabytes"]
    if case.megabytes > MEGABYTES:
        case.outcome = "memory"
    if hung:
        case.outcome = "hang"
    if place.fingerprint() != place.before:
        case.outcome = "written outside"
    if place.canary.exists():
        case.outcome = "executed"
    return case


def read_in_child(place: Place, case: Case) -> dict[str, Any]:
    os.chdir(place.working)
    sys.path.insert(0, "")  # the working directory, as for `python -m recurl`
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the parent
    before = memory("VmRSS")
    most = memory("VmSize") * 1024 + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    outcome, said = "ok", ""
    try:
        READERS[case.folder][case.reader](place.case)
    except RecurlError as error:
        said = str(error).strip()
        lines = [line for line in said.splitlines() if not line.startswith("Notice: ")]
        outcome = "refused" if len(lines) == 1 else "traceback"
    except SystemExit as error:
        outcome, said = "refused", str(error)
    except BaseException as error:  # noqa: BLE001 - any error is the result
        frame = traceback.extract_tb(error.__traceback__)[-1]
        outcome, said = "traceback", f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {error}"
    return {"outcome": outcome, "said": said[:2000], "megabytes": (memory("VmHWM") - before) / 1024}


def memory(name: str) -> int:
    """Return a memory figure of this process in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def warm_up(place: Place) -> None:
    """Run every reader once, so that children find all modules imported."""
    for kind, readers in READERS.items():
        for name, read in readers.items():
            read(place.fresh(kind))
            if place.canary.exists():
                raise RuntimeError(f"{name} ran code of an unchanged folder")


def fuzz(place: Place, cases: int, seed: int, say: Callable[[str], None]) -> list[Case]:
    warm_up(place)
    done: list[Case] = []
    for number in range(cases):
        case = attack(place, prepare(place, number, seed))
        done.append(case)
        if case.outcome in BAD:
            about = f"{case.reader} of a {case.folder}, {case.mutations}"
            say(f"{case.outcome.upper()} {number}: {about}: {case.said[:300]}")
        if number % 100 == 99:
            say(f"{number + 1} cases: {dict(Counter(case.outcome for case in done))}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run only this case")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results table")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="recurl-fuzz-") as name:
        place = Place(Path(name))
        if wanted.only is not None:
            warm_up(place)
            print(json.dumps(asdict(attack(place, prepare(place, wanted.only, wanted.seed))), indent=1))
            return 0
        done = fuzz(place, wanted.cases, wanted.seed, lambda text: print(text, flush=True))
    outcomes = Counter(case.outcome for case in done)
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
        "seed": wanted.seed,
        "cases": len(done),
        **{outcome: outcomes[outcome] for outcome in ("ok", "refused", *BAD)},
        "peak_mb": f"{max(case.megabytes for case in done):.0f}",
        "longest_s": f"{max(case.seconds for case in done):.1f}",
        "seconds": f"{time.perf_counter() - start:.0f}",
    }
    append(wanted.results, row)
    print(json.dumps(row))
    return int(any(outcomes[outcome] for outcome in BAD))


if __name__ == "__main__":
    sys.exit(main())
