"""Simulators with the ``VecEnv`` protocol of rsl_rl as environments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.arrays import as_tensor
from recurl.core.devices import checked_device
from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.core.keys import (
    ACTION,
    DONE,
    RESET,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    dotted,
    is_within,
    normalize_key,
    path_of,
)
from recurl.core.messages import warn_once
from recurl.core.specs import Binary, Bounded, Composite, TensorSpec, Unbounded
from recurl.envs.base import EnvBase
from recurl.envs.parameters import Parameter, set_parameters
from recurl.envs.tasks.dynamics import check_count
from recurl.sequences.entries import Step, like, takes_entries
from recurl.transforms import makes_memory

__all__ = ["VecTensorEnv"]

_PROTOCOL = ("num_envs", "num_actions", "device", "get_observations", "step")
_FINAL = ("final_obs", "final_observation", "final_observations", "terminal_observation")
_ONE_GROUP = "policy"  # name of the observations of older versions, which are a single tensor
_Observed = dict[NestedKey, Tensor]


class VecTensorEnv(EnvBase):
    """Batched environment around a simulator with the ``VecEnv`` protocol of rsl_rl: Isaac Lab, mjlab, and others.

    The protocol is that of ``rsl_rl.env.VecEnv`` 5; rsl_rl is not needed. The simulator has the attributes
    ``num_envs``, ``num_actions`` and ``device``, and the methods ``get_observations()``, which returns groups of
    observations by name (``"policy"``, ``"critic"``), and ``step(actions)``, which returns observations, rewards
    ``[n]``, done flags ``[n]``, and a dict of extras, in which ``"time_outs"`` ``[n]`` marks the rows that only reached
    their step limit. Simulators for older versions return observations as one array, here named ``"policy"``, and other
    groups in ``extras["observations"]``.

    Each group is an entry with its own name; groups of named parts are nested. Numbers are float32, unsigned bytes
    (images), int64, or bool. Tensors stay on the simulator's device, without a copy over the host, and the device is
    never waited for. Arrays of NumPy, CuPy and JAX are accepted where the protocol has tensors, sharing memory. Buffers
    that the simulator overwrites at the next step are safe.

    The simulator resets done rows within the step, and returns the first observations of their new episodes; the next
    reset of these rows returns them. The last observations of the old episodes are taken from ``extras["final_obs"]``
    (or ``"final_observation"``, ``"final_observations"``, ``"terminal_observation"``), with the groups and shapes of
    the observations, as Isaac Lab provides with ``compute_final_obs=True``. Without them, ``next`` holds the
    observation before the step in done rows. The value of a truncated episode's last state is then approximated by that
    of the state before, as rsl_rl does for time-outs.

    ``extras`` of the last step, with metrics such as ``extras["log"]``, are in the attribute of this name; training
    doesn't record them.

    Args:
        simulator: the simulator.
        action_low: lower bound of the actions, a number or ``[num_actions]``. By default, actions have the bounds
            ``-clip_actions`` and ``clip_actions`` if the simulator has this attribute, and otherwise none.
        action_high: upper bound, given along with ``action_low``.
        drop_observations: groups to leave out, or parts of them (``"critic.height_scan"``).

    Attributes:
        simulator: the simulator.
        extras: extras of the last step.

    Raises:
        ArgumentTypeError: the simulator lacks a part of the protocol, or returns something else than arrays.
        ArgumentError: the bounds, or the entries to drop, don't fit the simulator; or, at a step, the actions have the
            wrong shape or dtype, or the groups of observations or their shapes have changed.
        UsageError: the simulator has no ``reset()``, and all rows are reset for a second time; or rows that aren't done
            are reset, and it has no ``reset_idx(rows)``.

    Example:
        >>> import torch
        >>> class Counter:  # counts to 3
        ...     num_envs, num_actions, device = 2, 1, "cpu"
        ...     count = torch.zeros(2)
        ...     def get_observations(self):
        ...         return {"policy": self.count[:, None]}
        ...     def step(self, actions):
        ...         done = self.count == 2
        ...         self.count = torch.where(done, 0.0, self.count + 1)
        ...         return self.get_observations(), torch.ones(2), done, {"time_outs": done}
        >>> env = VecTensorEnv(Counter())
        >>> env.rollout(4, break_when_any_done=False)["next", "truncated"][0, :, 0]
        tensor([False, False,  True, False])
    """

    never_waits = True

    def __init__(
        self,
        simulator: Any,
        *,
        action_low: Any = None,
        action_high: Any = None,
        drop_observations: Sequence[NestedKey] = (),
    ) -> None:
        self._name = type(simulator).__name__
        lacking = [name for name in _PROTOCOL if not hasattr(simulator, name)]
        if lacking:
            raise ArgumentTypeError(
                f"A simulator must have the VecEnv protocol of rsl_rl, but {self._name} lacks {', '.join(lacking)}: "
                "wrap it as for rsl_rl, for example with RslRlVecEnvWrapper of Isaac Lab or mjlab."
            )
        rows = check_count("num_envs", simulator.num_envs, minimum=1)
        actions = check_count("num_actions", simulator.num_actions, minimum=1)
        device = checked_device(simulator.device)
        self.simulator = simulator
        self.extras: Mapping[str, Any] = {}
        self._fresh: _Observed | None = None
        self._ended: Tensor | None = None  # None after a reset of all rows
        self._started = False
        self._seed: int | None = None
        found = dict(_arrays(_groups(simulator.get_observations(), None)))
        self._dropped = self._checked_drop(found, drop_observations)
        kept = {key: as_tensor(value, self._what(key)) for key, value in found.items() if key not in self._dropped}
        self._shapes = {key: (rows, *value.shape[1:]) for key, value in kept.items()}
        self._dtypes = {key: _dtype(value) for key, value in kept.items()}
        spec = Composite()
        for key, dtype in self._dtypes.items():
            spec.set(key, _spec(self._shapes[key][1:], dtype))
        super().__init__(
            observation_spec=spec,
            action_spec=self._action_bounds(actions, action_low, action_high),
            batch_size=[rows],
            device=device,
        )
        self._read(found)

    def _what(self, key: NestedKey) -> str:
        return f"the observation {dotted(key)!r} of {self._name}"

    def _checked_drop(self, found: Mapping[NestedKey, Any], drop: Sequence[NestedKey]) -> set[NestedKey]:
        """Return the keys of the entries to drop."""
        names = ", ".join(map(dotted, found))
        for name in map(dotted, drop):
            if not any(is_within(key, [name]) for key in found):
                raise ArgumentError(f"{self._name} has no observation {name!r} to drop, it has {names or 'none'}.")
        dropped = {key for key in found if is_within(key, drop)}
        if len(dropped) == len(found):
            raise ArgumentError(f"An observation of {self._name} must be left, it has {names or 'none'}.")
        return dropped

    def _action_bounds(self, actions: int, low: Any, high: Any) -> TensorSpec:
        if (low is None) != (high is None):
            raise ArgumentError("action_low and action_high must be given together.")
        if low is None:
            clip = getattr(self.simulator, "clip_actions", None)
            if clip is None:
                return Unbounded(actions, dtype=torch.float32)
            low, high = -clip, clip
        bounds = [torch.as_tensor(bound, dtype=torch.float32, device="cpu") for bound in (low, high)]
        if any(bound.shape not in ((), (actions,)) for bound in bounds) or not bool((bounds[0] < bounds[1]).all()):
            raise ArgumentError(
                f"The bounds of the actions must be numbers or of shape [{actions}], the lower ones below the upper "
                f"ones; got {low} and {high}."
            )
        least, most = (bound.expand(actions).clone() for bound in bounds)
        return Bounded(least, most, (actions,), dtype=torch.float32)

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None) -> Step:
        mask = None if tensordict is None else tensordict.get(RESET, None)
        if mask is None:
            self._restart()
        elif self._fresh is None:
            raise UsageError("A VecTensorEnv must first reset all rows: call env.reset().")
        elif mask is not self._ended:  # rows may be cut by a transform, or by the caller
            self._reset_others(mask.view(self.batch_size))
        assert self._fresh is not None
        fresh = self._fresh if mask is not None else {key: value.clone() for key, value in self._fresh.items()}
        return like(tensordict, fresh, self.batch_size, self.device)

    def _restart(self) -> None:
        seed, self._seed = self._seed, None
        if seed is not None:
            self._seed_simulator(seed)
        reset = getattr(self.simulator, "reset", None)
        if callable(reset):
            reset()
        elif self._started:
            raise UsageError(
                f"{self._name} has no reset(), so all rows can only be reset once, before the first step: add the "
                "method, or create another simulator."
            )
        self._fresh, self._ended, self._started = self._observations(), None, True

    def _reset_others(self, rows: Tensor) -> None:
        """Reset the selected rows that the last step didn't reset. Waits for the device."""
        others = rows if self._ended is None else rows & ~self._ended.view(self.batch_size)
        selected = others.nonzero().squeeze(-1)
        if not len(selected):
            return
        reset_rows = getattr(self.simulator, "reset_idx", None)
        inner = getattr(getattr(self.simulator, "unwrapped", None), "reset", None)
        if callable(reset_rows):
            reset_rows(selected)
        elif callable(inner) and "env_ids" in inspect.signature(inner).parameters:  # Isaac Lab, mjlab
            inner(env_ids=selected)
        elif len(selected) == len(rows):
            self._restart()
            return
        else:
            raise UsageError(
                f"{self._name} resets done rows itself, and rows {selected.tolist()} to reset are not done: give it a "
                "method reset_idx(rows), or don't cut episodes."
            )
        self._fresh = self._observations()

    def _seed_simulator(self, seed: int) -> None:
        give = getattr(self.simulator, "seed", None)
        if callable(give):
            give(seed)
        else:
            warn_once(f"{self._name} has no seed(): its episodes don't depend on the seed, and can't be repeated.")

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step) -> Step:
        result = self.simulator.step(self._checked(tensordict[ACTION]))
        if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 4:
            raise ArgumentTypeError(
                f"{self._name}.step must return observations, rewards, dones, and extras; got {_kind(result)}."
            )
        observations, rewards, dones, extras = cast(tuple[Any, ...], result)
        self.extras = extras = cast("Mapping[str, Any]", extras or {})
        done = self._per_row("dones", dones) != 0
        time_outs = extras.get("time_outs")
        truncated = torch.zeros_like(done) if time_outs is None else done & (self._per_row("time_outs", time_outs) != 0)
        self._fresh, self._ended = self._read(dict(_arrays(_groups(observations, extras)))), done
        last = self._last(extras, tensordict)
        entries: dict[Any, Tensor] = {
            key: torch.where(done.view(-1, *[1] * (value.ndim - 1)), last[key], value)
            for key, value in self._fresh.items()
        }
        entries[REWARD] = self._per_row("rewards", rewards).to(torch.float32, copy=True)
        entries |= {TERMINATED: done & ~truncated, TRUNCATED: truncated, DONE: done}
        return like(tensordict, entries, self.batch_size, self.device)

    def _checked(self, action: Tensor) -> Tensor:
        shape = tuple(self.action_spec.shape)
        if tuple(action.shape) != shape or not action.is_floating_point():
            raise ArgumentError(
                f"The actions must be floating-point numbers of shape {list(shape)}, got {action.dtype} of shape "
                f"{list(action.shape)}."
            )
        return action.to(torch.float32)

    def _last(self, extras: Mapping[str, Any], root: Step) -> Mapping[NestedKey, Tensor]:
        """Return the last observations of the episodes that ended, or else the observations before the step."""
        name = next((name for name in _FINAL if extras.get(name) is not None), None)
        if name is None:
            return {key: root[key] for key in self._shapes}
        return self._read(dict(_arrays(_groups(extras[name], None))), f" in extras[{name!r}]")

    def _observations(self) -> _Observed:
        return self._read(dict(_arrays(_groups(self.simulator.get_observations(), None))))

    def _read(self, found: Mapping[NestedKey, Any], where: str = "") -> _Observed:
        names = [key for key in found if key not in self._dropped]
        if {*names} != self._shapes.keys():
            raise ArgumentError(
                f"The observations of {self._name}{where} must have the groups {[*map(dotted, self._shapes)]} of the "
                f"first ones, got {[*map(dotted, names)]}."
            )
        return {key: self._tensor(key, found[key], where) for key in self._shapes}

    def _tensor(self, key: NestedKey, value: Any, where: str) -> Tensor:
        tensor = as_tensor(value, self._what(key) + where)
        if tuple(tensor.shape) != self._shapes[key]:
            raise ArgumentError(
                f"{self._what(key).capitalize()}{where} must have shape {list(self._shapes[key])}, got "
                f"{list(tensor.shape)}."
            )
        return tensor.to(self.device, self._dtypes[key])

    def _per_row(self, name: str, value: Any) -> Tensor:
        """Return numbers ``[n]`` or ``[n, 1]`` as ``[n, 1]``."""
        tensor, rows = as_tensor(value, f"{name} of {self._name}"), self.batch_size[0]
        if tuple(tensor.shape) not in ((rows,), (rows, 1)):
            raise ArgumentError(f"{name} of {self._name} must have shape [{rows}], got {list(tensor.shape)}.")
        return tensor.reshape(rows, 1).to(self.device)

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        set_parameters(self.simulator, values)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state can't be saved: the simulator lacks ``get_state()`` and ``set_state(state)``."""
        able = all(callable(getattr(self.simulator, name, None)) for name in ("get_state", "set_state"))
        return None if able else f"the simulator {self._name} has no get_state() and set_state()"

    @property
    def can_save_state(self) -> bool:
        """Whether the simulator has ``get_state()``, which must return tensors and plain values, and ``set_state``."""
        return self.state_obstacle is None

    def get_state(self) -> dict[str, Any]:
        """Return the simulator's state, and the observations and done flags of the last step.

        Raises:
            UnsupportedError: the simulator can't save its state.
            UsageError: called before the first reset.
        """
        if not self.can_save_state:
            return super().get_state()
        if self._fresh is None:
            raise UsageError("A VecTensorEnv has no state before the first reset of all rows: call env.reset() first.")
        observed = [[list(path_of(key)), value.clone()] for key, value in self._fresh.items()]
        done = None if self._ended is None else self._ended.clone()
        return {"simulator": self.simulator.get_state(), "observations": observed, "done": done, "seed": self._seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`, around a simulator constructed the same way.

        Raises:
            UnsupportedError: the simulator can't restore a state.
            ArgumentError: the state comes from an environment of another kind or with other observations.
        """
        if not self.can_save_state:
            super().set_state(state)
        if state.keys() != {"simulator", "observations", "done", "seed"}:
            raise ArgumentError(f"A VecTensorEnv restores only states saved by a VecTensorEnv, got {sorted(state)}.")
        saved: dict[NestedKey, Any] = {normalize_key(tuple(name)): value for name, value in state["observations"]}
        self._fresh = self._read(saved, " in the state")
        self.simulator.set_state(state["simulator"])
        self._ended = None if state["done"] is None else state["done"].to(self.device)
        self._seed, self._started = state["seed"], True

    def _close(self) -> None:
        close = getattr(self.simulator, "close", None)
        if callable(close):
            close()

    def __repr__(self) -> str:
        return f"VecTensorEnv({self._name}, batch_size={list(self.batch_size)}, device={self.device})"


def _groups(observations: Any, extras: Mapping[str, Any] | None) -> Any:
    """Return the groups of observations by name; those of older versions are one array, and others in the extras."""
    if isinstance(observations, tuple):  # get_observations of older versions
        observations, extras = cast(tuple[Any, Any], observations)
    if isinstance(observations, Mapping | TensorDictBase):
        return observations
    others = {} if extras is None else extras.get("observations") or {}
    return {**others, _ONE_GROUP: observations}


def _arrays(groups: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[NestedKey, Any]]:
    """Yield the arrays of possibly nested groups with their keys."""
    for name, value in groups.items():
        if isinstance(value, Mapping | TensorDictBase):
            yield from _arrays(value, (*path, str(name)))
        elif value is not None:
            yield normalize_key((*path, str(name))), value


def _dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_floating_point():
        return torch.float32
    return tensor.dtype if tensor.dtype in (torch.uint8, torch.bool) else torch.int64


def _spec(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    if dtype is torch.bool:
        return Binary(shape, dtype=dtype)
    return Unbounded(*shape, dtype=dtype) if shape else Unbounded((), dtype=dtype)


def _kind(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
