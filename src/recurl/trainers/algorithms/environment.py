"""The environments of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from gymnasium.error import DependencyNotInstalled
from torch import nn

from recurl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, TensorEnv, parallel_groups
from recurl.envs.from_function import env_from_function
from recurl.envs.gym_wrappers import NamedWrapper
from recurl.envs.tasks import Dynamics
from recurl.envs.tensor_env import dynamics_of
from recurl.envs.wiring import policy_transforms
from recurl.errors import ArgumentError, MissingDependencyError, RecurlError, UnsupportedError
from recurl.hardware import check_device
from recurl.trainers.config import NO_MASK, RunConfig
from recurl.trainers.env_name import is_name_only, source_of
from recurl.transforms import PreviousAction, PreviousReward

_MODES = {"auto": None, "native": "vector_entry_point", "sync": "sync", "device": "device"}
_T = TypeVar("_T")


def make_env(
    config: RunConfig, num_envs: int | None, *, policy: nn.Module | None = None, render_mode: str | None = None
) -> EnvBase:
    """Build environments as those of a run, all in this process unless ``config.vectorization`` is ``"async"``.

    Args:
        config: the environment, its arguments, wrappers and inputs of the step before, device.
        num_envs: environments side by side; a function that makes a batch of its own size decides it instead. None for
            a single one, with batch size ``[]``.
        policy: policy whose hidden states the environment declares, so that it can be run there.
        render_mode: how the environment shows itself, such as ``"rgb_array"``; it doesn't when None.

    Raises:
        ArgumentError: there is no such device or environment, or it can't be made of these arguments; or the
            environment is an object, which can't be made anew.
    """
    check_device(config.device)
    env = _with_past(config, _single_process(config, num_envs, render_mode))
    for transform in () if policy is None else policy_transforms(policy, env):
        env = env.append_transform(transform)
    return env


def training_env(config: RunConfig, num_envs: int | None = None) -> EnvBase:
    """Build the environments that a run learns in, ``[num_envs]``, in worker processes where ``env_workers`` says so.

    Args:
        config: the options.
        num_envs: number of them, if other than that of the options: the share of an actor.

    Raises:
        ArgumentError: see :func:`make_env`; or a batch of another size.
    """
    check_device(config.device)
    count = config.num_envs if num_envs is None else num_envs
    env = _with_past(config, _of_training(config, count))
    if tuple(env.batch_size) != (count,):
        env.close()
        raise ArgumentError(
            f"The environment of a run must have the batch size [num_envs], [{count}], got "
            f"{list(env.batch_size)}: set --num-envs to {max(math.prod(env.batch_size), 1)}, or give a function that "
            "makes one environment, or takes num_envs."
        )
    return env


def _of_training(config: RunConfig, num_envs: int) -> EnvBase:
    source = source_of(config.env)
    if isinstance(source, EnvBase):
        return _checked(config, source)
    if not config.env_workers:
        return _single_process(config, num_envs)
    groups, workers = config.env_groups, config.env_workers
    create = partial(_single_process, config.on_cpu(), num_envs // workers // groups)
    if groups > 1:
        return parallel_groups(groups, workers, create, timeout=config.env_timeout, device=config.device)
    return ParallelEnv(workers, create, timeout=config.env_timeout, concatenate=True, device=config.device)


def _with_past(config: RunConfig, env: EnvBase) -> EnvBase:
    """Return ``env`` with the inputs of the step before that the options ask for."""
    if config.previous_action:
        env = env.append_transform(PreviousAction(env.action_spec_unbatched))
    if config.previous_reward:
        env = env.append_transform(PreviousReward())
    return env


def _single_process(config: RunConfig, num_envs: int | None, render_mode: str | None = None) -> EnvBase:
    source = source_of(config.env)
    if isinstance(source, EnvBase):
        raise ArgumentError(
            f"A fresh environment is needed here, and {config.env_name} was given as an object, which training uses: "
            "give a function that makes it instead, env=lambda: ..."
        )
    if is_name_only(config.env):
        raise ArgumentError(
            f"The environment of this run was given in Python, as {config.env_name}: pass the function again, as in "
            "recurl.load(run, env=make), evaluate_run(folder, env=make), or folder.read_config(env=make) to resume. "
            "The command line takes Gymnasium ids only."
        )
    if num_envs is not None and config.vectorization == "async":
        if num_envs > 1 and render_mode is None:
            return _process_each(config, num_envs)
        config = replace(config, vectorization="sync")
    options: dict[str, Any] = {"device": config.device}
    if num_envs is not None:
        options["vectorization_mode"] = _MODES[config.vectorization]
    options["wrappers"] = [NamedWrapper(text) for text in config.wrapper]
    options["drop_observations"] = config.drop_observations
    options["action_mask"] = None if config.action_mask == NO_MASK else config.action_mask
    if source is not None:
        create = partial(env_from_function, source, num_envs, **options)
        return _checked(config, _clearly(config, create, render_mode))
    dynamics = None if num_envs is None else _dynamics_on_device(config)
    if num_envs is not None and dynamics is not None:
        return TensorEnv(dynamics, num_envs, device=config.device, categorical_action_encoding=True)
    create = partial(GymEnv, config.env_name, num_envs, categorical_action_encoding=True, **options)
    return _clearly(config, create, render_mode)


def _process_each(config: RunConfig, num_envs: int) -> EnvBase:
    """Return single environments, each in a worker process."""
    single = replace(config.on_cpu(), vectorization="auto")
    _single_process(single, None).close()  # what is wrong with it is said as in every other case
    create = partial(_single_process, single, None)
    return ParallelEnv(num_envs, create, timeout=config.env_timeout, device=config.device)


def _dynamics_on_device(config: RunConfig) -> Dynamics | None:
    """Return the dynamics of a task that is stepped on the device of the run, or None to step it on the host."""
    on_gpu = config.vectorization == "auto" and torch.device(config.device).type != "cpu"
    if config.vectorization != "device" and (not on_gpu or config.host_only):
        return None
    dynamics = _clearly(config, partial(dynamics_of, config.env_name))
    if dynamics is None and config.vectorization == "device":
        _clearly(config, partial(GymEnv, config.env_name)).close()  # a wrong argument is named first
        raise ArgumentError(
            f"--vectorization device steps tasks that are written as Dynamics, and {config.env_name} is not one: take "
            "auto, or write it so (register_dynamics)."
        )
    return dynamics


def _clearly(config: RunConfig, create: Callable[..., _T], render_mode: str | None = None) -> _T:
    """Call ``create`` with the environment's own arguments, and name the options in errors."""
    asked = " ".join((config.env_name, *config.env_kwargs))
    try:
        return create(**{**config.env_arguments, **({} if render_mode is None else {"render_mode": render_mode})})
    except ArgumentError as error:
        raise ArgumentError(f"--env {asked} can't be used: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"--env {asked} can't be used: {error}") from error
    except RecurlError:
        raise
    except DependencyNotInstalled as error:
        raise MissingDependencyError(f"--env {asked} needs a package that is missing: {error}") from error
    except (Exception, SystemExit) as error:  # the environment is somebody else's code
        if isinstance(error, TypeError) and config.env_kwargs:
            raise ArgumentError(
                f"--env {config.env_name} does not take --env-kwargs {' '.join(config.env_kwargs)}: {error}"
            ) from error
        raise ArgumentError(f"--env {asked} can't be made, {type(error).__name__}: {error}") from error


def _checked(config: RunConfig, env: EnvBase) -> EnvBase:
    """Refuse an environment of recurl that is closed, or on another device than the networks."""
    if env.is_closed:
        raise ArgumentError(f"The environment {config.env_name} is closed: give a new one.")
    wanted, own = torch.device(config.device).type, "cpu" if env.device is None else env.device.type
    if wanted != own:
        raise ArgumentError(f"The environment {config.env_name} must be on --device {wanted}, but it is on {own}.")
    return env


def gym_of(env: EnvBase) -> GymWrapper | None:
    """Return the environment of Gymnasium that is below all transforms, or None where there is none."""
    inner = with_spaces(env)
    return inner if isinstance(inner, GymWrapper) else None


def with_spaces(env: EnvBase) -> GymWrapper | TensorEnv | None:
    """Return the environment below all transforms that has Gymnasium's spaces, or None where there is none."""
    inner: object = env
    while inner is not None and not isinstance(inner, GymWrapper | TensorEnv):
        inner = getattr(inner, "base_env", None)
    return inner
