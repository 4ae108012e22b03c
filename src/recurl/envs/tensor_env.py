"""Tensor environments: tasks stepped on the policy's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recurl.core.devices import checked_device
from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.core.keys import ACTION, DONE, OBSERVATION, RESET, REWARD, TERMINATED, TRUNCATED, NestedKey
from recurl.core.seeding import derive_seed
from recurl.envs.base import EnvBase
from recurl.envs.device_actions import read_on_device
from recurl.envs.gym_spaces import ActionReader, ObservationReader
from recurl.envs.gym_vector import native_row
from recurl.envs.parameters import Parameter
from recurl.envs.tasks.checks import TRIAL_SEED, check_step
from recurl.envs.tasks.dynamics import Dynamics, State, check_count, check_parameters, check_state
from recurl.envs.tasks.namespaces import TensorDraw, tensors_on
from recurl.sequences.entries import Step, like, takes_entries
from recurl.transforms import makes_memory

__all__ = ["TensorEnv", "dynamics_of"]

_PARAMETER = "parameter:"


class TensorEnv(EnvBase):
    """Batched environment whose task states are tensors on any device, stepped without host synchronization.

    The entries are those of a :class:`~recurl.envs.GymWrapper` around the task's vector environment. Steps and resets
    never read from the device: done rows are detected and reset there, so a collector on a GPU doesn't have to wait.

    Therefore some behavior differs from the environment on the host. All rows share one random generator on the
    device, so the episodes of a row depend on the other rows. The shapes of actions are checked, but not their values.
    A done row that is stepped again continues according to the task's dynamics.

    Args:
        dynamics: the task.
        num_envs: number of rows (batch size ``[num_envs]``).
        device: device of all tensors; torch's default when None.
        categorical_action_encoding: use the spec ``Categorical`` for a discrete action instead of ``OneHot``. Integers
            ``[num_envs]`` and one-hot vectors ``[num_envs, n]`` are accepted in either case.
        drop_observations: names of observations to leave out, such as privileged ones.

    Attributes:
        dynamics: the task.
        readers: converters from NumPy observations to tensors and from action tensors to NumPy.
        mask_path: always None: there is no action mask.
        generator: the random generator on the device; a CUDA graph that captures a reset must register it.

    Raises:
        ArgumentTypeError: ``dynamics`` is not a :class:`~recurl.envs.tasks.Dynamics`.
        ArgumentError: ``num_envs`` is below 1, the device doesn't exist, a function of the dynamics violates its
            contract, or an observation to drop doesn't exist or is the only one; or, at a step, the actions have the
            wrong shape or dtype.
        UsageError: the environment is stepped, partially reset, or saved before the first reset of all rows.

    Example:
        >>> from recurl.envs.tasks import TMaze
        >>> env = TensorEnv(TMaze(corridor_length=3), 1024)
        >>> env.reset(seed=0)["observation"].shape
        torch.Size([1024, 4])
    """

    never_waits = True
    mask_path: tuple[str, ...] | None = None

    def __init__(
        self,
        dynamics: Dynamics,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        categorical_action_encoding: bool = False,
        drop_observations: Sequence[NestedKey] = (),
    ) -> None:
        if not isinstance(dynamics, Dynamics):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentTypeError(f"A TensorEnv steps the Dynamics of a task, got {type(dynamics).__name__}.")
        check_count("num_envs", num_envs, minimum=1)
        device = checked_device(device)
        self.readers = (
            ObservationReader(dynamics.observation_space, [num_envs], type(dynamics).__name__, drop_observations),
            ActionReader(dynamics.action_space, [num_envs], categorical_action_encoding),
        )
        super().__init__(
            observation_spec=self.readers[0].spec,
            action_spec=self.readers[1].spec,
            batch_size=[num_envs],
            device=device,
        )
        self._parameters = {  # tensors, so that captured and compiled steps read their present values
            name: torch.full((num_envs,), float(value), dtype=torch.float64, device=device)
            for name, value in dynamics.get_parameters().items()
        }
        self.dynamics = dynamics.with_parameters(self._parameters) if self._parameters else dynamics
        self._xp = tensors_on(device)
        self.generator = torch.Generator(device)
        self._draw = TensorDraw(self.generator, num_envs)
        initial = check_step(self.dynamics, self._xp, self._trial_draw, num_envs)
        self._shapes = {name: tuple(value.shape) for name, value in initial.items()} | {"steps": (num_envs,)}
        self.generator.seed()
        self._seed: int | None = None
        self._tensors: State | None = None
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._observed_dtypes = {str(key): spec.dtype for key, spec in self.readers[0].spec.items()}

    def _trial_draw(self) -> TensorDraw:
        self.generator.manual_seed(TRIAL_SEED)
        return self._draw

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None) -> Step:
        mask = None if tensordict is None else tensordict.get(RESET, None)
        if mask is None:
            if self._seed is not None:
                self.generator.manual_seed(derive_seed(self._seed, "TensorEnv"))
                self._seed = None
            self._tensors = dict(self.dynamics.begin(self._xp, self._draw))
            self._steps = torch.zeros_like(self._steps)
        else:
            old, rows = self._running_state(), mask.view(self.batch_size)
            fresh = self.dynamics.begin(self._xp, self._draw)
            self._tensors = {name: torch.where(rows, fresh[name], value) for name, value in old.items()}
            self._steps = self._steps.masked_fill(rows, 0)
        return like(tensordict, self._observed(), self.batch_size, self.device)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step) -> Step:
        actions = read_on_device(self.dynamics.action_space, self.batch_size, tensordict[ACTION])
        state, reward, terminated = self.dynamics.advance(self._xp, self._running_state(), self._steps, actions)
        self._tensors, self._steps = state, self._steps + 1
        truncated = self._steps >= self.dynamics.step_limit
        entries = self._observed()
        entries[REWARD] = reward.to(torch.float32).unsqueeze(-1)
        entries[TERMINATED] = terminated.unsqueeze(-1)
        entries[TRUNCATED] = truncated.unsqueeze(-1)
        entries[DONE] = (terminated | truncated).unsqueeze(-1)
        return like(tensordict, entries, self.batch_size, self.device)

    def _observed(self) -> dict[Any, Tensor]:
        observations = self.dynamics.observe(self._xp, self._running_state(), self._steps)
        found = observations if isinstance(observations, dict) else {OBSERVATION: observations}
        return {name: found[name].to(dtype) for name, dtype in self._observed_dtypes.items()}

    def _running_state(self) -> State:
        if self._tensors is None:
            raise UsageError("A TensorEnv has no state before the first reset of all rows: call env.reset() first.")
        return self._tensors

    @property
    def running(self) -> State:
        """Tensors of the running episodes by name, including the step number and the parameters, not copied.

        Every step replaces them with new ones. Assign to this property to continue from other tensors of the same
        shapes.

        Raises:
            UsageError: read before the first reset.
        """
        parameters = {_PARAMETER + name: value for name, value in self._parameters.items()}
        return {**self._running_state(), **parameters, "steps": self._steps}

    @running.setter
    def running(self, tensors: State) -> None:
        tensors = dict(tensors)
        self._steps = tensors.pop("steps")
        self._use({name: tensors.pop(_PARAMETER + name) for name in self._parameters})
        self._tensors = tensors

    def _use(self, parameters: dict[str, Tensor]) -> None:
        if parameters:
            self._parameters = parameters
            self.dynamics = self.dynamics.with_parameters(parameters)

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        check_parameters(self.dynamics, values)
        fresh = {name: torch.full_like(self._parameters[name], cast(float, values[name])) for name in values}
        self._use({**self._parameters, **fresh})

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def tensor_env(self) -> TensorEnv:  # type: ignore[override] # none in the base class
        """This environment."""
        return self

    @property
    def can_save_state(self) -> bool:
        """True: states and the random generator are tensors."""
        return True

    def get_state(self) -> dict[str, Any]:
        """Return the state of the running episodes, including the random generator.

        Raises:
            UsageError: called before the first reset.
        """
        state = {name: value.clone() for name, value in self._running_state().items()}
        generator = self.generator.get_state()
        return {"tensors": state, "steps": self._steps.clone(), "generator": generator, "seed": self._seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`, on an environment constructed the same way.

        Raises:
            ArgumentError: the state comes from a different kind of environment, from one with other arguments, or from
                a different device type, whose random numbers differ.
        """
        if state.keys() != {"tensors", "steps", "generator", "seed"}:
            raise ArgumentError(f"A TensorEnv restores only states saved by a TensorEnv, got {sorted(state)}.")
        check_state({**state["tensors"], "steps": state["steps"]}, self._shapes)
        if state["generator"].shape != self.generator.get_state().shape:
            raise ArgumentError(
                f"The state was saved on a different device type than {self.device}, whose random generator differs: "
                "restore it there, or start with a reset."
            )
        self._tensors = {name: value.to(self.device, copy=True) for name, value in state["tensors"].items()}
        self._steps = state["steps"].to(self.device, copy=True)
        self.generator.set_state(state["generator"].cpu())
        self._seed = state["seed"]

    def __repr__(self) -> str:
        name = type(self.dynamics).__name__
        return f"TensorEnv({name}, batch_size={list(self.batch_size)}, device={self.device})"


def dynamics_of(env_name: str, **kwargs: Any) -> Dynamics | None:
    """Return the dynamics of a registered task, or None for any other environment.

    A task is a Gymnasium id whose vector environment has an attribute ``dynamics``, as every
    :class:`~recurl.envs.tasks.TaskVectorEnv` does.

    Args:
        env_name: Gymnasium id.
        **kwargs: keyword arguments of the environment.

    Raises:
        ArgumentError: the id is unknown.

    Example:
        >>> dynamics_of("recurl/TMaze-v0", corridor_length=7).junction
        7
        >>> dynamics_of("CartPole-v1") is None
        True
    """
    rows = native_row(env_name, **kwargs)
    if rows is None:
        return None
    try:
        found = getattr(rows.unwrapped, "dynamics", None)
        return found if isinstance(found, Dynamics) else None
    finally:
        rows.close()
