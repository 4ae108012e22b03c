"""Functions on a single MDP step: the next root, and the done flags."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.keys import ACTION, DONE, DONE_KEYS, NEXT, RESET, REWARD, TERMINATED, TRUNCATED, normalize_key
from recurl.core.specs import Composite
from recurl.sequences.entries import Step, leaves_by_path

__all__ = ["check_not_stale", "check_reset", "complete_done_flags", "keep_policy_entries", "step_mdp"]


def step_mdp(
    tensordict: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
) -> TensorDict:
    """Return the root after a step: the entries of ``"next"``, promoted.

    Tensors are shared with ``tensordict``, not copied.

    Args:
        tensordict: result of ``env.step``, of any batch size.
        keep_other: keep root entries that have no counterpart under ``"next"``.
        exclude_reward: drop the reward.
        exclude_done: drop ``done``, ``terminated``, and ``truncated``.
        exclude_action: drop the action.

    Raises:
        MissingKeyError: ``tensordict`` has no ``"next"``.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"observation": torch.zeros(1), "next": {"observation": torch.ones(1)}})
        >>> step_mdp(td)["observation"]
        tensor([1.])
    """
    after = tensordict.get(NEXT, None)
    if after is None:
        raise MissingKeyError(f"step_mdp needs the result of env.step, with 'next', got {list(tensordict.keys())}.")
    out = tensordict.exclude(NEXT) if keep_other else TensorDict({}, tensordict.batch_size, device=tensordict.device)
    out = out.copy().update(after.copy())
    excluded = [REWARD] * exclude_reward + [*DONE_KEYS] * exclude_done + [ACTION] * exclude_action
    for key in excluded:
        out.pop(key, None)
    return out


def complete_done_flags(after: Step) -> None:
    """Add missing flags among ``done``, ``terminated``, and ``truncated`` to the result of a step.

    Raises:
        MissingKeyError: all three are missing.
    """
    known = [after.get(key) for key in DONE_KEYS if key in after]
    if not known:
        raise MissingKeyError("A step must return 'done', or 'terminated' and 'truncated', but returned none of them.")
    none = torch.zeros_like(known[0])
    if TERMINATED not in after:
        truncated = after.get(TRUNCATED, none)
        after.set(TERMINATED, after.get(DONE) & ~truncated if DONE in after else none)
    if TRUNCATED not in after:
        after.set(TRUNCATED, after.get(DONE) & ~after.get(TERMINATED) if DONE in after else none)
    after.set(DONE, after.get(TERMINATED) | after.get(TRUNCATED))


def check_reset(tensordict: TensorDictBase | None, batch_size: torch.Size, seed: int | None) -> None:
    """Check that the mask ``"_reset"`` is bool ``[*B, 1]`` or ``[*B]``, and that no seed is given along with it.

    Raises:
        ArgumentError: the mask has another shape or dtype, or a seed is given.
    """
    if tensordict is None or RESET not in tensordict:
        return
    mask = tensordict.get(RESET)
    if mask.dtype != torch.bool or mask.shape not in (batch_size, (*batch_size, 1)):
        raise ArgumentError(f"'_reset' must be bool of shape {[*batch_size, 1]}, got {mask.dtype} {list(mask.shape)}.")
    if seed is not None:
        raise ArgumentError("A seed applies to all rows: pass it to a reset without '_reset'.")


def keep_policy_entries(given: Step, after: Step) -> None:
    """Copy to ``after`` the entries of ``given``, written by the policy under ``"next"``, that ``after`` lacks."""
    for name, value in given.items():
        if name not in after:
            after.set(name, value)
        elif not isinstance(value, Tensor):
            keep_policy_entries(value, after.get(name))


def check_not_stale(given: Step, observations: Composite, states: Composite) -> None:
    """Raise if the root was already stepped and ``next`` holds new states.

    Raises:
        UsageError: the root is stale; the message names the states.
    """
    known = {*observations.keys(True, True), *DONE_KEYS, REWARD}
    written = map(normalize_key, leaves_by_path(given))
    stale = dict.fromkeys((*states.keys(True, True), *(key for key in written if key not in known)))
    if stale:
        raise UsageError(
            f"This TensorDict was already stepped and holds new states {sorted(stale, key=str)} under 'next', while "
            "its root still holds the old ones: continue from step_mdp(tensordict), or use env.step_and_maybe_reset."
        )
