"""In-place collection: steps read and write the memory of the batch and allocate no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from recurl.collectors.batch import BatchWriter
from recurl.core.keys import ACTION, DONE, NEXT, normalize_key, path_of
from recurl.core.spans import ACTING, ENVIRONMENT, measured
from recurl.envs import Act, EnvBase, InPlace, interact_in_turn
from recurl.envs.rollout import Write
from recurl.execution.compiled import CompiledNetwork, StepsInMemory
from recurl.execution.explain import NotCompiled
from recurl.sequences.entries import Entries, Step, leaves_by_path
from recurl.sequences.mode import set_recurrent_mode

__all__ = ["interact_and_write"]

_Path = tuple[str, ...]


def interact_and_write(
    envs: Sequence[EnvBase],
    policies: Sequence[Act | None],
    roots: Sequence[Step],
    writers: Sequence[BatchWriter],
    done: Sequence[list[Tensor]],
    stepped: Callable[[int], None],
    example: dict[_Path, Tensor],
) -> tuple[Tensor, list[Step], str | None]:
    """Run the steps of a batch and write it, in place if possible, with bitwise equal results.

    In the first batch, and if something has changed since, the first step is run by :func:`interact_in_turn`, which
    allocates the batch and determines its entries.

    Args:
        envs: groups of environments.
        policies: policy of each group.
        roots: initial root of each group.
        writers: writer of each group's rows of the batch.
        done: an empty list for each group, which grows with every step that isn't run in place.
        stepped: called with the number of rows after every step.
        example: entries of the first step of an earlier batch, used to allocate the next ones; empty at first.

    Returns:
        Whether a trajectory ended with the step, bool ``[*B, T]``; the next roots, with their done rows reset; and the
        reason why the steps weren't run in place, or None.
    """

    def write(number: int, step: int, tensordict: Step) -> None:
        writers[number].write(step, tensordict)
        done[number].append(tensordict.get(NEXT).get(DONE))
        stepped(tensordict.batch_size.numel())

    def run(rest: _StepsInPlace) -> tuple[Tensor, list[Step], None]:
        after = rest.run(write, stepped)
        writers[0].finish()
        return rest.done, [after], None

    steps, (policy, *others) = writers[0].steps, policies
    if others or not isinstance(policy, CompiledNetwork):
        reason = "the environment steps in groups" if others else "the policy isn't one call of the C++ library"
        roots = interact_in_turn(envs, policies, roots, steps, write=write)
    else:
        if example:
            with set_recurrent_mode(False), torch.no_grad(), suppress(NotCompiled):
                return run(_steps_in_place(envs[0], policy, roots[0], writers[0].allocated(example)))
            writers[0].clear()
            example.clear()
        roots = interact_in_turn(envs, policies, roots, 1, write=write)
        with set_recurrent_mode(False), torch.no_grad():
            try:
                rest = _steps_in_place(envs[0], policy, roots[0], writers[0].memory(), first=1)
            except NotCompiled as why:
                reason = str(why)
            else:
                example.update((path, value[0].clone()) for path, value in rest.memory.items())
                return run(rest)
        roots = interact_in_turn(envs, policies, roots, steps - 1, write=write, first=1)
    for writer in writers:
        writer.finish()
    ended = [torch.cat(found, -1) for found in done]
    return ended[0] if len(ended) == 1 else torch.cat(ended), roots, reason


def _steps_in_place(
    env: EnvBase, policy: CompiledNetwork, root: Any, memory: dict[_Path, Tensor] | None, first: int = 0
) -> _StepsInPlace:
    """Return the in-place steps of a batch from step ``first`` on.

    Raises:
        NotCompiled: they are not possible; the message is the reason.
    """
    make = env.in_place()
    if memory is None:
        raise NotCompiled("the batch isn't written in one piece on the host")
    act = policy.in_memory(root, {normalize_key(path): value for path, value in memory.items()})
    roots, reads, writes = list(leaves_by_path(root)), map(path_of, act.reads), map(path_of, act.writes)
    sources = Counter([*roots, *writes, *((NEXT, *path) for path in make.after)])
    unexpected = [path for path, count in sources.items() if count > 1] + sorted(memory.keys() ^ sources.keys())
    unexpected += sorted({*make.roots}.symmetric_difference(roots) | set(reads).difference(roots))
    if unexpected or (ACTION,) not in memory:
        raise NotCompiled(f"the policy or the environment has unexpected entries: {unexpected or ACTION}")
    for path, value in leaves_by_path(root).items():
        if value.shape != memory[path].shape[1:] or value.dtype is not memory[path].dtype:
            raise NotCompiled(f"{path} isn't as in the batch before")
    return _StepsInPlace(env, act, make, memory, root, first)


class _StepsInPlace:
    """The steps of a batch, from the first or second one on.

    Args:
        env: the environment.
        act: computes the actions and states of a step.
        make: runs the steps of the environment.
        memory: entries of the batch, ``[T, *B, ...]``.
        root: root of the first of these steps.
        first: index of this step.

    Attributes:
        memory: entries of the batch, as passed.
        done: whether a trajectory ended with a step, bool ``[*B, T]``, valid once the step was run.
    """

    def __init__(
        self, env: EnvBase, act: StepsInMemory, make: InPlace, memory: dict[_Path, Tensor], root: Entries, first: int
    ) -> None:
        self._env, self._act, self._make, self.memory = env, act, make, memory
        self._first, self._steps = first, len(memory[ACTION,])
        self.done = memory[NEXT, DONE].squeeze(-1).movedim(0, -1)
        self._last = {path: torch.empty_like(value) for path, value in leaves_by_path(root).items()}
        after = {path: memory[NEXT, *path].numpy() for path in {*self._last, *make.after}}
        self._roots = {path: (memory[path].numpy(), last.numpy()) for path, last in self._last.items()}
        self._carried: list[tuple[Any, Any, Any]] = []
        for path, (roots, last) in self._roots.items():
            constant = make.constants.get(path)
            if constant is None or constant.after_step is None:
                self._carried.append((roots, last, after[path]))
            else:  # flags written by the environment are set again at every step
                roots[first:] = after[path][first:] = last[...] = constant.after_step
        make.begin(memory[ACTION,].numpy(), after)
        self._set_root(first, root)

    def run(self, write: Write, stepped: Callable[[int], None]) -> Entries:
        """Run the steps and return the next root; see :func:`interact_and_write`."""
        rows = self._env.batch_size.numel()
        act, advance = measured(ACTING, self._act), measured(ENVIRONMENT, self._advance)
        for step in range(self._first, self._steps):
            if act(step):
                advance(step)
                stepped(rows)
            else:
                self._step_with_modules(step, write)
        return self._entries(self._last)

    def _advance(self, step: int) -> None:
        """Run a step of the environment, and write the root after it."""
        any_done, following = self._make.step(step), step + 1
        if following < self._steps:
            for roots, _, after in self._carried:
                roots[following] = after[step]
        else:
            for _, last, after in self._carried:
                last[...] = after[step]
        if any_done:
            self._make.reset(step, self._root_at(following))

    def _root_at(self, step: int) -> dict[_Path, Any]:
        """Return the memory of the root of a step; the root after the last step is not in the batch."""
        return {path: roots[step, ...] if step < self._steps else last for path, (roots, last) in self._roots.items()}

    def _set_root(self, step: int, root: Any) -> None:
        there = self._root_at(step)
        for path, value in leaves_by_path(root).items():
            there[path][...] = value.numpy()

    def _step_with_modules(self, step: int, write: Write) -> None:
        """Run a step with the policy's modules and the environment's own methods."""

        def act(root: Any) -> Step:
            self._act.run_modules(root)
            return root

        root = self._entries({path: self.memory[path][step].clone() for path in self._roots})
        (root,) = interact_in_turn([self._env], [act], [root], 1, write=write, first=step)
        self._set_root(step + 1, root)

    def _entries(self, values: dict[_Path, Tensor]) -> Entries:
        entries = Entries({}, self._env.batch_size, self._env.device)
        for path, value in values.items():
            entries.set(normalize_key(path), value)
        return entries
