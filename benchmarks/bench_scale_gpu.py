"""Weak scaling of learners over ranks: whole updates of recurrent PPO, with tasks on the devices.

The batch per rank is fixed. First, equality is checked: one process learns from the batches collected by all ranks, and
the weights are compared. Then whole updates are timed as in a run (collection, statistics, checks, all epochs; the host
one update ahead of a GPU) on one rank and on several: medians of five rounds, their ratio, and the time of the
all-reduce of the gradients, launched individually and in a CUDA graph. Ranks on the CPU have one thread each. Appends
to results/scale_gpu.csv, or scale_cpu.csv. Usage::

    python benchmarks/bench_scale_gpu.py                    # one GPU, and all GPUs
    python benchmarks/bench_scale_gpu.py --ranks 2 --updates 20
    python benchmarks/bench_scale_gpu.py --device cpu --envs 32 --ranks 2 4 8 16 --updates 10
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from bench_ahead import WARM_UP, Run
from recurl import __version__
from recurl.distributed import average_, joined, rank, world_size
from recurl.trainers import PPO, PPOConfig
from results_file import append, commit

RESULTS = Path(__file__).parent / "results"
UPDATES = 3  # of the check: 12 gradient steps, of which 9 are replays of the graph
TOLERANCE = 1e-4
ROUNDS = 5


def main() -> None:
    """Check, measure and print; or, as one of the ranks, run its part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; the number of GPUs by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cell", default="lstm")
    parser.add_argument("--envs", type=int, default=4096, help="environments per rank")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--csv", type=Path, help="results file")
    parser.add_argument("--part", choices=("collect", "learn", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--whole", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        torch.set_float32_matmul_precision("high" if options.part == "measure" else "highest")
        with joined(options.device):
            PARTS[options.part](options)
        return
    options.csv = options.csv or RESULTS / f"scale_{'gpu' if options.device == 'cuda' else 'cpu'}.csv"
    show_machine(options.device)
    several = options.ranks or [torch.cuda.device_count() if options.device == "cuda" else 2]
    check(max(several))
    alone = measure(1)
    for ranks in several:
        show(options, ranks, alone, measure(ranks))


def show_machine(device: str) -> None:
    print(f"torch {torch.__version__}, recurl {__version__}, {commit()}")
    if device == "cuda":
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, NCCL {torch.cuda.nccl.version()}")
        subprocess.run(["nvidia-smi", "topo", "-m"], check=False)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"


def run(ranks: int, *more: str) -> None:
    """Run this file on this many ranks, with the options of this process."""
    words = [str(Path(__file__).resolve()), *sys.argv[1:], *more]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([sys.executable, *launch, *words], env=environment, check=False)
    if done.returncode:
        sys.exit(f"{more[1]} over {ranks} ranks failed.")


# -- equality


def check(ranks: int) -> None:
    """Compare the weights of several ranks with those of one process that learns from all of their batches."""
    with tempfile.TemporaryDirectory() as folder:
        run(ranks, "--part", "collect", "--folder", folder)
        run(1, "--part", "learn", "--folder", folder, "--whole", str(ranks))
        found, wanted = (torch.load(Path(folder) / f"{name}.pt") for name in ("ranks", "whole"))
        begun = torch.load(Path(folder) / "begun.pt")
    moved = max((wanted[name] - begun[name]).abs().max().item() for name in wanted)
    apart = max((wanted[name] - found[name]).abs().max().item() for name in wanted)
    print(f"{ranks} ranks and one process with their batches: weights moved by {moved:.2e}, differ by {apart:.2e}")
    if not apart < TOLERANCE or not moved > 10 * TOLERANCE:
        sys.exit(f"They must differ by less than {TOLERANCE}, and move by more than {10 * TOLERANCE}.")


def learner_of(options: argparse.Namespace, *, envs: int, steps: int) -> PPO:
    values: dict[str, Any] = {
        "env": "recurl/MaskedCartPole-v1",
        "vectorization": "device",
        "device": options.device,
        "cell": options.cell,
        "hidden_size": options.hidden,
        "num_envs": envs,
        "rollout_steps": steps,
        "sequence_length": steps,
        "epochs": 4 if options.part == "measure" else 1,
        "minibatches": 4,
        "shared_trunk": True,
        "total_steps": 10**12,
        "learning_rate_schedule": "constant",
        "entropy_coeff_schedule": "constant",
        "cuda_graph": options.device == "cuda",
        "compile": options.device == "cuda" and options.part == "measure",
    }
    return PPO(PPOConfig(**values))


def weights_of(learner: PPO) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().double() for name, value in learner.agent.named_parameters()}


def collect_part(options: argparse.Namespace) -> None:
    """Train on small batches, which each rank writes to a file."""
    learner = learner_of(options, envs=32, steps=16)
    if rank() == 0:
        torch.save(weights_of(learner), options.folder / "begun.pt")
    batches = []
    for _ in range(UPDATES):
        batch = learner.collect()
        batches.append(batch.cpu().to_dict())
        learner.learn(batch)
    torch.save(batches, options.folder / f"batches{rank()}.pt")
    if rank() == 0:
        torch.save(weights_of(learner), options.folder / "ranks.pt")
    learner.close()


def learn_part(options: argparse.Namespace) -> None:
    """Learn from the batches of all ranks in one process."""
    learner = learner_of(options, envs=32 * options.whole, steps=16)
    files = [torch.load(options.folder / f"batches{number}.pt") for number in range(options.whole)]
    for parts in zip(*files, strict=True):
        whole = torch.cat([TensorDict.from_dict(part, batch_size=[32, 16]) for part in parts])
        learner.env_steps += whole.numel()
        learner.learn(whole.to(options.device))
    torch.save(weights_of(learner), options.folder / "whole.pt")
    learner.close()


# -- timing


def measure(ranks: int) -> dict[str, float]:
    """Return medians over updates, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        run(ranks, "--part", "measure", "--folder", folder)
        return json.loads((Path(folder) / "times.json").read_text())


def measure_part(options: argparse.Namespace) -> None:
    """Time updates as in a run: the host begins an update before the GPU has finished the previous one."""
    run = Run(learner_of(options, envs=options.envs, steps=options.steps), ahead=options.device == "cuda")
    run.make(WARM_UP)
    seconds = [wall(lambda: run.make(options.updates), options.device) / options.updates for _ in range(ROUNDS)]
    learner = run.learner
    times = {"update_ms": statistics.median(seconds) * 1e3}
    times["parameters"] = sum(parameter.numel() for parameter in learner.agent.parameters())
    gradients = [torch.ones_like(parameter) for parameter in learner.agent.parameters()]
    learner.close()
    times["eager_us"] = per_call(lambda: average_(gradients), options.device) * 1e6
    times["captured_us"] = captured(lambda: average_(gradients)) * 1e6 if options.device == "cuda" else 0.0
    if rank() == 0:
        (options.folder / "times.json").write_text(json.dumps(times))


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def wall(call: Callable[[], Any], device: str) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def per_call(call: Callable[[], Any], device: str, number: int = 100) -> float:
    def calls() -> None:
        for _ in range(number):
            call()

    calls()
    return min(wall(calls, device) for _ in range(5)) / number


def captured(call: Callable[[], Any], number: int = 100) -> float:
    """Return the time per call of ``number`` calls captured in one CUDA graph."""
    if world_size() == 1:
        return 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(number):
            call()
    best = per_call(graph.replay, "cuda", 5) / number
    graph.reset()
    return best


def show(options: argparse.Namespace, ranks: int, alone: dict[str, float], together: dict[str, float]) -> None:
    frames = options.envs * options.steps
    rates = [frames * number / times["update_ms"] / 1e3 for number, times in ((1, alone), (ranks, together))]
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": device_name(options.device),
        "recurl": __version__,
        "torch": torch.__version__,
        "cell": options.cell,
        "envs_per_rank": options.envs,
        "steps": options.steps,
        "hidden": options.hidden,
        "parameters": int(together["parameters"]),
        "ranks": ranks,
        "update_ms_alone": round(alone["update_ms"], 2),
        "update_ms": round(together["update_ms"], 2),
        "M_steps_per_s_alone": round(rates[0], 3),
        "M_steps_per_s": round(rates[1], 3),
        "ratio": round(rates[1] / rates[0], 3),
        "efficiency": round(rates[1] / rates[0] / ranks, 3),
        "all_reduce_us": round(together["eager_us"], 1),
        "all_reduce_captured_us": round(together["captured_us"], 1),
    }
    append(options.csv, row)
    print(
        f"{options.cell} {options.envs} x {options.steps} per rank, hidden {options.hidden}\n"
        f"  1 rank   {row['update_ms_alone']:9.2f} ms an update {row['M_steps_per_s_alone']:8.3f} M steps/s\n"
        f"  {ranks} ranks  {row['update_ms']:9.2f} ms an update {row['M_steps_per_s']:8.3f} M steps/s, "
        f"{row['ratio']} x one\n"
        f"  all-reduce of {row['parameters']:,} numbers: {row['all_reduce_us']} us, "
        f"{row['all_reduce_captured_us']} us in a CUDA graph"
    )


PARTS = {"collect": collect_part, "learn": learn_part, "measure": measure_part}

if __name__ == "__main__":
    main()
