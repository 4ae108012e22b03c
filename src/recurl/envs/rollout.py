"""Interaction loop: the only place where a policy acts in an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from recurl.core.errors import ArgumentError
from recurl.core.keys import COLLECTOR, DONE, NEXT, TRAJ_IDS, TRAJ_STEPS, TRUNCATED
from recurl.core.spans import ACTING, ENVIRONMENT, span
from recurl.envs.wiring import Declares, check_policy_wiring
from recurl.sequences.entries import Step
from recurl.sequences.index import SequenceIndex
from recurl.sequences.mode import set_recurrent_mode
from recurl.sequences.trajectories import TRAJECTORY_IDS, mask_absent_agents

Policy: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
Act: TypeAlias = Callable[[Any], Step]
"""Policy that maps a TensorDict, or a lowered ``Step``, to one with the action."""
Write: TypeAlias = Callable[[int, int, Any], Any]
"""Callback for a step: environment number, step index, and the TensorDict after the step."""


class Environment(Declares, Protocol):
    """Environment interface required by the interaction loop; see ``EnvBase``."""

    batch_size: torch.Size
    device: torch.device | None

    def step(self, tensordict: Any) -> Any:
        """Take one step."""
        ...

    def carry(self, tensordict: Any) -> Any:
        """Return the root after a step."""
        ...

    def maybe_reset(self, tensordict: Any) -> Any:
        """Reset the done rows of a root."""
        ...

    def begin_step(self, tensordict: Any) -> None:
        """Start a step, and the reset after it, without waiting for the results."""
        ...

    def rand_action(self, tensordict: Any) -> Any:
        """Write a random action."""
        ...


_E = TypeVar("_E", bound=Environment)


def interact(
    env: Environment,
    policy: Act | None,
    td: Step,
    steps: int,
    *,
    write: Callable[[int, Any], Any],
    stop: Callable[[Any], bool] | None = None,
) -> Step:
    """Take ``steps`` steps from the root ``td`` and return the next root, with its done rows reset.

    Runs without gradients and in sequential mode, regardless of the current mode.

    Args:
        env: the environment.
        policy: maps a root to one with ``"action"`` (and its new states under ``"next"``); random actions when None.
        td: root to start from.
        steps: number of steps.
        write: called with the index of the step and the TensorDict after it (root, action, ``next``). The loop does not
            modify the TensorDict afterwards; its tensors may be shared with the next root.
        stop: called after ``write`` with the same TensorDict. If it returns True, the loop ends and done rows are not
            reset.
    """
    with set_recurrent_mode(False), torch.no_grad():
        for index in range(steps):
            td = env.step(env.rand_action(td) if policy is None else policy(td))
            write(index, td)
            root = env.carry(td)
            if stop is not None and stop(td):
                return root
            td = env.maybe_reset(root)
    return td


def interact_in_turn(
    envs: Sequence[Environment],
    policies: Sequence[Act | None],
    roots: Sequence[Step],
    steps: int,
    *,
    write: Write,
    first: int = 0,
) -> list[Step]:
    """Take ``steps`` steps in each of several environments and return their next roots, with done rows reset.

    The environments take turns at every step: while one steps in its worker processes (if it has any), actions are
    computed for the next. At each step, policies are called in the order of the environments.

    Args:
        envs: the environments.
        policies: one policy per environment; see :func:`interact`.
        roots: one root per environment to start from.
        steps: number of steps.
        write: called with the number of the environment, the index of the step, and the TensorDict after it.
        first: index of the first step.
    """
    with set_recurrent_mode(False), torch.no_grad():
        turns = [
            _take_turns(env, policy, root, range(first, first + steps), partial(write, number))
            for number, (env, policy, root) in enumerate(zip(envs, policies, roots, strict=True))
        ]
        after = list(roots)
        for _ in range(steps + 1):
            after = [next(turn) for turn in turns]
    return after


def _take_turns(
    env: Environment, policy: Act | None, td: Step, steps: range, write: Callable[[int, Any], Any]
) -> Iterator[Step]:
    """Take steps, yielding while each one is in progress, and finally yield the next root."""
    for index in steps:
        with span(ACTING):
            td = env.rand_action(td) if policy is None else policy(td)
        with span(ENVIRONMENT):
            env.begin_step(td)
        yield td
        with span(ENVIRONMENT):
            td = env.step(td)
        write(index, td)
        with span(ENVIRONMENT):
            td = env.maybe_reset(env.carry(td))
    yield td


def rollout(
    env: _E,
    td: TensorDictBase,
    max_steps: int,
    policy: Policy | None,
    *,
    callback: Callable[[_E, TensorDictBase], Any] | None,
    break_when: Callable[[Iterable[bool]], bool] | None,
    cast: bool,
    set_truncated: bool,
) -> TensorDict:
    """Return a rollout of up to ``max_steps`` steps from the root ``td`` as ``[*B, T]``; see ``EnvBase.rollout``.

    Args:
        env: the environment.
        td: root to start from.
        max_steps: maximum number of steps, at least 1.
        policy: see :func:`interact`.
        callback: called with ``env`` and the TensorDict after every step.
        break_when: ``any`` or ``all``: stop once any row, or every row, has been done. None: never stop early.
        cast: call the policy on the device of its parameters.
        set_truncated: set ``truncated`` and ``done`` at the last step of rows that aren't done.

    Raises:
        ArgumentError: ``max_steps`` is below 1.
        WiringError: the policy has a state that the environment would not feed back.
        MissingKeyError: the policy reads ``is_init``, but the environment has no InitTracker.
    """
    if max_steps < 1:
        raise ArgumentError(f"max_steps must be at least 1, got {max_steps}.")
    if policy is not None:
        check_policy_wiring(policy, env)
    td = td.exclude(COLLECTOR)  # drop the ids of an earlier rollout or batch
    written: list[TensorDictBase] = []
    finished = torch.zeros((*env.batch_size, 1), dtype=torch.bool, device=env.device)

    def write(_: int, td: TensorDictBase) -> None:
        written.append(td)
        if callback is not None:
            callback(env, td)

    def stop(td: TensorDictBase) -> bool:
        finished.logical_or_(td.get((NEXT, DONE)))
        return bool(break_when is not None and break_when(finished.flatten().tolist()))

    interact(env, _casting(policy, env) if cast else policy, td, max_steps, write=write, stop=stop)
    if set_truncated:
        _truncate(written[-1].get(NEXT))
    return _stack(written, env)


def _stack(written: list[TensorDictBase], env: Environment) -> TensorDict:
    out = cast(TensorDict, lazy_stack(written, len(env.batch_size)).contiguous())
    _number(out)
    out.refine_names(..., "time")
    return out


def _number(out: TensorDict) -> None:
    """Write the trajectory id of each of the ``[*B, T]`` steps, and its step number within the trajectory."""
    index = SequenceIndex.of(out.select(), done=out.get((NEXT, DONE)))
    ids = TRAJECTORY_IDS.take(torch.Size([int(index.num_segments)]), out.device)
    out.set(TRAJ_IDS, ids[index.segment_ids].reshape(out.batch_size))
    out.set(TRAJ_STEPS, index.positions.reshape(out.batch_size))
    mask_absent_agents(out)


def _truncate(after: TensorDictBase) -> None:
    open_rows = ~after.get(DONE)
    after.set(TRUNCATED, after.get(TRUNCATED) | open_rows)
    after.set(DONE, torch.ones_like(open_rows))


def _casting(policy: Policy | None, env: Environment) -> Policy | None:
    if policy is None:
        return None
    parameters = getattr(policy, "parameters", tuple)
    device = next((parameter.device for parameter in parameters()), env.device)
    return lambda td: policy(td.to(device)).to(env.device or "cpu")
