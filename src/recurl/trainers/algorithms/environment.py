"""Environments of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from gymnasium.error import DependencyNotInstalled
from torch import nn

from recurl.core.devices import check_device
from recurl.core.errors import ArgumentError, MissingDependencyError, RecurlError, UnsupportedError
from recurl.core.keys import ACTION_MASK, is_within
from recurl.envs import EnvBase, GymEnv, GymWrapper
from recurl.envs.gym_wrappers import NamedWrapper
from recurl.envs.wiring import policy_transforms
from recurl.trainers.config import NO_MASK, RunConfig
from recurl.trainers.env_name import is_jax, is_multi_agent, is_name_only, source_of

if TYPE_CHECKING:
    from recurl.envs import JaxEnv, MultiAgentEnv, TensorEnv
    from recurl.envs.tasks import Dynamics

_MODES = {"auto": None, "native": "vector_entry_point", "sync": "sync", "device": "device"}
_T = TypeVar("_T")


def make_env(
    config: RunConfig, num_envs: int | None, *, policy: nn.Module | None = None, render_mode: str | None = None
) -> EnvBase:
    """Create environments like those of a run, in this process unless ``config.vectorization`` is ``"async"``.

    Args:
        config: options with the environment, its arguments, wrappers, previous-step inputs and device.
        num_envs: number of parallel environments, unless the environment function returns a batch of another size. None
            creates a single environment with batch size ``[]``.
        policy: policy to run in the environment, which declares the policy's hidden states.
        render_mode: Gymnasium render mode, such as ``"rgb_array"``; None disables rendering.

    Raises:
        ArgumentError: if there is no such device or environment, the environment can't be created with these
            arguments, or it was passed as an object, which can't be created again.
    """
    check_device(config.device)
    env = _with_options(config, _single_process(config, num_envs, render_mode))
    for transform in () if policy is None else policy_transforms(policy, env):
        env = env.append_transform(transform)
    return env


def training_env(
    config: RunConfig, num_envs: int | None = None, *, create: Callable[[RunConfig, int], EnvBase] | None = None
) -> EnvBase:
    """Create the training environments, ``[num_envs]``, in worker processes if ``env_workers`` is set.

    Args:
        config: the options.
        num_envs: number of environments, by default ``config.num_envs``; an actor creates its share only.
        create: creates others in place of the environments that the options name.

    Raises:
        ArgumentError: see :func:`make_env`; or if the batch size differs.
    """
    check_device(config.device)
    count = config.num_envs if num_envs is None else num_envs
    env = _with_options(config, (create or _create_training_env)(config, count))
    if tuple(env.batch_size) != (count,):
        env.close()
        advice = (
            "a multiple of the number of agents, each of which is a row"
            if is_multi_agent(config.env)
            else "or pass a function that creates one environment, or takes num_envs"
        )
        raise ArgumentError(
            f"The environment of a run must have batch size [num_envs], [{count}], got "
            f"{list(env.batch_size)}: set --num-envs to {max(math.prod(env.batch_size), 1)}, {advice}."
        )
    return env


def _create_training_env(config: RunConfig, num_envs: int) -> EnvBase:
    source = source_of(config.env)
    if isinstance(source, EnvBase):
        return _checked(config, source)
    if not config.env_workers:
        return _single_process(config, num_envs)
    from recurl.envs import ParallelEnv, parallel_groups  # noqa: PLC0415 - imported where it is used

    groups, workers = config.env_groups, config.env_workers
    create = partial(_single_process, config.on_cpu(), num_envs // workers // groups)
    if groups > 1:
        return parallel_groups(groups, workers, create, timeout=config.env_timeout, device=config.device)
    return ParallelEnv(workers, create, timeout=config.env_timeout, concatenate=True, device=config.device)


def _with_options(config: RunConfig, env: EnvBase) -> EnvBase:
    """Return ``env`` with noise, delay, and the previous action and reward as inputs, if the options enable them."""
    if config.observation_noise or config.observation_delay:
        env = _with_sensors(config, env)
    if config.previous_action:
        from recurl.transforms import PreviousAction  # noqa: PLC0415 - as above

        env = env.append_transform(PreviousAction(env.action_spec_unbatched))
    if config.previous_reward:
        from recurl.transforms import PreviousReward  # noqa: PLC0415 - as above

        env = env.append_transform(PreviousReward())
    return env


def _with_sensors(config: RunConfig, env: EnvBase) -> EnvBase:
    """Return ``env`` with noise and then delay of the observations that the actor sees."""
    from recurl.transforms import ObservationDelay, ObservationNoise  # noqa: PLC0415 - as above

    spec, private = env.observation_spec, (ACTION_MASK, *config.private_observations)
    keys = [key for key in spec.keys(True, True) if not is_within(key, private)]
    if config.observation_noise:
        numbers = [key for key in keys if spec[key].dtype.is_floating_point]
        if not numbers:
            env.close()
            raise ArgumentError(
                f"--observation-noise needs floating-point observations, and {config.env_name} has only {keys}: leave "
                "it out."
            )
        env = env.append_transform(ObservationNoise(config.observation_noise, numbers))
    if config.observation_delay:
        env = env.append_transform(ObservationDelay(config.observation_delay, keys))
    return env


def _single_process(config: RunConfig, num_envs: int | None, render_mode: str | None = None) -> EnvBase:
    source = source_of(config.env)
    if isinstance(source, EnvBase):
        raise ArgumentError(
            f"A new environment is needed here, but {config.env_name} was passed as an object, which training uses: "
            "pass a function that creates it instead, env=lambda: ..."
        )
    if is_name_only(config.env):
        raise ArgumentError(
            f"The environment of this run was passed in Python, as {config.env_name}: pass the function again, as in "
            "recurl.load(run, env=make), evaluate_run(folder, env=make), or folder.read_config(env=make) to resume. "
            "The command line takes Gymnasium ids only."
        )
    if is_jax(config.env) or is_multi_agent(config.env):
        return _create(config, partial(_named_rows, config, num_envs or 1))
    if num_envs is not None and config.vectorization == "async":
        if num_envs > 1 and render_mode is None:
            return _one_process_each(config, num_envs)
        config = replace(config, vectorization="sync")
    options: dict[str, Any] = {"device": config.device}
    if num_envs is not None:
        options["vectorization_mode"] = _MODES[config.vectorization]
    options["wrappers"] = [NamedWrapper(text) for text in config.wrapper]
    options["drop_observations"] = config.drop_observations
    options["action_mask"] = None if config.action_mask == NO_MASK else config.action_mask
    if source is not None:
        from recurl.envs.from_function import env_from_function  # noqa: PLC0415 - as above

        create = partial(env_from_function, source, num_envs, **options, trial_episodes=config.trial_episodes)
        return _checked(config, _create(config, create, render_mode))
    dynamics = None if num_envs is None else _dynamics_on_device(config)
    if num_envs is not None and dynamics is not None:
        from recurl.envs import TensorEnv  # noqa: PLC0415 - as above

        return TensorEnv(
            _trials(config, dynamics),
            num_envs,
            device=config.device,
            categorical_action_encoding=True,
            drop_observations=config.drop_observations,
        )
    if config.trial_episodes is not None:
        return _create(config, partial(_trials_of_id, config, config.trial_episodes, num_envs, options), render_mode)
    create = partial(GymEnv, config.env_name, num_envs, categorical_action_encoding=True, **options)
    return _create(config, create, render_mode)


def _named_rows(config: RunConfig, rows: int, **arguments: Any) -> EnvBase:
    """Create a batch of an environment that Gymnasium doesn't know."""
    if is_jax(config.env):
        from recurl.envs.jax_named import named_jax_env  # noqa: PLC0415 - as above

        arguments |= {"drop_observations": config.drop_observations}
        return named_jax_env(config.env_name, rows, device=config.device, **arguments)
    from recurl.envs.multi_agent_named import named_multi_agent_env  # noqa: PLC0415 - as above

    if config.action_mask != ACTION_MASK:
        arguments["action_mask"] = None if config.action_mask == NO_MASK else config.action_mask
    return named_multi_agent_env(config.env_name, rows, device=config.device, **arguments)


def _one_process_each(config: RunConfig, num_envs: int) -> EnvBase:
    """Create single environments, each in its own worker process."""
    from recurl.envs import ParallelEnv  # noqa: PLC0415 - as above

    single = replace(config.on_cpu(), vectorization="auto")
    _single_process(single, None).close()  # raises the same errors as the other modes
    create = partial(_single_process, single, None)
    return ParallelEnv(num_envs, create, timeout=config.env_timeout, device=config.device)


def _dynamics_on_device(config: RunConfig) -> Dynamics | None:
    """Return the dynamics of a task to step on the device of the run, or None to step the environment on the host."""
    on_gpu = config.vectorization == "auto" and torch.device(config.device).type != "cpu"
    if config.vectorization != "device" and (not on_gpu or config.host_only):
        return None
    dynamics = _dynamics(config)
    if dynamics is None and config.vectorization == "device":
        _create(config, partial(GymEnv, config.env_name)).close()  # report invalid arguments first
        raise ArgumentError(
            f"--vectorization device needs a task written as Dynamics, and {config.env_name} is not one: use auto, or "
            "write it as Dynamics (register_dynamics)."
        )
    return dynamics


def _dynamics(config: RunConfig) -> Dynamics | None:
    from recurl.envs.tensor_env import dynamics_of  # noqa: PLC0415 - as above

    return _create(config, partial(dynamics_of, config.env_name))


def _trials_of_id(
    config: RunConfig, episodes: int, num_envs: int | None, options: dict[str, Any], **kwargs: Any
) -> EnvBase:
    """Create environments by id that join episodes into trials: those of a task are stepped like the task, by NumPy."""
    task = None if config.wrapper or config.drop_observations else _dynamics(config)
    if task is not None:
        from recurl.envs.from_function import env_from_function  # noqa: PLC0415 - as above

        shown = {name: value for name, value in kwargs.items() if name == "render_mode"}
        return env_from_function(
            lambda: task, num_envs, **{**options, "wrappers": ()}, **shown, trial_episodes=episodes
        )
    from recurl.envs.trials import Trials  # noqa: PLC0415 - as above

    wrappers = [*options.pop("wrappers"), partial(Trials, episodes=episodes)]
    return GymEnv(config.env_name, num_envs, categorical_action_encoding=True, wrappers=wrappers, **options, **kwargs)


def _trials(config: RunConfig, dynamics: Dynamics) -> Dynamics:
    """Return the dynamics of the trials of a task, if the memory is kept over several episodes."""
    from recurl.envs.trials import TrialDynamics  # noqa: PLC0415 - as above

    return dynamics if config.trial_episodes is None else TrialDynamics(dynamics, config.trial_episodes)


def _create(config: RunConfig, create: Callable[..., _T], render_mode: str | None = None) -> _T:
    """Call ``create`` with the environment's keyword arguments, and name the options in errors."""
    requested = " ".join((config.env_name, *config.env_kwargs))
    try:
        return create(**{**config.env_arguments, **({} if render_mode is None else {"render_mode": render_mode})})
    except ArgumentError as error:
        raise ArgumentError(f"--env {requested} can't be used: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"--env {requested} can't be used: {error}") from error
    except RecurlError:
        raise
    except DependencyNotInstalled as error:
        raise MissingDependencyError(f"--env {requested} needs a package that is missing: {error}") from error
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        if isinstance(error, TypeError) and config.env_kwargs:
            raise ArgumentError(
                f"--env {config.env_name} does not take --env-kwargs {' '.join(config.env_kwargs)}: {error}"
            ) from error
        raise ArgumentError(f"--env {requested} can't be created, {type(error).__name__}: {error}") from error


def _checked(config: RunConfig, env: EnvBase) -> EnvBase:
    """Check that a recurl environment is open and on the device of the networks."""
    if env.is_closed:
        raise ArgumentError(f"The environment {config.env_name} is closed: pass a new one.")
    wanted, own = torch.device(config.device).type, "cpu" if env.device is None else env.device.type
    if wanted != own:
        raise ArgumentError(f"The environment {config.env_name} must be on --device {wanted}, but it is on {own}.")
    return env


def gym_of(env: EnvBase) -> GymWrapper | None:
    """Return the Gymnasium environment below all transforms, or None if there is none."""
    inner = with_spaces(env)
    return inner if isinstance(inner, GymWrapper) else None


def with_spaces(env: EnvBase) -> GymWrapper | TensorEnv | JaxEnv | MultiAgentEnv | None:
    """Return the environment below all transforms that has Gymnasium spaces, or None if there is none."""
    from recurl.envs import JaxEnv, MultiAgentEnv, TensorEnv  # noqa: PLC0415 - as above

    inner: Any = env
    while inner is not None and not isinstance(inner, GymWrapper | TensorEnv | JaxEnv | MultiAgentEnv):
        inner = getattr(inner, "base_env", None)
    return inner
