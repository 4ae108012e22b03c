"""Choice of the options that a run leaves to recurl: the device, and what suits it.

Runs are compared by the seconds that they are expected to take. The costs below were measured on an H100 and on a core
of its host (``benchmarks/bench_defaults.py``); there, runs on the chosen device took 0.8 to 1.5 times as long as
expected, and on the other one up to 6 times.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from copy import copy
from typing import Any, NamedTuple

import torch

from recurl.core.devices import core_count
from recurl.core.errors import MissingDependencyError, UnsupportedError
from recurl.core.seeding import preserved_rng
from recurl.recurrence import BACKENDS, CELLS, Sizes, load_cell
from recurl.trainers.config import ALGORITHM_OBSTACLE, NO_CELL, Choice, RunConfig
from recurl.trainers.env_name import is_jax, is_multi_agent, is_name_only, source_of

__all__ = ["best_workers", "choose", "describe", "program_obstacles", "step_seconds", "weights_and_states"]

_MOST_ENVS = 4096
_UPDATES, _GRADIENT_STEPS = 150, 2400  # of a run, which limit the number of environments

_CPU_START, _GPU_START, _GPU_FIRST_START = 2.5, 9.0, 23.0  # seconds until all is compiled and captured
_CPU_FLOPS, _GPU_FLOPS = 40e9, 80e12  # per second, in the products of a layer
_CPU_STEP, _GPU_STEP, _GPU_POLICY = 200e-6, 30e-6, 500e-6  # seconds of a step of all environments
_CPU_UPDATE = 4.5e-3  # seconds of an update besides
_CPU_FRAME, _CPU_LEARNED = 6e-6, 2e-6  # seconds of an environment step, and of one in a gradient step
_GPU_GRADIENT_STEP, _GPU_UPDATE = 350e-6, 6.5e-3  # seconds, the second those of the host
_EAGER_STEP, _EAGER_GRADIENT_STEP = 2.7e-3, 6e-3  # seconds on a GPU, where nothing is captured
_WITHOUT_LIBRARY = 4  # times slower on a CPU
_EXCHANGE, _EXCHANGE_EACH = 60e-6, 5e-6  # seconds of a step of worker processes, and of each
_WORKERS_START = 2.0  # seconds
_PIXEL = 1100  # weights of a linear layer that costs as much as convolutions do per pixel of an image
_WORTHWHILE = 0.8  # of the time, which a choice other than the simplest one has to reach
_MEASURED_S = 0.1


class _Host(NamedTuple):
    """Environments that step on the host.

    Attributes:
        seconds: seconds of a step of one environment.
        pixels: pixels of its images.
    """

    seconds: float
    pixels: int


def choose(config: RunConfig, on_cpu: dict[str, Any]) -> Choice:
    """Choose the device, the number of environments and the workers of a run, where its options leave them open.

    Args:
        config: the options, some of which are None or ``"auto"``.
        on_cpu: values of these on a CPU.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> config = PPOConfig(env="recurl/TMaze-v0", device="cpu")
        >>> config.num_envs, config.env_workers, config.cuda_graph
        (8, 0, False)
    """
    if not on_cpu:
        return Choice({}, {}, tasks=None)
    if not (config.device == "auto" or config.device.startswith("cuda")) or not torch.cuda.is_available():
        return Choice(on_cpu, {}, tasks=False)
    tasks = _has_tasks(config)
    on_gpu = {**on_cpu, **({"device": "cuda"} if "device" in on_cpu else {})}
    if tasks and "num_envs" in on_cpu:
        on_gpu["num_envs"] = _envs_on_gpu(config)
    if config.device != "auto" or getattr(config, "cuda_graph", None):
        return Choice(on_gpu, _expected(config, [on_gpu], None) if tasks else {}, tasks)
    obstacle = _obstacle(config, tasks)
    if obstacle is not None:
        return Choice(on_cpu, {}, tasks, obstacle)
    host = None if tasks else _measure(config)
    if host is None and not tasks:  # an error of its creation is raised, and explained, where it is created for the run
        return Choice(on_cpu, {}, tasks, "an environment that takes random actions, unless it is asked for")
    if host is not None and "env_workers" in on_cpu and (config.env_groups or 1) == 1:  # more need --env-workers
        envs = on_cpu.get("num_envs", config.num_envs)
        workers = on_cpu["env_workers"] = on_gpu["env_workers"] = _workers(config, envs, host)
        slow = step_seconds(envs, workers, host.seconds) > _GPU_POLICY / 2
        if workers and "env_groups" in on_cpu and envs % (2 * workers) == 0 and slow:
            on_gpu["env_groups"] = 2
    seconds = _expected(config, [on_gpu, on_cpu], host)
    best = on_gpu if seconds["cuda"] < _WORTHWHILE * seconds["cpu"] else on_cpu
    return Choice(best, seconds, tasks)


def _expected(config: RunConfig, choices: list[dict[str, Any]], host: _Host | None) -> dict[str, float]:
    """Return the expected seconds of a run by device, for each of these values of its options."""
    seconds: dict[str, float] = {}
    for values in choices:
        tried: Any = copy(config)
        for name, value in values.items():
            object.__setattr__(tried, name, value)
        seconds[tried.device] = (_cpu_seconds if tried.device == "cpu" else _gpu_seconds)(tried, host)
    return seconds


def _obstacle(config: RunConfig, tasks: bool | None) -> str | None:
    """Return what a run lacks for the costs below to hold and to find a GPU, or None if nothing."""
    if config.actors or getattr(config, "overlap", False):
        return "a single process, unless it is asked for"
    if source_of(config.env) is not None or is_name_only(config.env):
        return "an environment with an id, unless it is asked for"
    if is_multi_agent(config.env):
        return "an environment of one agent, unless it is asked for"
    if is_jax(config.env) and not _jax_has_gpu():
        return "JAX with support for GPUs"
    if _ranks() > 1 and not tasks:
        return "a single rank or a task, unless it is asked for"
    if _ranks() > 1 and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "one for each rank"
    if config.cell != NO_CELL and BACKENDS.device_of(config.backend) not in (None, "cuda"):
        return f"another backend than {config.backend}"
    return foreign_part(config) or _looping_cell(config)


def _jax_has_gpu() -> bool:
    from recurl.envs.jax_protocols import jax_device  # noqa: PLC0415 - imports environments

    with suppress(MissingDependencyError, UnsupportedError):
        return jax_device(torch.device("cuda")) is not None
    return False


def foreign_part(config: RunConfig) -> str | None:
    """Return what a run lacks to be captured without being asked for: parts known to allow it."""
    if not type(config).__module__.startswith("recurl."):
        return ALGORITHM_OBSTACLE
    if not has_built_in_cell(config):
        return "a built-in cell, unless it is asked for"
    return None


def _looping_cell(config: RunConfig) -> str | None:
    """Return what a run lacks to be compiled without being asked for: a cell with passes over whole sequences."""
    cell = None if config.cell == NO_CELL else load_cell(config.cell)
    if cell is not None and not (cell.takes_time or cell.derivatives):
        return f"a cell other than {config.cell}, which loops over single steps, unless it is asked for"
    return None


def has_built_in_cell(config: RunConfig) -> bool:
    """Return whether the cell of a run, if any, is one of recurl's."""
    return config.cell == NO_CELL or type(load_cell(config.cell)) in map(type, CELLS.values())


def _ranks() -> int:
    from recurl.distributed import is_launched  # noqa: PLC0415 - imports what a run on a CPU doesn't need

    size = os.environ.get("WORLD_SIZE", "")
    return max(int(size), 1) if is_launched() and size.isdecimal() else 1


def _has_tasks(config: RunConfig) -> bool | None:
    """Return whether a GPU can step the environments as tensors; None if only creating them shows it."""
    if is_jax(config.env):
        return not config.actors
    if config.vectorization not in ("auto", "device") or config.host_only or config.actors:
        return False
    if is_multi_agent(config.env):
        return False
    if source_of(config.env) is not None or is_name_only(config.env):
        return None
    from recurl.envs.tensor_env import dynamics_of  # noqa: PLC0415 - imports environments

    with suppress(Exception):  # errors are raised, and explained, where the environment is created
        return dynamics_of(config.env_name, **config.env_arguments) is not None
    return False


def _envs_on_gpu(config: RunConfig) -> int:
    """Return a power of two that leaves a run its updates and gradient steps."""
    usual = type(config).usual_envs
    if not config.more_envs_on_gpu:
        return usual
    updates = max(_UPDATES, _GRADIENT_STEPS // config.work(0).gradient_steps)
    most = min(config.total_steps // _ranks() // updates // config.rollout_steps, _MOST_ENVS)
    return max(usual, 2 ** int(math.log2(max(most, 1))))


def _measure(config: RunConfig) -> _Host | None:
    """Measure a step of the environment, with random actions; None if it can't be created, or refuses them."""
    from recurl.envs.gym_vector import make  # noqa: PLC0415 - as above
    from recurl.envs.gym_wrappers import NamedWrapper  # noqa: PLC0415 - as above

    with preserved_rng(), suppress(Exception), ExitStack() as stack:
        wrappers = [NamedWrapper(text) for text in config.wrapper]
        env = stack.enter_context(closing(make(config.env_name, wrappers, **config.env_arguments)))
        env.reset(seed=0)
        begin, steps = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < _MEASURED_S:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            steps += 1
            if terminated or truncated:
                env.reset()
        return _Host(spent / steps, 0 if config.encoder == "mlp" else _pixels(env.observation_space))
    return None


def _pixels(space: Any) -> int:
    """Return the number of pixels of the images in an observation space."""
    inner = getattr(space, "spaces", ())
    if inner:
        return sum(map(_pixels, inner.values() if isinstance(inner, Mapping) else inner))
    shape = getattr(space, "shape", None) or ()
    is_image = getattr(space, "dtype", None) == "uint8" and len(shape) > 1
    return math.prod(sorted(shape)[-2:]) if is_image else 0


def _workers(config: RunConfig, num_envs: int, host: _Host) -> int:
    """Return the number of worker processes with which a run ends first; 0 for none."""
    if config.vectorization != "auto":
        return 0
    best = best_workers(num_envs, host.seconds)
    saved = step_seconds(num_envs, 0, host.seconds) - step_seconds(num_envs, best, host.seconds)
    rounds = config.total_steps / num_envs
    return best if rounds * saved > 2 * _WORKERS_START else 0


def best_workers(num_envs: int, seconds: float) -> int:
    """Return the number of worker processes that step environments fastest on this machine; 0 for none.

    Args:
        num_envs: number of environments.
        seconds: seconds of a step of one of them.

    Example:
        >>> best_workers(8, 1e-6)
        0
    """
    counts = [count for count in range(2, min(core_count(), num_envs) + 1) if num_envs % count == 0]
    best = min(counts, key=lambda count: step_seconds(num_envs, count, seconds), default=0)
    alone = step_seconds(num_envs, 0, seconds)
    return best if step_seconds(num_envs, best, seconds) < _WORTHWHILE * alone else 0


def step_seconds(num_envs: int, workers: int, seconds: float) -> float:
    """Estimate the seconds of a step of all environments, in this process or in workers; see :func:`best_workers`.

    Example:
        >>> step_seconds(8, 0, 1e-3), round(step_seconds(8, 4, 1e-3), 5)
        (0.008, 0.00208)
    """
    if not workers:
        return num_envs * seconds
    return num_envs / workers * seconds + _EXCHANGE + workers * _EXCHANGE_EACH


def _weights(config: RunConfig, host: _Host | None) -> float:
    return weights_and_states(config)[0] + (host.pixels * _PIXEL if host else 0)


def weights_and_states(config: RunConfig) -> tuple[int, int]:
    """Return lower bounds on the number of weights, and the number of recurrent state entries per row.

    Args:
        config: the options.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> weights_and_states(PPOConfig(env="recurl/TMaze-v0", hidden_size=128))
        (132096, 256)
    """
    hidden, width = config.hidden_size, config.encoder_width or config.hidden_size
    extra = (config.encoder_layers - 1) * width**2 + config.head_width * (
        hidden + (config.head_layers - 1) * config.head_width
    )
    if config.cell == NO_CELL:
        return extra + 4 * hidden * (width + hidden), 0
    weights, states = _layer(config, width)
    more_weights, more_states = _layer(config, hidden)
    others = config.num_layers - 1
    return extra + weights + others * more_weights, states + others * more_states


def _layer(config: RunConfig, inputs: int) -> tuple[int, int]:
    cell, sizes = load_cell(config.cell), Sizes(inputs, config.hidden_size)
    weights, states = cell.parameters(sizes).values(), cell.state_shapes(sizes)
    return sum(map(math.prod, weights)), sum(map(math.prod, states))


def _cpu_seconds(config: RunConfig, host: _Host | None) -> float:
    frames, product = config.frames_per_batch, _weights(config, host) / _CPU_FLOPS
    step = _CPU_STEP + _host_seconds(config, host)
    collect = config.rollout_steps * step + frames * (_CPU_FRAME + 2 * product)
    learn = config.work(frames).steps * (_CPU_LEARNED + 6 * product)
    update = _CPU_UPDATE + collect + learn
    try:
        BACKENDS.check_name("cpu")
        if config.cell != NO_CELL:
            BACKENDS.check_cell("cpu", load_cell(config.cell))
    except UnsupportedError:
        update *= _WITHOUT_LIBRARY
    return _CPU_START + _updates(config) * update


def _gpu_seconds(config: RunConfig, host: _Host | None) -> float:
    frames, product = config.frames_per_batch, _weights(config, host) / _GPU_FLOPS
    captured = getattr(config, "cuda_graph", False) is not False and program_obstacles(config)["cuda_graph"] is None
    step, gradient_step = (_GPU_STEP, _GPU_GRADIENT_STEP) if captured else (_EAGER_STEP, _EAGER_GRADIENT_STEP)
    if host is not None:
        step = max(step, _GPU_POLICY) + _host_seconds(config, host)
    work = config.work(frames)
    learn = work.gradient_steps * gradient_step + work.steps * 6 * product
    update = max(config.rollout_steps * step + frames * 2 * product + learn, _GPU_UPDATE)
    return _GPU_START + _updates(config) * update


def _updates(config: RunConfig) -> float:
    return config.total_steps / _ranks() / config.frames_per_batch


def _host_seconds(config: RunConfig, host: _Host | None) -> float:
    return 0.0 if host is None else step_seconds(config.num_envs, config.env_workers, host.seconds)


def describe(config: RunConfig) -> str | None:
    """Describe in a line what was chosen for a run and why; None if this machine leaves no choice.

    Args:
        config: the options.
    """
    choice = config.choice
    if choice is None:
        return None
    if config.device == "cpu" and not choice.seconds and (not choice.obstacle or not torch.cuda.is_available()):
        return None
    where = "the CPU" if config.device == "cpu" else f"the GPU ({torch.cuda.get_device_name(config.device)})"
    parts = [f"{config.num_envs:,} environments"]
    if config.env_workers:
        groups = f" in {config.env_groups} groups" if config.env_groups > 1 else ""
        parts[0] += f" in {config.env_workers} worker processes{groups}"
    if config.device != "cpu":
        parts[0] += {True: " as tensors", False: " on the host", None: ""}[choice.tasks]
        parts += _programs(config)
    elif choice.obstacle is not None:
        parts.append(f"not on a GPU, which needs {choice.obstacle} (--device cuda)")
    first = getattr(config, "compile", False)
    return f"On {where}: {', '.join(parts)}{_reason(choice.seconds, config.device, compiled=first)}."


def _programs(config: RunConfig) -> list[str]:
    words = {"cuda_graph": "captured", "compile": "compiled"}
    on = [word for name, word in words.items() if getattr(config, name, False)]
    off: dict[str, list[str]] = {}
    for name, obstacle in program_obstacles(config).items():
        if not getattr(config, name, False) and obstacle is not None:
            off.setdefault(obstacle, []).append(words[name])
    reasons = [f"not {' or '.join(names)}, which needs {obstacle}" for obstacle, names in off.items()]
    return [*([" and ".join(on)] if on else []), *reasons]


def program_obstacles(config: RunConfig) -> dict[str, str | None]:
    """Return what a run lacks to be captured and compiled without being asked for, or None, by option.

    Without minibatches of equal size, each of them would be compiled.
    """
    graph = config.graph_obstacle or foreign_part(config)
    return {"cuda_graph": graph, "compile": config.compile_obstacle or graph or _looping_cell(config)}


def _reason(seconds: dict[str, float], device: str, *, compiled: bool) -> str:
    if not seconds:
        return ""
    text = f"; expected to take {_time(seconds[device])}"
    if compiled:
        text += f" ({_GPU_FIRST_START - _GPU_START:.0f} s more the first time, to compile)"
    other = next((name for name in seconds if name != device), None)
    if other is not None:
        text += f", against {_time(seconds[other])} on the {'CPU' if other == 'cpu' else 'GPU'} (--device {other})"
    return text


def _time(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> [_time(seconds) for seconds in (7.2, 200, 40_000)]
        ['7 s', '3 min', '11 h']
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
