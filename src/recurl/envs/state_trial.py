"""Trial that checks whether the state of an environment can be saved and restored."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tensordict import TensorDictBase

from recurl.core.keys import ACTION, NEXT
from recurl.core.seeding import preserved_rng
from recurl.envs.base import EnvBase
from recurl.envs.state_plain import UnsavableError

__all__ = ["obstacle"]

_TIMEOUT_SECONDS = 10.0


class _TrialTimeoutError(Exception):
    pass


def obstacle(make: Callable[[], EnvBase], steps: int = 20) -> str | None:
    """Return the reason why a saved state doesn't reproduce an environment's behavior in another instance, or None.

    One environment steps, and its state is saved and restored in a second one. Both then take the same actions, across
    a reset, and must return the same results. The global random generators are restored afterwards.

    Args:
        make: function that creates an environment.
        steps: number of steps after the state is restored; half as many follow each of two resets before.
    """
    end = time.monotonic() + _TIMEOUT_SECONDS
    try:
        with preserved_rng(), warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            original = stack.enter_context(make())
            if time.monotonic() > end:
                raise _TrialTimeoutError
            return _first_difference(original, stack.enter_context(make()), steps, end)
    except _TrialTimeoutError:
        return f"a trial of it takes longer than {_TIMEOUT_SECONDS:g} s"
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        if isinstance(error.__cause__, UnsavableError):
            return str(error.__cause__)
        return f"a trial of it raised {type(error).__name__}: {error}"


def _first_difference(original: EnvBase, copy: EnvBase, steps: int, end: float) -> str | None:
    original.set_seed(0)
    for begin in (original.reset(), original.reset()):
        root = begin
        for _ in range(steps // 2):
            root = _step(original, original.rand_action(root), end)[1]
    copy.set_state(original.get_state())
    roots = root, root.clone()
    for count in (steps, 1 + steps // 4):
        for step in range(count):
            action = original.rand_action(roots[0])[ACTION]
            mine, theirs = (
                _step(env, each.set(ACTION, action.clone()), end)
                for env, each in zip((original, copy), roots, strict=True)
            )
            found = _differing_key(mine[0][NEXT], theirs[0][NEXT]) or _differing_key(mine[1], theirs[1])
            if found is not None:
                return f"{found!r} of step {step + 1} after saving differs once the state is restored"
            roots = mine[1], theirs[1]
        roots = original.reset(), copy.reset()
        found = _differing_key(*roots)
        if found is not None:
            return f"{found!r} after a reset differs once the state is restored"
    return None


def _step(env: EnvBase, root: TensorDictBase, end: float) -> tuple[TensorDictBase, TensorDictBase]:
    if time.monotonic() > end:
        raise _TrialTimeoutError
    return env.step_and_maybe_reset(root)


def _differing_key(mine: TensorDictBase, theirs: TensorDictBase) -> Any:
    """Return the key of the first entry that isn't bitwise equal, or None."""
    for key in mine.keys(True, True):
        values = mine[key].cpu(), theirs[key].cpu()
        if values[0].shape != values[1].shape or values[0].numpy().tobytes() != values[1].numpy().tobytes():
            return key
    return None
