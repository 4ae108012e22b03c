"""Ray actors that collect for a run."""

from __future__ import annotations

from functools import partial

from tensordict.nn import TensorDictModuleBase

from recurl.collectors import RayCollector
from recurl.trainers.algorithms.environment import training_env
from recurl.trainers.config import RunConfig


def actors_of(config: RunConfig, policy: TensorDictModuleBase, seed: int) -> RayCollector:
    """Create the collector of a run with ``--collectors``, whose actors share the environments on the CPU.

    Args:
        config: the options.
        policy: the policy to collect with.
        seed: seed of the first environment.

    Raises:
        ArgumentError: if no Ray cluster responds at the address, or it has too few CPUs.
        MissingDependencyError: if Ray is not installed.
        WorkerError: if an actor doesn't start.
    """
    collector = RayCollector(
        partial(training_env, config.on_cpu(), config.num_envs // config.actors),
        policy,
        num_collectors=config.actors,
        frames_per_batch=config.frames_per_batch,
        max_lag=config.lag,
        cat_results=0,
        epsilons=config.epsilons,
        address=config.ray_address,
        storing_device=config.device,
    )
    collector.set_seed(seed)
    return collector
