"""Environments on the host, learner on the GPU: recurrent PPO on environments with 100 us of CPU time per step.

Frames per second of whole updates (acting and learning) with workers, with two groups of environments in turn
(``--env-groups 2``), with CUDA graphs of the policy step and the updates, or with learning that overlaps collection
(``--overlap``). The reference is one process that steps the same environments one after another with random actions.
First, collected actions are replayed in that process, with bitwise equal observations; two groups must equal each group
alone, and a thread and a captured policy must equal this thread without them. SB3-Contrib's RecurrentPPO is included if
it is installed. Appends to results/host_envs.csv. Usage::

    python benchmarks/bench_host_envs.py                                                   # 16 cores and a GPU
    python benchmarks/bench_host_envs.py --device cpu --workers 2 --num-envs 8 --steps 32  # a dry run
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from recurl import __version__
from recurl.collectors import Collector
from recurl.collectors.threaded import ThreadedCollector
from recurl.envs import ExplorationType, GymEnv, parallel_groups
from recurl.execution.gpu_time import gpu_seconds
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.networks.agent import collecting
from results_file import append, commit
from spinning import Spin

RESULTS = Path(__file__).parent / "results" / "host_envs.csv"
ENV = "CartPole-v1"
SPIN = "spinning:Spin"
SB3 = "sb3"
VARIANTS: dict[str, dict[str, Any]] = {
    "groups, graph": {"env_groups": 2, "cuda_graph": True},
    "workers, graph": {"cuda_graph": True},
    "workers": {},
    "groups": {"env_groups": 2},
    "groups, overlap": {"env_groups": 2, "overlap": True},
}


def main() -> None:
    """Check, then measure every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--num-envs", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--updates", type=int, default=10, help="number of timed updates")
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(VARIANTS)} and {SB3}")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"torch {torch.__version__}, {name}, {os.cpu_count()} cores, {options.workers} workers")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # as recurl train does on a GPU
    check(options)
    alone = one_process()
    print(f"one process, random actions: {alone:,.0f} frames/s")
    for variant in options.only or [*VARIANTS, SB3]:
        if variant == SB3:
            if importlib.util.find_spec("sb3_contrib"):
                measure_sb3(alone, name, options)
            else:
                print("SB3-Contrib: not installed (sb3-contrib)")
        elif options.device == "cuda" or not {"cuda_graph", "overlap"} & VARIANTS[variant].keys():
            measure(variant, alone, name, options)


def spinning(num_envs: int, microseconds: float = 0.0, device: str = "cpu") -> GymEnv:
    """Return environments like those of the runs, with a given step time."""
    return GymEnv(
        ENV, num_envs, vectorization_mode="sync", wrappers=[partial(Spin, microseconds=microseconds)],
        categorical_action_encoding=True, device=device,
    )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Replay collected actions in this process, and compare two groups with each group alone.

    All checks step the same workers, which take seconds to start.
    """
    rows, steps, device = 8, 64, options.device
    learner = PPO(config_of(options, "workers", num_envs=rows, env_workers=0, device="cpu"))
    policy = collecting(learner.agent.policy).to(device)
    learner.close()

    def collected(env: Any, kind: ExplorationType, seed: int, count: int = 3, **more: Any) -> list[Any]:
        env.set_seed(seed)
        torch.manual_seed(4)
        frames = env.batch_size.numel() * steps
        collector = Collector(env, policy, frames_per_batch=frames, device=device, exploration_type=kind, **more)
        return [collector.collect().exclude(("collector", "traj_ids")) for _ in range(count)]

    groups = parallel_groups(2, 2, partial(spinning, rows // 4), timeout=60, device=device)
    random = collected(groups, ExplorationType.RANDOM, 5)
    replay([batch.cpu() for batch in random], rows)
    if device == "cuda":
        graph = collected(groups, ExplorationType.RANDOM, 5, cuda_graph=True)
        same("A batch of the captured policy differs from the same batch without a CUDA graph.", random, graph)
    kind = ExplorationType.DETERMINISTIC
    both = collected(groups, kind, 5)
    for first in (0, rows // 2):
        alone = collected(spinning(rows // 2, device=device), kind, 5 + first)
        ours = [batch[first : first + rows // 2] for batch in both]
        same("A group collected with another one differs from the same rows in one process.", ours, alone)
    check_thread(groups, policy, rows * steps, device)
    print("batches hold: actions replayed in one process; groups alone and in turn; a thread; a captured policy (CUDA)")


def same(problem: str, *batches: list[Any]) -> None:
    """Exit if two lists of batches differ."""
    for wanted, got in zip(*batches, strict=True):
        if not bool((wanted == got).all()):
            sys.exit(problem)


def check_thread(env: Any, policy: Any, frames: int, device: str) -> None:
    """Compare batches of a collector thread, one update old, with those of this thread; close the environments."""

    def change(update: int) -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1 if update % 2 else 1 / 1.1)

    batches: list[list[Any]] = []
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    for threaded in (False, True):
        policy.load_state_dict(weights)
        env.set_seed(3)
        torch.manual_seed(4)
        kind = ThreadedCollector if threaded else Collector
        collector = kind(env, policy, frames_per_batch=frames, device=device)
        found = [] if threaded else [collector.collect()]
        for update in range(4):
            found.append(collector.collect())
            change(update)
        batches.append([batch.exclude(("collector", "traj_ids")) for batch in found[:4]])
    collector.shutdown()
    same("A batch of the thread differs from the same batch of this one.", *batches)


def replay(batches: list[Any], rows: int) -> None:
    """Replay the collected actions in environments of this process, and compare all results."""
    env = spinning(rows)
    root = env.reset(seed=5)
    for batch in batches:
        for step in batch.unbind(1):
            if not torch.equal(root["observation"], step["observation"]):
                sys.exit("Observations of the workers differ from those of one process.")
            after = env.step(root.set("action", step["action"]))
            for key in ("observation", "reward", "terminated", "truncated"):
                if not torch.equal(after["next", key], step["next", key]):
                    sys.exit(f"{key} of a step in the workers differs from that in one process.")
            root = env.maybe_reset(env.carry(after))


def one_process(seconds: float = 3.0, count: int = 64) -> float:
    """Return frames per second of environments stepped in turn with random actions."""
    envs = [Spin(gym.make(ENV)) for _ in range(count)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
        env.action_space.seed(seed)
    frames, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        for env in envs:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        frames += count
    return frames / (time.perf_counter() - start)


def config_of(options: argparse.Namespace, variant: str, **changes: Any) -> PPOConfig:
    values: dict[str, Any] = {
        "env": ENV,
        "wrapper": (SPIN,),
        "device": options.device,
        "hidden_size": options.hidden,
        "num_envs": options.num_envs,
        "env_workers": options.workers,
        "rollout_steps": options.steps,
        "total_steps": 10**9,
        "shared_trunk": True,
        "env_groups": 1,
        "cuda_graph": False,
        "compile": False,
        **VARIANTS[variant],
        **changes,
    }
    return PPOConfig(**values)


def measure(variant: str, alone: float, name: str, options: argparse.Namespace) -> None:
    learner = PPO(config_of(options, variant))
    on_gpu = options.device == "cuda"

    def timed(run: Any) -> float:
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def update() -> None:
        learner.learn(learner.collect())

    batch: Any = None

    def collect() -> None:
        nonlocal batch
        batch = learner.collect()

    for _ in range(5):
        update()
    total = timed(lambda: [update() for _ in range(options.updates)])
    parts: dict[str, list[float]] = {"collect": [], "learn": []}
    for _ in range(3):
        parts["collect"].append(timed(collect))
        parts["learn"].append(timed(lambda: learner.learn(batch)))
    busy = gpu_seconds(lambda: [update() for _ in range(2)]) / 2 if on_gpu else 0.0
    learner.close()
    seconds = total / options.updates
    collect_s, learn_s = (statistics.median(times) for times in parts.values())
    show(variant, options.num_envs, alone, seconds, name, options, collect_s=collect_s, learn_s=learn_s, busy_s=busy)


def one_spinning() -> Spin:
    return Spin(gym.make(ENV))


def measure_sb3(alone: float, name: str, options: argparse.Namespace) -> None:
    """Time SB3-Contrib's RecurrentPPO, with one environment per worker, as each environment has a process."""
    recurrent_ppo = importlib.import_module("sb3_contrib").RecurrentPPO
    processes = importlib.import_module("stable_baselines3.common.vec_env").SubprocVecEnv
    frames = options.workers * options.steps
    model = recurrent_ppo(
        "MlpLstmPolicy", processes([one_spinning] * options.workers), n_steps=options.steps, batch_size=frames // 4,
        n_epochs=4, device=options.device,
        policy_kwargs={"lstm_hidden_size": options.hidden, "shared_lstm": True, "enable_critic_lstm": False},
    )  # fmt: skip
    model.learn(2 * frames)
    start = time.perf_counter()
    model.learn(options.updates * frames, reset_num_timesteps=False)
    seconds = (time.perf_counter() - start) / options.updates
    model.get_env().close()
    show(
        f"SB3-Contrib {importlib.import_module('sb3_contrib').__version__}",
        options.workers,
        alone,
        seconds,
        name,
        options,
    )


def show(
    variant: str,
    num_envs: int,
    alone: float,
    seconds: float,
    name: str,
    options: argparse.Namespace,
    *,
    collect_s: float | None = None,
    learn_s: float | None = None,
    busy_s: float = 0.0,
) -> None:
    """Write a row, and print it."""

    def ms(value: float | None) -> float | str:
        return "" if value is None else round(value * 1e3, 1)

    rate = num_envs * options.steps / seconds
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": name,
        "cores": os.cpu_count(),
        "recurl": __version__,
        "torch": torch.__version__,
        "variant": variant,
        "workers": options.workers,
        "num_envs": num_envs,
        "steps": options.steps,
        "hidden": options.hidden,
        "epochs_x_minibatches": "4 x 4",
        "one_process_frames_per_s": round(alone),
        "frames_per_s": round(rate),
        "ratio": round(rate / alone, 2),
        "update_ms": ms(seconds),
        "collect_ms": ms(collect_s),
        "learn_ms": ms(learn_s),
        "gpu_idle": round(1 - busy_s / seconds, 3) if busy_s else "",
    }
    append(options.csv, row)
    print(
        f"{variant:16s} {rate:9,.0f} frames/s, x {row['ratio']:5.2f}; update {row['update_ms']} ms, alone: collect "
        f"{row['collect_ms']}, learn {row['learn_ms']}; GPU idle {row['gpu_idle']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
