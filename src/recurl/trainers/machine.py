"""Choice of the options that a run leaves to recurl: the device, and what suits it.

Runs are compared by the seconds that they are expected to take. The costs below were measured on an H100 and on a core
of a server (``benchmarks/bench_choice.py``); they are right within a factor of two on others.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recurl.core.devices import core_count
from recurl.recurrence import CELLS, Sizes, load_cell
from recurl.trainers.env_name import is_name_only, source_of

if TYPE_CHECKING:
    from recurl.trainers.config import RunConfig

__all__ = ["Choice", "choose", "describe", "gpu_name"]

_MOST_ENVS = 4096
_UPDATES, _GRADIENT_STEPS = 150, 2400  # of a run, which limit the number of environments

_CPU_START, _GPU_START, _GPU_FIRST_START = 2.5, 6.5, 20.0  # seconds
_CPU_FLOPS, _GPU_FLOPS = 60e9, 80e12  # per second, in the products of a layer
_CPU_STEP, _GPU_STEP, _GPU_POLICY = 130e-6, 30e-6, 500e-6  # seconds of a step of all environments
_CPU_FRAME, _CPU_LEARNED = 4e-6, 1e-6  # seconds of an environment step, and of one in a gradient step
_GPU_GRADIENT_STEP, _GPU_UPDATE = 350e-6, 4.5e-3  # seconds, the second those of the host
_EXCHANGE, _EXCHANGE_EACH = 60e-6, 5e-6  # seconds of a step of worker processes, and of each
_WORKERS_START = 2.0  # seconds
_PIXEL = 1100  # weights of a linear layer that costs as much as convolutions do per pixel of an image
_WORTHWHILE = 0.8  # of the time, which a choice other than the simplest one has to reach
_MEASURED_S = 0.1


class Choice(NamedTuple):
    """What was chosen for a run.

    Attributes:
        values: the chosen options by name.
        seconds: expected seconds of the run, by device.
        tasks: whether the environments are tasks, which a GPU steps as tensors.
    """

    values: dict[str, Any]
    seconds: dict[str, float]
    tasks: bool


class _Host(NamedTuple):
    """Environments that step on the host.

    Attributes:
        seconds: seconds of a step of one environment.
        pixels: pixels of its images.
    """

    seconds: float
    pixels: int


def gpu_name() -> str | None:
    """Return the name of the GPU of this machine that a run would use, or None if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def choose(config: RunConfig) -> Choice:
    """Choose the device, the number of environments and the workers of a run, where its options leave them open.

    Args:
        config: the options, some of which are None or ``"auto"``.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> config = PPOConfig(env="recurl/TMaze-v0", device="cpu")
        >>> config.num_envs, config.env_workers, config.cuda_graph
        (8, 0, False)
    """
    settled = {name: value for name, value in type(config).settled().items() if _is_open(getattr(config, name))}
    values = {name: settled[name] for name in ("device", "num_envs", "env_workers", "env_groups") if name in settled}
    if config.device == "cpu" or not torch.cuda.is_available():
        return Choice(values, {}, tasks=False)
    gpu = "cuda" if config.device == "auto" else config.device
    tasks = _has_tasks(config)
    envs = values.get("num_envs", config.num_envs)
    on_gpu = {**values, "device": gpu} if "device" in values else dict(values)
    if tasks and "num_envs" in values:
        on_gpu["num_envs"] = _envs_on_gpu(config)
    if config.device != "auto":
        return Choice(on_gpu, {gpu: _gpu_seconds(config, on_gpu.get("num_envs", envs), None)} if tasks else {}, tasks)
    if not _can_choose(config):
        return Choice(values, {}, tasks)
    if tasks:
        seconds = {
            gpu: _gpu_seconds(config, on_gpu.get("num_envs", envs), None),
            "cpu": _cpu_seconds(config, envs, None),
        }
    else:
        host = _measure(config)
        if host is None:
            return Choice(values, {}, tasks)
        workers = _workers(config, envs, host) if "env_workers" in values else config.env_workers
        each = host._replace(seconds=_step_seconds(envs, workers, host) / envs)
        more = _WORKERS_START if workers else 0.0
        seconds = {gpu: _gpu_seconds(config, envs, each) + more, "cpu": _cpu_seconds(config, envs, each) + more}
        if workers:
            values["env_workers"] = on_gpu["env_workers"] = workers
            if "env_groups" in values and envs % (2 * workers) == 0 and each.seconds * envs > _GPU_POLICY / 2:
                on_gpu["env_groups"] = 2
    best = gpu if seconds[gpu] < _WORTHWHILE * seconds["cpu"] else "cpu"
    return Choice(on_gpu if best == gpu else values, seconds, tasks)


def _is_open(value: Any) -> bool:
    return value is None or value == "auto"


def _can_choose(config: RunConfig) -> bool:
    """Return whether a GPU would run the algorithm as it runs recurl's, in one process, with what is measured."""
    alone = not config.actors and not getattr(config, "overlap", False) and _ranks() == 1
    return alone and foreign_part(config) is None


def foreign_part(config: RunConfig) -> str | None:
    """Return what a run lacks to be captured and compiled without being asked for: parts known to allow it."""
    if not type(config).__module__.startswith("recurl."):
        return "an algorithm of recurl's, unless it is asked for"
    if config.cell != "none" and type(load_cell(config.cell)) not in map(type, CELLS.values()):
        return "a built-in cell, unless it is asked for"
    return None


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _has_tasks(config: RunConfig) -> bool:
    """Return whether a GPU can step the environments as tensors."""
    source = source_of(config.env)
    if source is not None or is_name_only(config.env):
        return getattr(source, "tensor_env", None) is not None
    if config.vectorization not in ("auto", "device") or config.host_only or config.actors:
        return False
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
    """Measure a step of the environment, with random actions; None if it can't be created."""
    from recurl.envs.gym_vector import make  # noqa: PLC0415 - as above
    from recurl.envs.gym_wrappers import NamedWrapper  # noqa: PLC0415 - as above

    if source_of(config.env) is not None or is_name_only(config.env):
        return None
    wrappers = [NamedWrapper(text) for text in config.wrapper]
    with suppress(Exception), closing(make(config.env_name, wrappers, **config.env_arguments)) as env:
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
    """Return the number of worker processes that step the environments fastest; 0 for none."""
    if config.vectorization != "auto":
        return 0
    counts = [count for count in range(2, min(core_count(), num_envs) + 1) if num_envs % count == 0]
    best = min(counts, key=lambda count: _step_seconds(num_envs, count, host), default=0)
    rounds = config.total_steps / num_envs
    alone = rounds * _step_seconds(num_envs, 0, host)
    shared = rounds * _step_seconds(num_envs, best, host) + _WORKERS_START
    return best if shared < _WORTHWHILE * alone else 0


def _step_seconds(num_envs: int, workers: int, host: _Host) -> float:
    """Return the seconds of a step of all environments."""
    if not workers:
        return num_envs * host.seconds
    return num_envs / workers * host.seconds + _EXCHANGE + workers * _EXCHANGE_EACH


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
    extra = (config.encoder_layers - 1) * width**2 + config.head_width * hidden
    if config.cell == "none":
        return extra + 4 * hidden * (width + hidden), 0
    weights, states = _layer(config, width)
    more_weights, more_states = _layer(config, hidden)
    others = config.num_layers - 1
    return extra + weights + others * more_weights, states + others * more_states


def _layer(config: RunConfig, inputs: int) -> tuple[int, int]:
    cell, sizes = load_cell(config.cell), Sizes(inputs, config.hidden_size)
    weights, states = cell.parameters(sizes).values(), cell.state_shapes(sizes)
    return sum(map(math.prod, weights)), sum(map(math.prod, states))


def _cpu_seconds(config: RunConfig, num_envs: int, host: _Host | None) -> float:
    frames, weights = num_envs * config.rollout_steps, _weights(config, host)
    product = weights / _CPU_FLOPS
    collect = config.rollout_steps * _CPU_STEP + frames * (_CPU_FRAME + 2 * product + (host.seconds if host else 0))
    learn = config.work(frames).steps * (_CPU_LEARNED + 6 * product)
    return _CPU_START + config.total_steps / _ranks() / frames * (collect + learn)


def _gpu_seconds(config: RunConfig, num_envs: int, host: _Host | None) -> float:
    frames, weights = num_envs * config.rollout_steps, _weights(config, host)
    product = weights / _GPU_FLOPS
    step = _GPU_STEP if host is None else _GPU_POLICY + num_envs * host.seconds
    work = config.work(frames)
    learn = work.gradient_steps * _GPU_GRADIENT_STEP + work.steps * 6 * product
    update = max(config.rollout_steps * step + frames * 2 * product + learn, _GPU_UPDATE)
    return _GPU_START + config.total_steps / _ranks() / frames * update


def describe(config: RunConfig) -> str | None:
    """Describe in a line what was chosen for a run and why; None if this machine leaves no choice.

    Args:
        config: the options.
    """
    choice = config.choice
    if choice is None or (choice.tasks is False and not choice.seconds and config.device == "cpu"):
        return None
    where = "the CPU" if config.device == "cpu" else f"the GPU ({torch.cuda.get_device_name(config.device)})"
    parts = [f"{config.num_envs:,} environments"]
    if config.env_workers:
        groups = f" in {config.env_groups} groups" if config.env_groups > 1 else ""
        parts[0] += f" in {config.env_workers} worker processes{groups}"
    if config.device != "cpu":
        parts[0] += " as tensors" if choice.tasks else " on the host"
        parts += _programs(config)
    return f"On {where}: {', '.join(parts)}{_reason(choice.seconds, config.device)}."


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
    return {"cuda_graph": graph, "compile": config.compile_obstacle or graph}


def _reason(seconds: dict[str, float], device: str) -> str:
    if not seconds:
        return ""
    text = f"; expected to take {_time(seconds[device])}"
    if device != "cpu":
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
