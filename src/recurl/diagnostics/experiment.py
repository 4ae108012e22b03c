"""Helpers of the experiments: inputs of a policy, comparison of outputs, required entries of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import DONE, IS_INIT, NEXT, TRAJ_IDS, NestedKey, is_action, next_key
from recurl.core.seeding import derive_seed
from recurl.diagnostics.preserve import rounded_weights
from recurl.diagnostics.result import PROBLEMS, Fault
from recurl.diagnostics.runs import all_leaves, run
from recurl.diagnostics.states import State, states_in

PRIMER = "env = env.append_transform(get_primers_from_module(policy))  # from recurl.modules"
TRACKER = "env = env.append_transform(InitTracker())  # from recurl.envs"
REWIRE = "env = TransformedEnv(base_env, get_env_transforms_from_module(policy))  # from recurl.envs, recurl.modules"
EVALUATE = "call policy.eval() before collection and for the losses, which must reproduce the outputs of collection"
USE_MODULE = "use LSTMModule, GRUModule or CellModule of recurl.modules to carry the state, and don't modify the state"

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ROUNDINGS, _FACTOR, _MOST = 3, 10, 1e-2  # ways to round weights; tolerated multiple of their effect, and at most this
_TF32 = 5e-3  # by default cuDNN rounds the operands of float32 products to 11 bits


# -- inputs of a policy


def tokens(batch: TensorDictBase) -> TensorDictBase:
    """Return the roots of ``batch`` as ``[N]``, for sequential mode."""
    return batch.exclude(NEXT).reshape(-1)


def sequences(policy: Any, batch: TensorDictBase) -> list[TensorDictBase]:
    """Return ``batch`` and, if trajectory ids separate its rows, its flattened form ``[N]``.

    Forms that ``policy`` doesn't support are omitted: a network for images may require ``[N]``.
    """
    if batch.ndim == 1 or not has(batch, TRAJ_IDS):
        return [batch]
    flat = batch.reshape(-1)
    try:
        run(policy, batch, True)
    except PROBLEMS:
        return [flat]
    return [batch, flat]


def computed_keys(before: TensorDictBase, after: TensorDictBase) -> list[NestedKey]:
    """Return the keys of the floating-point root entries that a policy computed: those in ``after``, not ``before``.

    Actions and log-probabilities are excluded, since they are resampled.
    """
    return [
        key
        for key, value in leaves(after)
        if value.is_floating_point()
        and before.get(key, None) is not value
        and key != IS_INIT
        and not is_action(key)
        and not str(key).endswith("log_prob")
    ]


def leaves(tensordict: TensorDictBase) -> list[tuple[NestedKey, Tensor]]:
    """Return the tensors of the root (without ``"next"``) as pairs of key and value."""
    return all_leaves(tensordict.exclude(NEXT))


def actions(tensordict: TensorDictBase) -> list[NestedKey]:
    """Return the key of the action in ``tensordict``, or the keys of its parts."""
    return [key for key, _ in leaves(tensordict) if is_action(key)]


def has(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Return whether ``tensordict`` has the entry ``key``."""
    return tensordict.get(key, None) is not None


# -- ends


def ends_before(batch: TensorDictBase) -> Tensor:
    """Return bool ``[*B, T]``: True where the previous step in the same row ended an episode."""
    done = batch.get((NEXT, DONE), None)
    if done is None:
        return torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    done = done.reshape(batch.batch_size)
    return torch.cat([torch.zeros_like(done[..., :1]), done[..., :-1]], -1)


# -- comparison


def distance(seen: Tensor, expected: Tensor, at: Tensor) -> float:
    """Return the largest difference at the tokens ``at``, relative to the largest expected magnitude.

    Args:
        seen: computed values, ``[*B, T, ...]``.
        expected: expected values, ``[*B, T, ...]``.
        at: mask of the tokens to compare, bool, with ``prod(B) * T`` elements.
    """
    at = at.reshape(-1)
    seen, expected = (value.reshape(at.shape[0], -1)[at].double() for value in (seen, expected))
    if expected.numel() == 0:
        return 0.0
    gap = torch.where((seen == expected) | (seen.isnan() & expected.isnan()), 0.0, (seen - expected).abs())
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return float(gap.nan_to_num(nan=torch.inf).max()) / (scale or 1.0)


def tolerance(value: Tensor) -> float:
    """Return the relative difference that rounding may cause over a sequence."""
    if value.is_cuda and value.dtype == torch.float32:
        return _TF32
    return _TOLERANCE.get(value.dtype, 0.0)


def differing(first: TensorDictBase, second: TensorDictBase) -> list[NestedKey]:
    """Return the keys of the entries, including those under ``"next"``, that differ between the two."""
    others = dict(all_leaves(second))
    return [key for key, value in all_leaves(first) if key in others and differ(value, others[key])]


def differ(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    if first is second:
        return False
    at = torch.ones(first.shape[:1], dtype=torch.bool, device=first.device)
    return first.shape != second.shape or not distance(first, second, at) <= tolerance(first)


def random_keys(policy: Any, data: TensorDictBase, mode: bool) -> list[NestedKey]:
    """Return the keys of the output entries that depend on random numbers."""
    return differing(run(policy, data, mode), run(policy, data, mode, seed=1))


# -- required entries of a batch


def flags_of(batch: TensorDictBase) -> Tensor:
    """Return ``is_init`` as bool ``[*B, T]``, or raise a Fault if it is missing or malformed."""
    flags = batch.get(IS_INIT, None)
    if flags is None:
        raise Fault("the batch has no is_init, which marks where episodes begin", TRACKER)
    if flags.dtype != torch.bool or flags.shape not in (batch.batch_size, (*batch.batch_size, 1)):
        raise Fault(
            f"is_init must be bool of shape {[*batch.batch_size, 1]}, got {flags.dtype} {list(flags.shape)}", TRACKER
        )
    return flags.reshape(batch.batch_size)


def changes(ids: Tensor) -> Tensor:
    """Return bool, of the shape of ``ids``: True where the id differs from that of the previous step in the row."""
    return torch.cat([torch.zeros_like(ids[..., :1], dtype=torch.bool), ids[..., 1:] != ids[..., :-1]], -1)


def stored_states(policy: Any, batch: TensorDictBase) -> list[NestedKey]:
    """Return the keys of the policy's states, or raise a Fault if the batch lacks one (root or ``"next"``)."""
    states = states_in(policy, batch)
    for state in states:
        require_next_key(state)
        for key in (state.read, next_key(state.read)):
            if not has(batch, key):
                raise Fault(f"the batch has no {key!r}: the state is not fed back, so the policy has no memory", PRIMER)
    return [state.read for state in states]


def require_next_key(state: State) -> None:
    """Raise a Fault unless the new state is written under ``"next"`` of the key that the state is read from."""
    if state.written != next_key(state.read):
        name = state.owner or "the policy"
        raise Fault(
            f"{name} reads its state from {state.read!r} but writes it to {state.written!r}: it is never fed back",
            f"write it to {next_key(state.read)!r}: out_keys=[..., {next_key(state.read)!r}]",
        )


def require_close(
    what: str, seen: Tensor, expected: Tensor, at: Tensor, fix: str, again: Callable[[int], Tensor] | None = None
) -> float:
    """Return the distance between ``seen`` and ``expected`` at the tokens ``at``; raise a Fault beyond rounding.

    Args:
        what: what is compared, for the message.
        seen: computed values, ``[*B, T, ...]``.
        expected: expected values, ``[*B, T, ...]``.
        at: mask of the tokens to compare.
        fix: what to do about a difference.
        again: computes ``seen`` with weights rounded differently, from a seed, to measure what rounding may cause in
            a policy that amplifies it, such as one that normalizes small numbers.
    """
    gap, limit = distance(seen, expected, at), tolerance(seen)
    if again is not None and gap > limit:
        rounding = max(distance(again(seed), seen, at) for seed in range(_ROUNDINGS))
        limit = max(limit, min(_FACTOR * rounding, _MOST))
    if not gap <= limit:
        raise Fault(f"{what} differ by {gap:.2g} (relative)", fix)
    return gap


def rounded(policy: Any, data: TensorDictBase, mode: bool, key: NestedKey) -> Callable[[int], Tensor]:
    """Return a function that computes an entry with weights rounded differently, from a seed."""

    def again(seed: int) -> Tensor:
        with rounded_weights(policy, seed):
            return run(policy, data, mode).get(key)

    return again


def with_exchanged(batch: TensorDictBase, states: list[NestedKey], at: Tensor) -> TensorDictBase:
    """Return ``batch`` with states taken from other tokens at the tokens ``at``: different but plausible states."""
    at = at.reshape(-1)
    generator = torch.Generator().manual_seed(derive_seed(0, "other states"))
    order = torch.randperm(at.shape[0], generator=generator).to(at.device)
    source = torch.where(at, order, torch.arange(at.shape[0], device=at.device))
    other = batch.copy()
    for key in states:
        value = batch.get(key)
        other.set(key, value.reshape(at.shape[0], -1)[source].reshape(value.shape))
    return other


def with_noise(batch: TensorDictBase, keys: list[NestedKey], at: Tensor, scale: float = 1.0) -> TensorDictBase:
    """Return ``batch`` with reproducible noise in the entries ``keys`` at the tokens ``at``; integers are unchanged."""
    at = at.reshape(-1)
    noisy = batch.copy()
    generator = torch.Generator().manual_seed(derive_seed(0, "noise"))
    for key in keys:
        value = batch.get(key)
        if value.is_floating_point() or value.dtype == torch.bool:
            flat = value.reshape(at.shape[0], -1)
            noise = torch.randn(flat.shape, generator=generator).to(flat.device)
            other = flat ^ (noise > 0) if value.dtype == torch.bool else flat + scale * noise.to(flat.dtype)
            noisy.set(key, torch.where(at.unsqueeze(-1), other, flat).reshape(value.shape))
    return noisy


def compared_keys(policy: Any, data: TensorDictBase, mode: bool, states: list[NestedKey]) -> list[NestedKey]:
    """Return the keys of the entries to compare: the root entries that the policy computes, or else its new states.

    Random entries are excluded, since :func:`~recurl.diagnostics.check_repeat` covers them.
    """
    after, random = run(policy, data, mode), random_keys(policy, data, mode)
    keys = [key for key in computed_keys(data, after) if key not in (*states, *random)]
    return keys or [key for key in map(next_key, states) if has(after, key) and key not in random]
