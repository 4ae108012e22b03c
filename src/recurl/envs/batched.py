"""Batched environments, and the serial implementation that steps them one after another in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.keys import NestedKey
from recurl.core.specs import Composite
from recurl.envs.base import EnvBase
from recurl.envs.parameters import Parameter
from recurl.envs.workers_env import EnvInfo, creators, first_indices, make_env, written_keys
from recurl.transforms.base import makes_memory, reset_mask

__all__ = ["BatchedEnv", "CreateEnv", "EnvCreator", "SerialEnv"]

CreateEnv: TypeAlias = Callable[[], EnvBase]


class EnvCreator:
    """Picklable environment factory; lambdas and closures are allowed.

    Objects that it refers to are pickled by value if they are defined in the main script, and by name otherwise.

    Args:
        create_env_fn: function that creates an environment.
        create_env_kwargs: keyword arguments of ``create_env_fn``; none when None.

    Raises:
        ArgumentTypeError: ``create_env_fn`` is not callable.

    Example:
        >>> import pickle
        >>> from recurl.envs import GymEnv
        >>> create = EnvCreator(lambda name: GymEnv(name), {"name": "CartPole-v1"})
        >>> pickle.loads(pickle.dumps(create))()
        GymEnv(...CartPole-v1..., batch_size=[], device=None)
    """

    def __init__(self, create_env_fn: Callable[..., EnvBase], create_env_kwargs: dict[str, Any] | None = None) -> None:
        if not callable(create_env_fn):
            raise ArgumentTypeError(f"create_env_fn must be callable, got {create_env_fn!r}.")
        self.create_env_fn = create_env_fn
        self.create_env_kwargs = dict(create_env_kwargs or {})

    def __call__(self, **kwargs: Any) -> EnvBase:
        """Create an environment; ``kwargs`` override ``create_env_kwargs``."""
        return self.create_env_fn(**{**self.create_env_kwargs, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_creator, (cloudpickle.dumps((self.create_env_fn, self.create_env_kwargs)),)


def _unpickle_creator(data: bytes) -> EnvCreator:
    return EnvCreator(*pickle.loads(data))


class BatchedEnv(EnvBase):
    """Base class of batches of environments with equal specs, stacked along a new first dimension.

    Args:
        infos: properties of each environment.
        concatenate: concatenate the environments along their first dimension instead, ``[n * B]``.
        device: device of all tensors; the environments' device when None.
    """

    def __init__(
        self, infos: Sequence[EnvInfo], *, concatenate: bool = False, device: torch.device | str | None = None
    ) -> None:
        first = infos[0]
        for index, info in enumerate(infos):
            for name, given, wanted in zip(EnvInfo._fields, info, first, strict=True):
                if given != wanted:
                    raise ArgumentError(
                        f"Batched environments must have equal specs: {name} of environment {index} is {given}, that "
                        f"of environment 0 is {wanted}."
                    )
        self.num_workers = len(infos)
        stacked_size = torch.Size([len(infos), *first.batch_size])
        specs = (first.observation_spec, first.state_spec, first.reward_spec, first.done_spec)
        stacked = [spec.expand(len(infos), *spec.shape) for spec in specs]
        if concatenate:
            stacked = [spec.flatten(len(stacked_size)) for spec in stacked]
        super().__init__(
            observation_spec=Composite(),
            action_spec=first.action_spec_unbatched,
            batch_size=[stacked_size.numel()] if concatenate else stacked_size,
            device=first.device if device is None else device,
        )
        self._observation, self._state, self._reward, self._done = (spec.to(self.device) for spec in stacked)
        self._plan_carry()
        self._root_keys, self._step_keys = written_keys(first)
        self._each = first.batch_size
        self._rows = first.batch_size.numel()
        self.rows_per_env = first.rows_per_env

    def _envs_to_reset(self, mask: Tensor | None) -> list[int]:
        """Return the indices of the environments that have rows to reset."""
        if mask is None:
            return list(range(self.num_workers))
        return mask.reshape(self.num_workers, -1).any(1).nonzero().flatten().tolist()

    @property
    def can_save_state(self) -> bool:
        """Whether all environments can save their state."""
        return self.state_obstacle is None

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state of an environment can't be saved; None if all can."""
        raise NotImplementedError

    @staticmethod
    def _saved_envs(state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of the individual environments.

        Raises:
            ArgumentError: ``state`` contains none.
        """
        if "envs" not in state:
            raise ArgumentError(f"A batch restores only states saved by an equal batch, got {sorted(state)}.")
        return state["envs"]


class SerialEnv(BatchedEnv):
    """Batch of environments stepped one after another in this process.

    Transforms may be inside (one set per environment) or outside (around the batch); the entries are the same.

    Args:
        num_workers: number of environments. The batch size is ``[num_workers, *B]``, where ``[*B]`` is the batch size
            of each environment.
        create_env_fn: function that creates an environment, or a list of ``num_workers`` such functions. All
            environments must have the same specs.

    Raises:
        ArgumentError: ``num_workers`` is below 1 or differs from the number of functions, or the specs differ.
        ArgumentTypeError: a function does not return an environment.

    Example:
        >>> from recurl.envs import GymEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.rollout(3, break_when_any_done=False)["observation"].shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, num_workers: int, create_env_fn: CreateEnv | Sequence[CreateEnv]) -> None:
        functions = creators(num_workers, create_env_fn)
        self.envs = [make_env(create) for create in functions]
        self._kinds = [self.envs[index] for index in first_indices(functions)]
        super().__init__([EnvInfo.of(env) for env in self.envs])

    @makes_memory
    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        indices = self._envs_to_reset(reset_mask(tensordict))
        rows = [None] * self.num_workers if tensordict is None else tensordict.unbind(0)
        fresh = {index: self.envs[index]._root(rows[index]) for index in indices}  # this reset has checked the mask
        filler = fresh[indices[0]]  # for environments that are not reset; their rows are ignored
        return self._stack([fresh.get(index, filler) for index in range(self.num_workers)], self._root_keys)

    @makes_memory
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        after = [env._next(row) for env, row in zip(self.envs, tensordict.unbind(0), strict=True)]
        return self._stack(after, self._step_keys)

    def _stack(self, tds: Sequence[TensorDictBase], keys: list[NestedKey]) -> TensorDict:
        entries = {key: torch.stack([td.get(key) for td in tds]) for key in keys}
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        for env in self.envs:
            env.set_parameters(values)

    def _set_seed(self, seed: int) -> None:
        for index, env in enumerate(self.envs):
            env.set_seed(seed + index * self._rows)

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state of an environment can't be saved; None if all can."""
        return next((found for env in self._kinds if (found := env.state_obstacle) is not None), None)

    def get_state(self) -> dict[str, Any]:
        """Return the states of all environments.

        Raises:
            UnsupportedError: an environment can't save its state.
        """
        return {"envs": [env.get_state() for env in self.envs]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore states returned by :meth:`get_state`."""
        for env, saved in zip(self.envs, self._saved_envs(state), strict=True):
            env.set_state(saved)

    def _close(self) -> None:
        for env in self.envs:
            env.close()
