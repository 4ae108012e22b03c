"""The environments of a run."""

from __future__ import annotations

from torch import nn

from recurl.envs import EnvBase, GymEnv, GymWrapper
from recurl.errors import ArgumentError, RecurlError
from recurl.hardware import check_device
from recurl.trainers.config import RunConfig


def make_env(
    config: RunConfig, num_envs: int | None, *, policy: nn.Module | None = None, render_mode: str | None = None
) -> EnvBase:
    """Build the environments of a run.

    Args:
        config: id and arguments of the environment, device.
        num_envs: environments side by side; None for a single one, with batch size ``[]``.
        policy: policy whose hidden states the environment declares, so that it can be run there.
        render_mode: how the environment shows itself, such as ``"rgb_array"``; it doesn't when None.

    Raises:
        ArgumentError: there is no such device or environment, or it can't be made of these arguments.
    """
    check_device(config.device)
    shown = {} if render_mode is None else {"render_mode": render_mode}
    asked = " ".join((config.env, *config.env_kwargs))
    try:
        return GymEnv(
            config.env,
            num_envs=num_envs,
            device=config.device,
            categorical_action_encoding=True,
            policy=policy,
            **{**config.env_arguments, **shown},
        )
    except ArgumentError as error:
        raise ArgumentError(f"--env {asked} can't be used: {error}") from error
    except RecurlError:
        raise
    except Exception as error:  # the environment is somebody else's code
        if isinstance(error, TypeError) and config.env_kwargs:
            raise ArgumentError(
                f"--env {config.env} does not take --env-kwargs {' '.join(config.env_kwargs)}: {error}"
            ) from error
        raise ArgumentError(f"--env {asked} can't be made, {type(error).__name__}: {error}") from error


def gym_of(env: EnvBase) -> GymWrapper | None:
    """Return the environment of Gymnasium that is below all transforms, or None where there is none."""
    inner: object = env
    while inner is not None and not isinstance(inner, GymWrapper):
        inner = getattr(inner, "base_env", None)
    return inner
