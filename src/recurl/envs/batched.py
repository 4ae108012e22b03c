"""Batches of environments, stepped one after another in this process or in worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.envs.base import EnvBase
from recurl.envs.workers import Task, WorkerGroup, creators
from recurl.envs.workers_env import EnvInfo, Plan, layout, make_env, serve_env, written_keys
from recurl.envs.workers_memory import SharedTensors
from recurl.errors import ArgumentError, ArgumentTypeError
from recurl.keys import ACTION, NEXT, RESET, NestedKey, next_key
from recurl.lowering import leaves
from recurl.specs import Composite
from recurl.transforms.base import makes_memory, reset_mask

__all__ = ["EnvCreator", "ParallelEnv", "SerialEnv"]

CreateEnv: TypeAlias = Callable[[], EnvBase]


class EnvCreator:
    """Picklable function that creates an environment; lambdas and closures are allowed.

    Objects that it refers to are pickled by value if they are defined in the main script, else by name.

    Args:
        create_env_fn: function that creates an environment.
        create_env_kwargs: keyword arguments of ``create_env_fn``; none when None.

    Raises:
        ArgumentTypeError: ``create_env_fn`` is not callable.

    Example:
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


class _BatchedEnv(EnvBase):
    """Environments with equal specs, stacked along a new first dimension.

    Args:
        infos: properties of each environment.
        concatenate: stack the environments along their first dimension instead, ``[n * B]``.
    """

    def __init__(self, infos: Sequence[EnvInfo], *, concatenate: bool = False) -> None:
        first = infos[0]
        for index, info in enumerate(infos):
            for name, given, wanted in zip(EnvInfo._fields, info, first, strict=True):
                if given != wanted:
                    raise ArgumentError(
                        f"Batched environments must have equal specs: {name} of number {index} is {given}, that of "
                        f"number 0 is {wanted}."
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
            device=first.device,
        )
        self._observation, self._state, self._reward, self._done = stacked
        self._plan_carry()
        self._root_keys, self._step_keys = written_keys(first)
        self._can_save_state = first.can_save_state
        self._each = first.batch_size
        self._rows = first.batch_size.numel()

    def _envs_to_reset(self, tensordict: TensorDictBase | None) -> list[int]:
        """Return the indices of the environments with rows to reset."""
        mask = reset_mask(tensordict)
        if mask is None:
            return list(range(self.num_workers))
        return mask.reshape(self.num_workers, -1).any(1).nonzero().flatten().tolist()

    @property
    def can_save_state(self) -> bool:
        """Whether all environments can save their state."""
        return self._can_save_state


class SerialEnv(_BatchedEnv):
    """Environments stepped one after another in this process.

    Transforms may be inside (one set per environment) or outside (around the batch); the entries are the same.

    Args:
        num_workers: number of environments; the batch size is ``[num_workers, *B]``, where ``[*B]`` is that of each.
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
        self.envs = [make_env(create) for create in creators(num_workers, create_env_fn)]
        super().__init__([EnvInfo.of(env) for env in self.envs])

    @makes_memory
    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        indices = self._envs_to_reset(tensordict)
        rows = [None] * self.num_workers if tensordict is None else tensordict.unbind(0)
        fresh = {index: self.envs[index]._root(rows[index]) for index in indices}  # checked by this reset
        filler = fresh[indices[0]]  # for environments that are not reset, whose rows are ignored
        return self._stack([fresh.get(index, filler) for index in range(self.num_workers)], self._root_keys)

    @makes_memory
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        after = [env._next(row) for env, row in zip(self.envs, tensordict.unbind(0), strict=True)]
        return self._stack(after, self._step_keys)

    def _stack(self, tds: Sequence[TensorDictBase], keys: list[NestedKey]) -> TensorDict:
        entries = {key: torch.stack([td.get(key) for td in tds]) for key in keys}
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int) -> None:
        for index, env in enumerate(self.envs):
            env.set_seed(seed + index * self._rows)

    def get_state(self) -> dict[str, Any]:
        """Return the states of all environments.

        Raises:
            UnsupportedError: one of them can't save its state.
        """
        return {"envs": [env.get_state() for env in self.envs]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore states returned by :meth:`get_state`."""
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.set_state(saved)

    def _close(self) -> None:
        for env in self.envs:
            env.close()


class ParallelEnv(_BatchedEnv):
    """Environments stepped in parallel, each in a worker process of its own.

    Workers are new interpreters (never forked); data is exchanged through anonymous shared memory. The main script
    needs no ``if __name__ == "__main__"`` guard. Environments that this process has registered with
    ``gymnasium.register`` are registered in the workers too, those of the main script included. If a worker raises,
    dies or hangs, the call raises with the worker's traceback as its cause, and all workers are stopped. They also end
    when this object is closed or garbage-collected, and when this process dies.

    Transforms may be inside (in the workers) or outside (around the batch); recurrent states declared by primers inside
    are exchanged like any other entry. Requires a POSIX system: Linux, macOS.

    Args:
        num_workers: number of environments; the batch size is ``[num_workers, *B]``, where ``[*B]`` is that of each.
        create_env_fn: function that creates an environment, or a list of ``num_workers`` such functions. All
            environments must have the same specs. Functions are pickled like :class:`EnvCreator`.
        timeout: seconds after which a reset or step raises because the worker hangs; None for no limit.
        concatenate: join the rows of all workers in one dimension, ``[num_workers * B]``.

    Raises:
        ArgumentError: an argument is out of range, ``num_workers`` differs from the number of functions, or the specs
            differ.
        ArgumentTypeError: a function can't be pickled, or does not return an environment.
        UnsupportedError: the system is not POSIX.
        WorkerError: a worker failed.

    Example:
        >>> from recurl.envs import GymEnv, InitTracker, TransformedEnv
        >>> env = ParallelEnv(1, lambda: TransformedEnv(GymEnv("CartPole-v1"), InitTracker()))
        >>> env.rollout(3, break_when_any_done=False)["is_init"].squeeze(-1)
        tensor([[ True, False, False]])
        >>> env.close()
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: CreateEnv | Sequence[CreateEnv],
        *,
        timeout: float | None = 9.0,
        concatenate: bool = False,
    ) -> None:
        functions = creators(num_workers, create_env_fn)
        self._group = WorkerGroup(
            [Task(serve_env, (function, index)) for index, function in enumerate(functions)], timeout
        )
        try:
            super().__init__(self._group.greetings, concatenate=concatenate)
        except ArgumentError:
            self._group.close()
            raise
        memory = layout(self._group.greetings[0], num_workers)
        given, result = SharedTensors(memory["in"]), SharedTensors(memory["out"])
        for shared in (given, result):
            self._group.ask_all(*shared.entries)
            for index in range(num_workers):
                self._group.send_memory(index, shared)
            shared.close()
        self._action_bytes = given.tensors.pop(ACTION, None)
        self._given, self._result = (self._in_batch(shared.tensors) for shared in (given, result))
        self._messages: dict[Plan, bytes] = {}

    def _in_batch(self, tensors: dict[NestedKey, Tensor]) -> dict[NestedKey, Tensor]:
        """Return views of ``[num_workers, *B, ...]`` that begin with the batch size."""
        lead = 1 + len(self._each)
        return {key: value.view(*self.batch_size, *value.shape[lead:]) for key, value in tensors.items()}

    @makes_memory
    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        entries: dict[NestedKey, Tensor] = {}
        if tensordict is not None:
            entries = {key: tensordict.get(key) for key in self._carried if key in tensordict}
            mask = reset_mask(tensordict)
            if mask is not None:
                entries[RESET] = mask
        return self._run("reset", entries, None, self._envs_to_reset(tensordict), self._root_keys)

    @makes_memory
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        entries = {key: tensordict.get(key) for key in self._carried if key in tensordict}
        if NEXT in tensordict:
            after = tensordict.get(NEXT)
            entries.update({next_key(key): after.get(key) for key in self._root_keys if key in after})
        action: Any = tensordict.get(ACTION)
        if isinstance(action, Tensor):
            return self._run("step", entries, action, range(self.num_workers), self._step_keys)
        entries.update({(ACTION, *path): value for path, value in leaves(action)})
        return self._run("step", entries, None, range(self.num_workers), self._step_keys)

    def _run(
        self,
        kind: str,
        entries: dict[NestedKey, Tensor],
        action: Tensor | None,
        workers: Sequence[int],
        keys: list[NestedKey],
    ) -> TensorDict:
        self._group.check_open()
        for key, value in entries.items():
            slot = self._given.get(key)
            if slot is None:
                raise ArgumentError(f"The action must fit {self.action_spec}, got a part {key!r}.")
            if value.shape != slot.shape or value.dtype != slot.dtype:
                raise ArgumentError(
                    f"The entry {key!r} must be {slot.dtype} {list(slot.shape)}, as the environment declares it; got "
                    f"{value.dtype} {list(value.shape)}."
                )
            slot.copy_(value)
        plan = Plan(kind, tuple(entries), None if action is None else self._write_action(action))
        message = self._messages.get(plan)
        if message is None:
            message = self._messages[plan] = pickle.dumps(plan)
        for index in workers:
            self._group.ask(index, message)
        self._group.answers(workers)
        return TensorDict({key: self._result[key].clone() for key in keys}, self.batch_size, device=self.device)

    def _write_action(self, action: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        """Write the action, in any encoding, to shared memory and return dtype and shape of one worker's action."""
        shape = torch.Size([*self._each, *action.shape[len(self.batch_size) :]])
        used = shape.numel() * action.dtype.itemsize
        if self._action_bytes is None or used > self._action_bytes.shape[1]:
            raise ArgumentError(f"The action must fit {self.action_spec}, got {action.dtype} {list(action.shape)}.")
        slots = self._action_bytes[:, :used].view(action.dtype)
        slots.copy_(action.reshape(self.num_workers, -1))
        return action.dtype, tuple(shape)

    def _ask_all(self, *messages: tuple[Any, ...]) -> list[Any]:
        self._group.check_open()
        for index, message in enumerate(messages):
            self._group.ask(index, pickle.dumps(message))
        return self._group.answers(range(self.num_workers))

    def _set_seed(self, seed: int) -> None:
        self._ask_all(*[("set_seed", seed + index * self._rows) for index in range(self.num_workers)])

    def get_state(self) -> dict[str, Any]:
        """Return the states of all environments.

        Raises:
            UnsupportedError: one of them can't save its state.
        """
        if not self.can_save_state:
            return super().get_state()
        return {"envs": self._ask_all(*[("get_state",)] * self.num_workers)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore states returned by :meth:`get_state`."""
        if not self.can_save_state:
            super().set_state(state)
        self._ask_all(*[("set_state", saved) for saved in state["envs"]])

    def _close(self) -> None:
        self._group.close()
