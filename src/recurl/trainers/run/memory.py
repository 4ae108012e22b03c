"""Estimate of how many environments fit into GPU memory, for out-of-memory errors."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from recurl.core.errors import ArgumentError
from recurl.distributed import world_size
from recurl.trainers.algorithms.configs import OnPolicyConfig
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.config import RunConfig

__all__ = ["environments_that_fit", "out_of_memory_advice"]

_SHARE = 0.9  # usable share of the memory; the rest is for the allocator and the driver
_DIVISORS = (64, 32, 16, 8)


@contextmanager
def out_of_memory_advice(config: RunConfig) -> Generator[None]:
    """Context manager that turns out-of-memory errors into advice on how many environments fit.

    Raises:
        ArgumentError: if the device is out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the tensors that fill the memory
        fits = environments_that_fit(config)
        advice = "" if fits is None else f"; about {fits:,} environments fit"
        raise ArgumentError(
            f"{config.device} is out of memory with {config.num_envs:,} environments and {config.rollout_steps:,} "
            f"steps of each{advice}: lower --num-envs, --rollout-steps or --hidden-size. "
            f"({str(error).partition('. ')[0]}.)"
        ) from error


def environments_that_fit(
    config: RunConfig, peak: Callable[[RunConfig], int] | None = None, memory: int | None = None
) -> int | None:
    """Estimate how many environments fit into the device's memory, by extrapolating from updates with a few.

    Args:
        config: the options of the run.
        peak: returns the bytes that an update with given options needs; measured by default.
        memory: bytes of the device; by default those not used by other programs.

    Returns:
        The number of environments, or None if it can't be estimated: with a replay buffer, whose size doesn't depend
        on them; if not even a few environments fit; on the CPU, where memory isn't tracked; and with several ranks, as
        an update involves all of them.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> config = PPOConfig(env="recurl/TMaze-v0", num_envs=4096, total_steps=10**7)
        >>> environments_that_fit(config, lambda config: 2**20 * (100 + config.num_envs), 2**30)
        820
    """
    small = _small_run(config)
    if small is None or world_size() > 1 or (peak is None and not config.device.startswith("cuda")):
        return None
    measure = peak or _peak
    try:
        one, two = measure(small), measure(replace(small, num_envs=2 * small.num_envs))
    except torch.OutOfMemoryError:
        return None
    each = (two - one) / small.num_envs
    room = _SHARE * (memory or _memory(config.device)) - (one - each * small.num_envs)
    return _rounded(room / each) if 0 < each < room else None


def _memory(device: str) -> int:
    """Return the bytes available to this process, including those it already uses."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _small_run(config: RunConfig) -> OnPolicyConfig | None:
    """Return the same run with few environments, without compilation or CUDA graphs, which don't need more memory."""
    if isinstance(config, OnPolicyConfig):
        for part in _DIVISORS:
            try:
                return replace(config, num_envs=config.num_envs // part, cuda_graph=False, compile=False)
            except ArgumentError:  # fewer sequences than minibatches, for instance
                continue
    return None


def _peak(config: RunConfig) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device)
    with closing(make_algorithm(config)) as learner:
        for _ in range(2):
            learner.learn(learner.collect())
        return torch.cuda.max_memory_allocated(config.device) - before


def _rounded(count: float) -> int:
    """Round down to two significant digits."""
    digit = 10 ** max(len(str(int(count))) - 2, 0)
    return int(count) // digit * digit
