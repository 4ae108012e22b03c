"""Check that a task's dynamics agree on the host and on a device, without reading back from the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from recurl.core.devices import check_device
from recurl.core.errors import ArgumentError
from recurl.core.seeding import derive_seed
from recurl.envs.tasks.base import TaskVectorEnv
from recurl.envs.tasks.checks import call_checked, check_step
from recurl.envs.tasks.dynamics import Dynamics, parts
from recurl.envs.tasks.namespaces import Namespace, TensorDraw, tensors_on
from recurl.execution.readback import refuse_read_back

__all__ = ["check_dynamics"]

_MAX_ULPS = 4.0
_MIN_MAGNITUDE = np.float32(
    2.0**-20
)  # smaller numbers inherit the rounding errors of the larger numbers they were computed from


def check_dynamics(
    dynamics: Dynamics, *, device: torch.device | str = "cpu", episodes: int = 100, rows: int = 20, seed: int = 0
) -> float:
    """Compare every step of random episodes on the host with the same step, from the same state, on a device.

    States, rewards and observations must agree to 4 float32 ulps, flags exactly. Whole episodes are not compared, since
    rounding errors grow in unstable tasks.

    Args:
        dynamics: the task.
        device: the device; `"cpu"` compares with torch on the CPU.
        episodes: number of episodes.
        rows: number of episodes played in parallel.
        seed: seed of the episodes and the actions.

    Returns:
        The largest difference in ulps.

    Raises:
        ArgumentError: the two differ, a function breaks the rules, or there is no such device.
        UnsupportedError: a function reads back from the device.

    Example:
        >>> from recurl.envs.tasks import TMaze
        >>> check_dynamics(TMaze(), episodes=20)
        0.0
    """
    check_device(str(device))
    env = TaskVectorEnv(dynamics, rows, AutoresetMode.DISABLED)
    rng = np.random.default_rng(derive_seed(seed, "actions"))
    env.reset(seed=seed)
    xp, ended, step, worst = tensors_on(device), 0, 0, 0.0
    drawn = derive_seed(seed, "states on the device")
    initial = check_step(dynamics, xp, lambda: TensorDraw(torch.Generator(device).manual_seed(drawn), rows), rows)
    _check_dtypes(dynamics, env.state, initial)
    _step_on(
        device, dynamics, xp, env, _actions(dynamics, rng, rows)
    )  # constants are copied to the device at their first use
    while ended < episodes:
        actions = _actions(dynamics, rng, rows)
        got = _step_on(device, dynamics, xp, env, actions, refuse_read_back)
        observations, reward, terminated, truncated, _ = env.step(actions)
        expected = {**env.state, **_named(observations), "the rewards": reward, "terminated": terminated}
        for name, value in expected.items():
            worst = max(worst, _difference(dynamics, name, step, value, got[name]))
        done, step = terminated | truncated, step + 1
        if done.any():
            ended += int(done.sum())
            env.reset(options={"reset_mask": done})
    return worst


def _actions(dynamics: Dynamics, rng: np.random.Generator, rows: int) -> NDArray[Any]:
    space = dynamics.action_space
    if isinstance(space, Box):
        low, high = np.clip(space.low, -10, 10), np.clip(space.high, -10, 10)
        return rng.uniform(low, high, (rows, *space.shape)).astype(np.float32)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec, size=(rows, *space.shape))
    return rng.integers(int(space.n), size=rows)


def _step_on(
    device: Any,
    dynamics: Dynamics,
    xp: Namespace,
    env: TaskVectorEnv,
    actions: NDArray[Any],
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Tensor]:
    state, steps = {name: _to_device(array, device) for name, array in env.state.items()}, _to_device(env.steps, device)
    device_actions = _to_device(actions, device)
    after, reward, terminated = call_checked(dynamics, "advance", xp, state, steps, device_actions, within=within)
    observations = call_checked(dynamics, "observe", xp, after, steps + 1, within=within)
    return {**after, **_named(observations), "the rewards": reward, "terminated": terminated}


def _named(observations: Any) -> dict[str, Any]:
    return {f"the observations{f' {name!r}' if name else ''}": part for name, part in parts(observations).items()}


def _check_dtypes(dynamics: Dynamics, host: Mapping[str, NDArray[Any]], initial: Mapping[str, Tensor]) -> None:
    for name, array in host.items():
        got = str(initial[name].dtype).removeprefix("torch.")
        if got != str(array.dtype):
            raise ArgumentError(
                f"{type(dynamics).__name__} must have the same state on the host and on {initial[name].device}, but "
                f"{name!r} is {array.dtype} and {got}: torch multiplies integers and Python floats in float32, so "
                "convert integers first, xp.astype(array, xp.float64)."
            )


def _to_device(array: NDArray[Any], device: Any) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)


def _difference(dynamics: Dynamics, name: str, step: int, expected: NDArray[Any], tensor: Tensor) -> float:
    got = tensor.cpu().numpy()
    if expected.dtype.kind != "f":
        found = 0.0 if (expected == got).all() else float("inf")
    else:
        found = _ulps(expected.astype(np.float32), got.astype(np.float32))
    if found > _MAX_ULPS:
        index = np.unravel_index(int(np.argmax(expected != got)), expected.shape)
        raise ArgumentError(
            f"{type(dynamics).__name__} must do the same on the host and on {tensor.device}, but after step {step} "
            f"{name} differ: {expected[index]} and {got[index]} at {[int(place) for place in index]}; the largest "
            f"difference is {found:.3g} ulps of float32."
        )
    return found


def _ulps(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the largest difference in ulps of the larger number. Non-finite values must be identical."""
    differ = (one != other) & ~(np.isnan(one) & np.isnan(other))
    if not (np.isfinite(one) & np.isfinite(other))[differ].all():
        return float("inf")
    size = np.maximum(np.maximum(np.abs(one), np.abs(other)), _MIN_MAGNITUDE)[differ]
    return float((np.abs(one - other)[differ] / np.spacing(size)).max(initial=0.0))
