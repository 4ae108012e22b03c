"""Environments in worker processes: the parent's side of shared memory, and groups of rows that step in turn."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, RecurlError, UsageError
from recurl.core.keys import ACTION, DONE, NEXT, RESET, NestedKey, next_key
from recurl.core.torch_compat import edits_of
from recurl.envs.base import EnvBase
from recurl.envs.batched import BatchedEnv, CreateEnv
from recurl.envs.grouped import GroupedEnv
from recurl.envs.parameters import Parameter
from recurl.envs.transfers import Download, Upload
from recurl.envs.workers import Reply, WorkerGroup, WorkerTask
from recurl.envs.workers_env import Announcement, EnvInfo, Plan, creators, first_indices, layout, serve_envs
from recurl.envs.workers_memory import SharedTensors
from recurl.envs.workers_rounds import Rounds
from recurl.sequences.entries import Step, leaves, like, takes_entries
from recurl.transforms.base import makes_memory, reset_mask

__all__ = ["ParallelEnv", "Requests", "parallel_groups"]


class Requests(Rounds):
    """Requests to workers that each serve several environments, independently of each other.

    A worker replies in the order of the requests. Replies for environments other than the awaited one are stored.

    Args:
        group: the worker processes.
        count: number of environments per worker.
    """

    def __init__(self, group: WorkerGroup, count: int) -> None:
        super().__init__(group, count)
        self._requested: list[deque[int]] = [deque() for _ in group.workers]
        self._replies: list[dict[int, Any]] = [{} for _ in range(count)]

    def announce(self, number: int, plan: Any) -> None:
        """Assign a number to a plan in all workers."""
        message = pickle.dumps(Announcement(number, plan))
        for index in range(len(self._requested)):
            self.group.ask(index, message)

    def ask_all(self, plan: Plan) -> None:
        """Tell all workers at once to run a plan; :meth:`answers` waits for them."""
        with self._all_or_nothing():
            self.begin(plan.place, plan)

    def ask(self, place: int, index: int, message: bytes, *, makes_envs: bool = False) -> None:
        """Send a request to a worker for its environment ``place``; see :meth:`WorkerGroup.ask`."""
        self._requested[index].append(place)
        self.group.ask(index, message, makes_envs=makes_envs)

    def answers(self, place: int, indices: Collection[int]) -> list[Any]:
        """Wait for the replies of these workers for their environments ``place``, and return them in worker order.

        After :meth:`ask_all`, wait until all workers have finished and return an empty list.

        Raises:
            WorkerError: see :meth:`WorkerGroup.answers`.
            RecurlError: likewise.
        """
        with self._all_or_nothing():
            if self.is_running(place):
                self.finish(place)
                return []
            kept = self._replies[place]
            pending = set(indices).difference(kept)
            while pending:
                for reply in self.group.replies(pending):
                    self.take(reply)
                pending.difference_update(kept)
        return [kept.pop(index) for index in sorted(indices)]

    def take(self, reply: Reply) -> None:
        """Store a reply, or raise its error."""
        if reply.error is not None:
            raise reply.error
        self._replies[self._requested[reply.worker].popleft()][reply.worker] = reply.value

    @contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """Stop all workers on an error or interrupt: outstanding replies would be mistaken for later ones."""
        try:
            yield
        except BaseException:
            self.group.kill()
            raise

    def close(self) -> None:
        """Tell the workers to exit, and free the resources shared with them."""
        self.group.close()
        self.free()


class _HostCopy:
    """Tensor along with a copy of its values on the host.

    Args:
        tensor: the tensor.
        host: its values on the host.
    """

    def __init__(self, tensor: Tensor, host: Tensor) -> None:
        self.host = host
        self._tensor = tensor
        self._edits = None if tensor.is_inference() else edits_of(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is this tensor and has not been modified since."""
        return tensor is self._tensor and self._edits is not None and edits_of(tensor) == self._edits


class _WorkerRows(BatchedEnv):
    """Batch of environments in worker processes, one per worker.

    Args:
        workers: the workers.
        place: index of the environment within each worker.
        infos: properties of the environments.
        concatenate: see :class:`ParallelEnv`.
        device: see :class:`ParallelEnv`.
    """

    def __init__(
        self,
        workers: Requests,
        place: int,
        infos: Sequence[EnvInfo],
        *,
        concatenate: bool,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(infos, concatenate=concatenate, device=device)
        self._workers, self._place, self._group = workers, place, workers.group
        memory = [SharedTensors(entries) for entries in layout(infos[0], len(infos))]
        for shared in memory:
            self._group.ask_all(*shared.entries)
            for index in range(len(infos)):
                self._group.send_memory(index, shared)
            shared.close()
        given, result, fresh = memory
        self._action_bytes = given.tensors.get(ACTION)
        self._action_slots: dict[torch.dtype, Tensor] = {}
        self._inputs = {key: self._batched_view(value) for key, value in given.tensors.items() if key != ACTION}
        self._done_flags = self._batched_view(result.tensors[DONE])
        self._results, self._roots = (
            Upload(shared, {key: self._batched_view(value).shape for key, value in shared.tensors.items()}, self.device)
            for shared in (result, fresh)
        )
        self._download = Download(self.device)
        self._read_keys = self._carried if infos[0].reads_root else list(infos[0].state_spec.keys(True, True))
        self._pending: Any = None  # action of a started step
        self._advanced = False  # whether done rows have already been reset
        self._last_done: _HostCopy | None = None  # done flags of the last step
        self._obstacles: list[str | None] | None = None  # to saving the state; None until the workers are queried

    def _batched_view(self, tensor: Tensor) -> Tensor:
        """Return a view of ``[num_workers, *B, ...]`` whose shape starts with the batch size."""
        return tensor.view(*self.batch_size, *tensor.shape[1 + len(self._each) :])

    def begin_step(self, tensordict: Step) -> None:
        """Send the action to the workers; see :meth:`EnvBase.begin_step`."""
        self._send_step("advance", tensordict)
        self._pending = tensordict.get(ACTION)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step) -> Step:
        pending, self._pending = self._pending, None
        if pending is None:
            self._send_step("step", tensordict)
        elif pending is not tensordict.get(ACTION):
            self._workers.answers(self._place, range(self.num_workers))
            raise UsageError("A step must be finished with the same root and action that begin_step got.")
        self._workers.answers(self._place, range(self.num_workers))
        self._advanced = pending is not None
        after = like(tensordict, self._results(self._step_keys), self.batch_size, self.device)
        self._last_done = _HostCopy(after.get(DONE), self._done_flags.clone())
        return after

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None) -> Step:
        mask = reset_mask(tensordict)
        entries: dict[NestedKey, Tensor] = {}
        if tensordict is not None:
            entries = {key: tensordict.get(key) for key in self._read_keys if key in tensordict}
        advanced, self._advanced = self._advanced, False
        if mask is None or not advanced:
            fresh = self._fresh_root(entries, mask)
        else:
            ready, host = self._done_flags.clone(), self._on_host(mask)
            fresh = self._roots(self._root_keys)
            rest = host & ~ready  # rows that only a transform has ended
            if rest.any():
                others = self._fresh_root(entries, rest)
                reset_early = ready.to(mask.device)
                fresh = {key: _where(reset_early, fresh[key], others[key]) for key in fresh}
        return like(tensordict, fresh, self.batch_size, self.device)

    def has_any(self, rows: Tensor) -> bool:
        """Return whether the mask selects any row; known from the workers if it is ``done`` of the last step."""
        return bool(self._on_host(rows).any())

    def _on_host(self, rows: Tensor) -> Tensor:
        return rows.cpu() if self._last_done is None or not self._last_done.holds(rows) else self._last_done.host

    def _fresh_root(self, entries: dict[NestedKey, Tensor], mask: Tensor | None) -> dict[NestedKey, Tensor]:
        self._finish_pending()
        indices = self._envs_to_reset(mask)
        self._send("reset", entries if mask is None else {**entries, RESET: mask}, None, indices)
        self._workers.answers(self._place, indices)
        return self._roots(self._root_keys)

    def _finish_pending(self) -> None:
        """Wait for a started step whose result will not be used."""
        self._group.check_open()
        if self._pending is not None:
            self._pending = None
            self._workers.answers(self._place, range(self.num_workers))
        self._advanced = False

    def _send_step(self, kind: str, tensordict: Step) -> None:
        self._finish_pending()
        entries = {key: tensordict.get(key) for key in self._read_keys if key in tensordict}
        if NEXT in tensordict:
            after = tensordict.get(NEXT)
            entries.update({next_key(key): after.get(key) for key in self._root_keys if key in after})
        action: Any = tensordict.get(ACTION)
        if isinstance(action, Tensor):
            return self._send(kind, entries, action, range(self.num_workers))
        entries.update({(ACTION, *path): value for path, value in leaves(action)})
        return self._send(kind, entries, None, range(self.num_workers))

    def _send(self, kind: str, entries: dict[NestedKey, Tensor], action: Tensor | None, workers: Sequence[int]) -> None:
        self._results.wait()
        self._roots.wait()
        for key, value in entries.items():
            slot = self._inputs.get(key)
            if slot is None:
                raise ArgumentError(f"The action must fit {self.action_spec}, got a part {key!r}.")
            if value.shape != slot.shape or value.dtype != slot.dtype:
                raise ArgumentError(
                    f"The entry {key!r} must be {slot.dtype} {list(slot.shape)}, as the environment declares it; got "
                    f"{value.dtype} {list(value.shape)}."
                )
            slot.copy_(value)
        written = None if action is None else self._write_action(action)
        plan = Plan(self._place, cast(Any, kind), tuple(entries), written)
        if len(workers) == self.num_workers:
            return self._workers.ask_all(plan)
        message = pickle.dumps(plan)
        for index in workers:
            self._workers.ask(self._place, index, message)
        return None

    def _write_action(self, action: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        """Write the action, in any encoding, to shared memory; return the dtype and shape of one worker's action."""
        shape = torch.Size([*self._each, *action.shape[len(self.batch_size) :]])
        used = shape.numel() * action.dtype.itemsize
        if self._action_bytes is None or used > self._action_bytes.shape[1]:
            raise ArgumentError(f"The action must fit {self.action_spec}, got {action.dtype} {list(action.shape)}.")
        slots = self._action_slots.get(action.dtype, None)
        if slots is None or slots.shape[1] * slots.itemsize != used:
            slots = self._action_slots[action.dtype] = self._action_bytes[:, :used].view(action.dtype)
        slots.copy_(self._download(action).reshape(self.num_workers, -1))
        return action.dtype, tuple(shape)

    def _ask_all(self, *requests: tuple[Any, ...]) -> list[Any]:
        """Send one request per worker, a name and an optional argument, and return the replies."""
        self._finish_pending()
        for index, (name, *arguments) in enumerate(requests):
            self._workers.ask(self._place, index, pickle.dumps((name, self._place, *arguments)))
        return self._workers.answers(self._place, range(self.num_workers))

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        _raise_errors(self._ask_all(*[("set_parameters", values)] * self.num_workers))

    def _set_seed(self, seed: int) -> None:
        self._ask_all(*[("set_seed", seed + index * self._rows) for index in range(self.num_workers)])

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state of an environment can't be saved; None if all can.

        The first access checks one worker per distinct environment function.
        """
        if self._obstacles is None:
            self._finish_pending()
            asked = first_indices([task.arguments[0] for task in self._group.tasks])
            for index in asked:
                request = pickle.dumps(("state_obstacle", self._place))
                self._workers.ask(self._place, index, request, makes_envs=True)
            self._obstacles = self._workers.answers(self._place, asked)
        return next((found for found in self._obstacles if found is not None), None)

    def get_state(self) -> dict[str, Any]:
        """Return the states of all environments.

        Raises:
            UnsupportedError: an environment can't save its state.
        """
        if not self.can_save_state:
            return super().get_state()
        return {"envs": _raise_errors(self._ask_all(*[("get_state",)] * self.num_workers))}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore states returned by :meth:`get_state`.

        Raises:
            UnfitStateError: a state doesn't fit its environment.
        """
        _raise_errors(self._ask_all(*[("set_state", saved) for saved in self._saved_envs(state)]))

    def _close(self) -> None:
        self._workers.close()


def _raise_errors(answers: list[Any]) -> list[Any]:
    """Return the replies of workers, or raise the first one that is an error."""
    for answer in answers:
        if isinstance(answer, RecurlError):
            raise answer
    return answers


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Return ``yes`` in the rows of the mask ``[*B, 1]`` and ``no`` elsewhere."""
    mask = rows if rows.ndim == yes.ndim else rows.view(*rows.shape[:-1], *(1,) * (yes.ndim - rows.ndim + 1))
    return torch.where(mask, yes, no)


def _start_workers(
    num_workers: int, create_env_fn: CreateEnv | Sequence[CreateEnv], timeout: float | None, count: int
) -> Requests:
    functions = creators(num_workers, create_env_fn)
    tasks = [WorkerTask(serve_envs, (function, index, count, num_workers)) for index, function in enumerate(functions)]
    return Requests(WorkerGroup(tasks, timeout), count)


class ParallelEnv(_WorkerRows):
    """Environments stepped in parallel, each in its own worker process.

    Workers are forked from a new interpreter, which imports the library once for all of them, and never from this
    process. Data is exchanged through anonymous shared memory. The main script needs no ``if __name__ == "__main__"``
    guard. Environments that this process has registered with ``gymnasium.register``, including those of the main
    script, are registered in the workers too. If a worker raises, dies, or hangs, the call raises with the worker's
    traceback as its cause, and all workers are stopped. Workers also exit when this object is closed or
    garbage-collected, and when this process dies.

    Transforms may be inside (in the workers) or outside (around the batch). Recurrent states declared by primers inside
    are exchanged like any other entry. Requires a POSIX system such as Linux or macOS.

    Args:
        num_workers: number of environments. The batch size is ``[num_workers, *B]``, where ``[*B]`` is the batch size
            of each environment.
        create_env_fn: function that creates an environment, or a list of ``num_workers`` such functions. All
            environments must have the same specs. Functions are pickled like :class:`EnvCreator`.
        timeout: seconds after which a reset or step raises because the worker hangs; None for no limit.
        concatenate: concatenate the rows of all workers into one dimension, ``[num_workers * B]``.
        device: device of the tensors in this process; the environments' device when None. If it is a GPU, keep the
            environments on the CPU: their results are then copied to the GPU from page-locked memory, all entries at
            once.

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
        device: torch.device | str | None = None,
    ) -> None:
        workers = _start_workers(num_workers, create_env_fn, timeout, 1)
        infos = [greeting[0] for greeting in workers.group.greetings]
        try:
            super().__init__(workers, 0, infos, concatenate=concatenate, device=device)
        except BaseException:
            workers.group.close()
            raise


def parallel_groups(
    num_groups: int,
    num_workers: int,
    create_env_fn: CreateEnv | Sequence[CreateEnv],
    *,
    timeout: float | None = 9.0,
    device: torch.device | str | None = None,
) -> GroupedEnv:
    """Return groups of environments in worker processes. Each worker has one environment of every group.

    While the workers step one group, the actions of another can be computed (double-buffered sampling), as a
    :class:`~recurl.collectors.Collector` does.

    Args:
        num_groups: number of groups.
        num_workers: number of worker processes.
        create_env_fn: function that creates the environment ``[B]`` of one group and worker, called ``num_groups``
            times in each worker; or a list of ``num_workers`` such functions.
        timeout: see :class:`ParallelEnv`.
        device: see :class:`ParallelEnv`.

    Returns:
        One environment of ``[num_groups * num_workers * B]`` rows, ordered by group and, within a group, by worker.

    Raises:
        ArgumentError: see :class:`ParallelEnv`; or ``num_groups`` is below 1.

    Example:
        >>> from recurl.envs import GymEnv
        >>> with parallel_groups(2, 1, lambda: GymEnv("CartPole-v1", num_envs=3)) as env:
        ...     env.batch_size, [group.batch_size for group in env.groups]
        (torch.Size([6]), [torch.Size([3]), torch.Size([3])])
    """
    if num_groups < 1:
        raise ArgumentError(f"num_groups must be at least 1, got {num_groups}.")
    workers = _start_workers(num_workers, create_env_fn, timeout, num_groups)
    try:
        greetings: list[list[EnvInfo]] = workers.group.greetings
        groups: list[EnvBase] = [
            _WorkerRows(workers, place, [found[place] for found in greetings], concatenate=True, device=device)
            for place in range(num_groups)
        ]
        return GroupedEnv(groups)
    except BaseException:
        workers.group.close()
        raise
