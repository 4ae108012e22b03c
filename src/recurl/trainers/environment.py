"""The environments of a run."""

from __future__ import annotations

import torch
from torch import nn

from recurl.envs import EnvBase, GymEnv
from recurl.errors import ArgumentError
from recurl.trainers.config import RunConfig


def make_env(config: RunConfig, num_envs: int, *, policy: nn.Module | None = None) -> EnvBase:
    """Build the environments of a run.

    Args:
        config: id and arguments of the environment, device.
        num_envs: environments side by side.
        policy: its hidden states are declared, so that it can be run in the environment.

    Raises:
        ArgumentError: there is no such environment or device, or the environment refuses its arguments.
    """
    check_device(config.device)
    try:
        return GymEnv(
            config.env,
            num_envs=num_envs,
            device=config.device,
            categorical_action_encoding=True,
            policy=policy,
            **config.env_arguments,
        )
    except ArgumentError as error:
        raise ArgumentError(f"--env {config.env} {' '.join(config.env_kwargs)} can't be used: {error}") from error
    except TypeError as error:
        raise ArgumentError(
            f"--env {config.env} does not take --env-kwargs {' '.join(config.env_kwargs)}: {error}"
        ) from error


def check_device(device: str) -> None:
    """Refuse a device that can't be used.

    Raises:
        ArgumentError: torch can't put a tensor there.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says it with either
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--device {device} can't be used, try --device cpu: {reason}") from error
