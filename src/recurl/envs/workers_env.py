"""Environments in worker processes: properties, layout of shared memory, and the serving loop."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    UnfitStateError,
    UnsupportedError,
    UsageError,
)
from recurl.core.keys import ACTION, DONE, DONE_KEYS, RESET, REWARD, NestedKey, next_key, path_of
from recurl.core.specs import Composite, TensorSpec, choice_counts
from recurl.envs.base import EnvBase
from recurl.envs.workers_child import Channel, Closed
from recurl.envs.workers_memory import Entry
from recurl.envs.workers_rounds import RoundServer
from recurl.sequences.entries import Entries, Step

__all__ = [
    "Announcement",
    "EnvInfo",
    "Plan",
    "Server",
    "SharedLayout",
    "creators",
    "first_indices",
    "layout",
    "make_env",
    "serve_envs",
    "written_keys",
]

_MAX_ONE_HOT = 2**20  # largest one-hot action supported where the spec is an integer


class EnvInfo(NamedTuple):
    """Properties of a worker's environment that the parent needs."""

    observation_spec: Composite
    state_spec: Composite
    reward_spec: TensorSpec
    done_spec: Composite
    action_spec_unbatched: TensorSpec
    batch_size: torch.Size
    device: torch.device | None
    reads_root: bool
    rows_per_env: int

    @classmethod
    def of(cls, env: EnvBase) -> EnvInfo:
        """Return the properties of ``env``."""
        return cls(
            env.observation_spec,
            env.state_spec,
            env.reward_spec,
            env.done_spec,
            env.action_spec_unbatched,
            env.batch_size,
            env.device,
            env.reads_root,
            env.rows_per_env,
        )


class Plan(NamedTuple):
    """Kind of a reset or step, and the entries that the worker reads from shared memory for it."""

    place: int
    """Index of the environment within the worker."""
    kind: Literal["reset", "step", "advance"]
    """``"advance"`` takes a step and resets the rows that are done afterwards."""
    keys: tuple[NestedKey, ...]
    action: tuple[torch.dtype, tuple[int, ...]] | None
    """Dtype and shape of the worker's action, which depend on the policy; None for a reset."""


class Announcement(NamedTuple):
    """Plan, along with the number assigned to it."""

    number: int
    plan: Plan


def make_env(create_env_fn: Callable[[], EnvBase]) -> EnvBase:
    """Return the environment that ``create_env_fn`` creates.

    Raises:
        ArgumentTypeError: the result is not a recurl environment.
    """
    env = create_env_fn()
    if not isinstance(env, EnvBase):  # pyright: ignore[reportUnnecessaryIsInstance] - users
        raise ArgumentTypeError(f"create_env_fn must return an environment of recurl, got {env!r}.")
    return env


def creators(num_workers: int, create_env_fn: Any) -> list[Callable[[], Any]]:
    """Return one callable per worker.

    Args:
        num_workers: number of workers, at least 1.
        create_env_fn: one callable for all workers, or a list of ``num_workers`` callables.

    Raises:
        ArgumentError: ``num_workers`` is below 1, or differs from the number of callables.
        ArgumentTypeError: ``create_env_fn``, or an item of it, is not callable.
    """
    if num_workers < 1:
        raise ArgumentError(f"num_workers must be at least 1, got {num_workers}.")
    functions: list[Any] = list(create_env_fn) if isinstance(create_env_fn, Sequence) else [create_env_fn] * num_workers
    if len(functions) != num_workers:
        raise ArgumentError(
            f"There must be one create_env_fn for all workers or one per worker, got {len(functions)} for "
            f"{num_workers} workers."
        )
    for function in functions:
        if not callable(function):
            raise ArgumentTypeError(
                f"create_env_fn must be a function that creates an environment, or a list of these, got {function!r}: "
                "each worker creates its own. Pass a function, such as EnvCreator(lambda: GymEnv('CartPole-v1'))."
            )
    return functions


def written_keys(info: EnvInfo) -> tuple[list[NestedKey], list[NestedKey]]:
    """Return the keys of a root (without done flags) and those of ``next`` after a step (without the prefix)."""
    root = list(dict.fromkeys((*info.observation_spec.keys(True, True), *info.state_spec.keys(True, True))))
    return root, [*root, REWARD, *DONE_KEYS]


class SharedLayout(NamedTuple):
    """Entries of shared memory, each ``[num_workers, *B, ...]``."""

    given: list[Entry]
    """Entries that the workers read."""
    result: list[Entry]
    """Entries of ``next`` after a step."""
    fresh: list[Entry]
    """Entries of the root after a reset."""


def first_indices(functions: Sequence[object]) -> list[int]:
    """Return the index of the first occurrence of each distinct function."""
    return list({id(function): index for index, function in reversed(list(enumerate(functions)))}.values())[::-1]


def layout(info: EnvInfo, num_workers: int) -> SharedLayout:
    """Return the entries of the memory shared with ``num_workers`` environments.

    The action is one row of bytes per worker, 8 bytes per number, large enough for any encoding, including one-hot
    actions for integer specs. Unwritten bytes take no memory. Each part of a nested action is an entry with its spec.
    """
    specs: dict[NestedKey, TensorSpec] = {}
    for composite in (info.observation_spec, info.state_spec, info.done_spec):
        specs.update(composite.items(True, True))
    flags: list[tuple[NestedKey, TensorSpec]] = [(key, info.done_spec[key]) for key in DONE_KEYS]

    def entry(key: NestedKey, spec: TensorSpec) -> Entry:
        assert spec.dtype is not None
        return Entry(key, (num_workers, *spec.shape), spec.dtype)

    given = [entry(key, spec) for key, spec in specs.items()]
    given += [entry(next_key(key), spec) for key, spec in specs.items() if key not in DONE_KEYS]
    given.append(entry(RESET, info.done_spec[DONE]))
    action = info.action_spec_unbatched
    if isinstance(action, Composite):
        parts = Composite({ACTION: action.expand(info.batch_size)}, shape=info.batch_size)
        given += [entry(key, spec) for key, spec in parts.items(True, True)]
    else:
        numbers = max(action.shape.numel(), min(sum(choice_counts(action)), _MAX_ONE_HOT), 1)
        given.append(Entry(ACTION, (num_workers, 8 * numbers * info.batch_size.numel()), torch.uint8))
    states = [(key, spec) for key, spec in specs.items() if key not in DONE_KEYS]
    result = [entry(key, spec) for key, spec in (*states, (REWARD, info.reward_spec), *flags)]
    return SharedLayout(given, result, [entry(key, spec) for key, spec in states])


class Server:
    """Server that runs resets and steps of one environment through shared memory.

    Args:
        env: the environment.
        given: this worker's entries that the parent writes.
        result: this worker's entries of ``next``, written by the worker.
        fresh: this worker's entries of a root after a reset, written by the worker.
    """

    def __init__(
        self,
        env: EnvBase,
        given: dict[NestedKey, Tensor],
        result: dict[NestedKey, Tensor],
        fresh: dict[NestedKey, Tensor],
    ) -> None:
        self._env = env
        self._given = given
        self._result = result
        self._fresh = fresh
        self._root_keys, self._step_keys = written_keys(EnvInfo.of(env))
        forms = env.explain()
        self._lowered = forms["tensors"] is None
        # otherwise its own hooks are called
        make = env.in_place() if self._lowered and forms["in place"] is None else None
        self._in_place = make if make is not None and {*make.constants} == {(key,) for key in DONE_KEYS} else None
        if self._in_place is not None:
            self._after = {path_of(key): value.numpy()[None] for key, value in result.items()}
            self._roots = {path_of(key): value.numpy() for key, value in fresh.items()}

    def run(self, plan: Plan) -> None:
        """Run one reset or step."""
        if self._in_place is not None and plan.kind == "advance" and plan.action is not None and not plan.keys:
            self._in_place.begin(self._action(*plan.action)[None], self._after)
            if self._in_place.step(0):
                self._in_place.reset(0, self._roots)
            return
        td = self._read(plan)
        if plan.kind == "reset":
            self._write(self._env._root(td if plan.keys else None), self._root_keys, self._fresh)  # pyright: ignore[reportPrivateUsage] - the parent's reset checked the mask
            return
        if plan.kind == "step":
            self._write(self._env._next(td), self._step_keys, self._result)  # pyright: ignore[reportPrivateUsage] - the parent's step checked the root
            return
        after, fresh = self._env.advance(td)
        self._write(after, self._step_keys, self._result)
        if fresh is not None:
            self._write(fresh, self._root_keys, self._fresh)

    def _read(self, plan: Plan) -> Any:
        # Cloned, as the environment may keep references to its inputs.
        entries = {key: self._given[key].clone() for key in plan.keys if key != ACTION}
        if plan.action is not None:
            entries[ACTION] = self._action(*plan.action)
        if not self._lowered:
            return TensorDict(entries, self._env.batch_size, device=self._env.device)
        lowered = Entries({}, self._env.batch_size, self._env.device)
        for key, value in entries.items():
            lowered.set(key, value)
        return lowered

    def _action(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        used = dtype.itemsize * torch.Size(shape).numel()
        return self._given[ACTION][:used].clone().view(dtype).view(shape)

    def _write(self, td: Step, keys: list[NestedKey], slots: dict[NestedKey, Tensor]) -> None:
        for key in keys:
            value, slot = td.get(key, None), slots[key]
            if value is None:
                raise MissingKeyError(f"The environment declares the entry {key!r}, but did not return it.")
            if value.shape != slot.shape or value.dtype != slot.dtype:
                raise UsageError(
                    f"The environment declares the entry {key!r} as {slot.dtype} {list(slot.shape)}, but returned "
                    f"{value.dtype} {list(value.shape)}."
                )
            slot.copy_(value)


def serve_envs(channel: Channel, create_env_fn: Callable[[], EnvBase], index: int, count: int, workers: int) -> None:
    """Create environments and serve them until the parent closes them or exits.

    Args:
        channel: connection to the parent.
        create_env_fn: function that creates an environment.
        index: index of the worker.
        count: number of environments.
        workers: number of workers.
    """
    envs: list[EnvBase] = []
    try:
        envs.extend(make_env(create_env_fn) for _ in range(count))
        channel.send([EnvInfo.of(env) for env in envs])
        rounds = RoundServer(channel, index, count, workers)
        servers = [Server(env, *(_receive(channel, index) for _ in SharedLayout._fields)) for env in envs]
        _serve(channel, envs, servers, rounds)
    except Closed:
        pass
    finally:
        for env in envs:
            env.close()


def _receive(channel: Channel, index: int) -> dict[NestedKey, Tensor]:
    shared = channel.receive_memory(pickle.loads(channel.receive_bytes()))
    shared.close()
    return {key: tensor[index] for key, tensor in shared.tensors.items()}


def _serve(channel: Channel, envs: list[EnvBase], servers: list[Server], rounds: RoundServer) -> None:
    plans: dict[int, Plan] = {}
    while True:
        number = rounds.next_plan()
        while number is None or number not in plans:
            message = pickle.loads(channel.receive_bytes())
            if isinstance(message, Announcement):
                plans[message.number] = message.plan
            elif isinstance(message, Plan):
                _run(servers, message)
                channel.send()
            else:
                channel.send(_call(envs, *message))
            if number is None:
                break
        else:
            plan = plans[number]
            _run(servers, plan)
            rounds.answer(plan.place)


def _run(servers: list[Server], plan: Plan) -> None:
    with torch.no_grad():
        servers[plan.place].run(plan)


def _call(envs: list[EnvBase], name: str, place: int = 0, argument: Any = None) -> Any:
    if name == "close":
        raise Closed
    env = envs[place]
    if name == "set_seed":
        env.set_seed(argument)
    elif name == "state_obstacle":
        return env.state_obstacle
    else:
        functions = {"set_state": env.set_state, "set_parameters": env.set_parameters}
        try:
            return env.get_state() if name == "get_state" else functions[name](argument)
        except (ArgumentError, UnsupportedError, UnfitStateError) as error:  # sent as a reply, the worker continues
            return error
    return None
