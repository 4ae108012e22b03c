"""Tasks on a GPU compared with the host, and their environments in a mode that forbids waiting for the GPU.

For every task: each step of 100 random episodes, from the host's state, compared in roundings of float32 (4 are
allowed); random play and a recurrent policy for some hundred steps under
``torch.cuda.set_sync_debug_mode("error")``; bitwise equal steps after restoring a saved state. Then the time of a step
of random play, launched individually and in a CUDA graph. Usage::

    python benchmarks/check_tasks_gpu.py                    # a minute
    python benchmarks/check_tasks_gpu.py --popgym           # the 48 tasks of POPGym instead
    python benchmarks/check_tasks_gpu.py --device cpu       # without the mode, to try the script
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from gymnasium.spaces import MultiDiscrete
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector
from recurl.envs import EnvBase, InitTracker, RewardSum, StepCounter, TensorEnv, interact
from recurl.envs.tasks import (
    Bandit,
    ColorCubes,
    Dynamics,
    EndlessTMaze,
    MaskedCartPole,
    MaskedPendulum,
    RepeatPrevious,
    RockSample,
    TMaze,
    check_dynamics,
)
from recurl.envs.tasks.popgym import POPGYM_TASKS
from recurl.execution.lowering import Entries
from recurl.execution.readback import refuse_read_back
from recurl.modules import GRUModule

TASKS: dict[str, Callable[[], Dynamics]] = {
    task.__name__: task
    for task in (
        *(Bandit, ColorCubes, EndlessTMaze, MaskedCartPole, MaskedPendulum, RepeatPrevious, RockSample, TMaze),
    )
}


def main() -> None:
    """Check every task and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--popgym", action="store_true")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    print(f"torch {torch.__version__}, {device}, {options.rows} rows")
    columns = (
        f"{'roundings':>9s} {'random play':>12s} {'policy':>8s} {'resumed':>8s} {'us/step':>8s} {'in a graph':>10s}"
    )
    print(f"{'task':31s} {columns}")
    failed = False
    for name, task in (POPGYM_TASKS if options.popgym else TASKS).items():
        roundings = check_dynamics(task(), device=options.device, episodes=options.episodes)
        played = [outcome(lambda with_policy=kind, task=task: play(task(), options, with_policy)) for kind in (0, 1)]
        resumed = outcome(lambda task=task: resume(task(), options))
        row = (*played, resumed)
        failed |= any(text != "ok" for text in row)
        outcomes = f"{row[0]:>12s} {row[1]:>8s} {row[2]:>8s}"
        times = f"{speed(task(), options):8.1f} {captured_speed(task(), options):10.1f}"
        print(f"{name:31s} {roundings:9.2f} {outcomes} {times}", flush=True)
    sys.exit(int(failed))


def outcome(check: Callable[[], None]) -> str:
    """Return the outcome, ``ok`` or the error, which is printed with its traceback."""
    try:
        check()
    except Exception:  # noqa: BLE001 - the table continues after any error
        traceback.print_exc(limit=-6)
        return "FAILED"
    return "ok"


@contextmanager
def never_waiting(device: str) -> Generator[None]:
    """Raise on any operation that waits for the device."""
    if not device.startswith("cuda"):
        with refuse_read_back():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(task: Dynamics, options: argparse.Namespace, policy: nn.Module | None = None) -> EnvBase:
    """Return the environment with the usual transforms."""
    env: EnvBase = TensorEnv(task, options.rows, device=options.device, categorical_action_encoding=True, policy=policy)
    for transform in (InitTracker(), StepCounter(), RewardSum()):
        env = env.append_transform(transform)
    return env


def memory_and_greedy_head(task: Dynamics, device: str) -> TensorDictSequential:
    """Return a deterministic recurrent policy."""
    inputs = task.observation_space.shape[0]
    memory = GRUModule(inputs, 64, in_key="observation", out_key="memory", python_based=True, device=device)
    space = task.action_space
    counts = space.nvec.tolist() if isinstance(space, MultiDiscrete) else [int(getattr(space, "n", 1))]
    head = nn.Linear(64, sum(counts), device=device)

    def acting(x: torch.Tensor) -> torch.Tensor:
        parts = [part.argmax(-1) for part in head(x).split(counts, -1)]
        if isinstance(space, MultiDiscrete):
            return torch.stack(parts, -1)
        return parts[0] if counts[0] > 1 else head(x)

    numbers = TensorDictModule(lambda x: x.float(), ["observation"], ["observation"])
    return TensorDictSequential(numbers, memory, TensorDictModule(acting, ["memory"], ["action"]))


def play(task: Dynamics, options: argparse.Namespace, with_policy: int) -> None:
    """Step on TensorDicts and on plain entries, and require that rows end and restart."""
    policy: Any = memory_and_greedy_head(task, options.device) if with_policy else None
    env = make(task, options, policy)
    env.set_seed(0)
    for entries in (False, True):
        root = env.reset()
        start: Any = Entries.of(root) if entries and policy is None else root
        start, done = interact(env, policy, start, 3, write=lambda *_: None), []  # constants, kernels
        with never_waiting(options.device):
            steps = max(options.steps, task.step_limit + 1)
            interact(env, policy, start, steps, write=lambda _, td, done=done: done.append(td["next"]["done"]))
        if not torch.stack(done).any():
            raise AssertionError("no episode ended")


def resume(task: Dynamics, options: argparse.Namespace) -> None:
    """Require the same steps after restoring a saved state."""
    env, outcomes = make(task, options), []
    last = env.rollout(20, break_when_any_done=False)[:, -1]
    root, state = env.maybe_reset(env.carry(last)), env.get_state()
    actions = [env.rand_action(TensorDict({}, env.batch_size, device=options.device)) for _ in range(50)]
    for _ in range(2):
        env.set_state(state)
        td, seen = root.clone(), []
        for action in actions:
            td = env.step(td.set("action", action["action"]))
            seen.append(td["next"].clone())
            td = env.maybe_reset(env.carry(td))
        outcomes.append(torch.stack(seen))
    if not (outcomes[0] == outcomes[1]).all():
        raise AssertionError("the resumed steps differ")


def speed(task: Dynamics, options: argparse.Namespace) -> float:
    """Return the microseconds of a step of random play."""
    env = TensorEnv(task, options.rows, device=options.device, categorical_action_encoding=True)
    root: Any = interact(env, None, Entries.of(env.reset()), 20, write=lambda *_: None)
    wait = torch.cuda.synchronize if options.device.startswith("cuda") else nullcontext
    wait()
    start = time.perf_counter()
    interact(env, None, root, options.steps, write=lambda *_: None)
    wait()
    return (time.perf_counter() - start) / options.steps * 1e6


def captured_speed(task: Dynamics, options: argparse.Namespace) -> float:
    """Return the microseconds of a step of random play in a CUDA graph; NaN without a GPU."""
    if not options.device.startswith("cuda"):
        return float("nan")
    env = TensorEnv(task, options.rows, device=options.device, categorical_action_encoding=True)
    steps, batches = 64, 4
    frames = options.rows * steps
    collector = Collector(env, None, frames_per_batch=frames, device=options.device, cuda_graph=True)
    for _ in range(4):  # kernels are compiled and captured
        collector.collect()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(batches):
        collector.collect()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (steps * batches) * 1e6


if __name__ == "__main__":
    main()
