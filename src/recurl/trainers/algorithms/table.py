"""Registry of the algorithms, used by the command line, ``config.json`` and the documentation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from recurl.core.errors import ArgumentError
from recurl.envs import EnvBase
from recurl.trainers.algorithms.a2c import A2C
from recurl.trainers.algorithms.configs import CONFIGS, PPOConfig
from recurl.trainers.algorithms.distill import Distill
from recurl.trainers.algorithms.dqn import DQN
from recurl.trainers.algorithms.footprint import check_machine
from recurl.trainers.algorithms.impala import Impala
from recurl.trainers.algorithms.learner import Learner
from recurl.trainers.algorithms.ppo import PPO
from recurl.trainers.algorithms.sac import SAC
from recurl.trainers.algorithms.td3 import TD3
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.agent import Agent


class Algorithm(NamedTuple):
    """An algorithm: its option dataclass and its learner class."""

    config: type[RunConfig]
    learner: type[Learner[Any, Any]]


_LEARNERS: dict[str, type[Learner[Any, Any]]] = {
    "ppo": PPO,
    "dqn": DQN,
    "r2d2": DQN,
    "a2c": A2C,
    "impala": Impala,
    "sac": SAC,
    "td3": TD3,
    "distill": Distill,
}
ALGORITHMS: dict[str, Algorithm] = {name: Algorithm(config, _LEARNERS[name]) for name, config in CONFIGS.items()}
"""Registered algorithms by name; :func:`register` adds one."""

_BUILT_IN = frozenset(ALGORITHMS)


def register(config: type[RunConfig], learner: type[Learner[Any, Any]]) -> None:
    """Register an algorithm, which can then be trained, resumed, evaluated and exported like the built-in ones.

    ``recurl train module:name`` imports the module first, so the module can call this function.

    Args:
        config: its options, a frozen dataclass with keyword-only arguments; ``config.algorithm`` is the name.
        learner: the learner class.

    Raises:
        ArgumentError: if ``config`` has no name, or the name of a built-in algorithm.
    """
    name = getattr(config, "algorithm", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"{config.__name__}.algorithm must be a name such as 'ppo', got {name!r}.")
    if name in _BUILT_IN:
        raise ArgumentError(f"{config.__name__}.algorithm must not be the name of a built-in algorithm, got {name!r}.")
    ALGORITHMS[name] = Algorithm(config, learner)


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm registered as ``name``; ``module:name`` imports the module that registers it.

    Raises:
        ArgumentError: if there is no such algorithm, or the module can't be imported.

    Example:
        >>> find_algorithm("r2d2").config.__name__
        'R2D2Config'
        >>> find_algorithm("r2d3")
        Traceback (most recent call last):
        ...
        recurl.core.errors.ArgumentError: There is no algorithm 'r2d3': did you mean r2d2? There are ppo, dqn, r2d2...
    """
    module, colon, registered = name.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except (ImportError, SyntaxError, TypeError, ValueError) as error:
            raise ArgumentError(f"The module of the algorithm {name!r} can't be imported: {error}.") from error
    if registered not in ALGORITHMS:
        near = get_close_matches(registered, ALGORITHMS, 1)
        raise ArgumentError(
            f"There is no algorithm {name!r}{f': did you mean {near[0]}?' if near else '.'} There are "
            f"{', '.join(ALGORITHMS)}, and module:name for a custom algorithm that the module registers."
        )
    return ALGORITHMS[registered]


class _Options(Mapping[str, type[RunConfig]]):
    def __getitem__(self, name: str) -> type[RunConfig]:
        return ALGORITHMS[name].config

    def __iter__(self) -> Iterator[str]:
        return iter(ALGORITHMS)

    def __len__(self) -> int:
        return len(ALGORITHMS)


OPTIONS: Mapping[str, type[RunConfig]] = _Options()
"""Option dataclass of each algorithm, by name."""


def read_options(values: Mapping[str, Any]) -> RunConfig:
    """Build options from the output of an option dataclass's ``to_dict``, of any algorithm.

    Raises:
        ArgumentError: if there is no such algorithm; see also :meth:`RunConfig.from_dict`.

    Example:
        >>> read_options({"algorithm": "r2d2", "env": "recurl/TMaze-v0"}).n_steps
        10
    """
    return find_algorithm(str(values.get("algorithm", PPOConfig.algorithm))).config.from_dict(values)


def make_algorithm(config: RunConfig) -> Learner[Any, Any]:
    """Build the learner for a set of options.

    Raises:
        ArgumentError: if this machine lacks the device or the memory, or the environment can't be created.
    """
    check_machine(config)
    return _learner(config)(config)


def make_agent(config: RunConfig, env: EnvBase) -> Agent:
    """Build the untrained networks for an environment of the run.

    Raises:
        ArgumentError: if this machine lacks the device or the memory.
    """
    check_machine(config, learning=False)
    agent = _learner(config).make_agent(config, env.observation_spec, env.action_spec_unbatched)
    return agent.to(config.device)


def _learner(config: RunConfig) -> type[Learner[Any, Any]]:
    return find_algorithm(config.algorithm_name()).learner
