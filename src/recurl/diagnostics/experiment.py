"""What the experiments share: running a policy on it, and comparing what comes out."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl.continuity import boundaries_in
from recurl.diagnostics.result import Fault
from recurl.diagnostics.states import State, states_in
from recurl.keys import ACTION, DONE, IS_INIT, NEXT, TRAJ_IDS, NestedKey, next_key, normalize_key
from recurl.mode import set_recurrent_mode
from recurl.recurrence import Boundaries

PRIMER = "env = env.append_transform(get_primers_from_module(policy))  # from recurl.modules"
TRACKER = "env = env.append_transform(InitTracker())  # from recurl.envs"
REWIRE = "env = TransformedEnv(base_env, get_env_transforms_from_module(policy))  # from recurl.envs, recurl.modules"
USE_MODULE = "let an LSTMModule, GRUModule or CellModule of recurl.modules carry the state, and hand it on untouched"

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TF32 = 5e-3  # cuDNN rounds the operands of float32 products to 11 bits unless told otherwise


@contextmanager
def evaluating(policy: Any) -> Generator[None]:
    """Put ``policy`` into evaluation mode inside the block: dropout would make a replay differ for good reason."""
    before = [(module, module.training) for module in policy.modules()] if isinstance(policy, nn.Module) else []
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


# -- running a policy


def run(policy: Any, batch: TensorDictBase, mode: bool | None) -> TensorDictBase:
    """Return what ``policy`` makes of ``batch``, which stays as it is, in a mode and without gradients."""
    with set_recurrent_mode(mode), torch.no_grad():
        return policy(batch.copy())


def tokens(batch: TensorDictBase) -> TensorDictBase:
    """Return the roots of ``batch`` as ``[N]``, for the sequential mode."""
    return batch.exclude(NEXT).reshape(-1)


def sequences(batch: TensorDictBase) -> list[TensorDictBase]:
    """Return ``batch``, and as ``[N]`` too where trajectory ids keep its rows apart."""
    return [batch, batch.reshape(-1)] if batch.ndim > 1 and has(batch, TRAJ_IDS) else [batch]


def written(before: TensorDictBase, after: TensorDictBase) -> list[NestedKey]:
    """Return the floating-point root entries of ``after`` that aren't those of ``before``: what a policy computed.

    Actions and log-probabilities are left out, as they are drawn anew.
    """
    return [
        key
        for key, value in leaves(after)
        if value.is_floating_point()
        and before.get(key, None) is not value
        and key not in (ACTION, IS_INIT)
        and not str(key).endswith("log_prob")
    ]


def leaves(tensordict: TensorDictBase) -> list[tuple[NestedKey, Tensor]]:
    """Return the tensors of the root, by key."""
    root = tensordict.exclude(NEXT)
    keys = [normalize_key(key) for key in cast(Iterable[object], root.keys(True, True))]
    return [(key, root.get(key)) for key in keys]


def has(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Whether ``tensordict`` has the entry."""
    return tensordict.get(key, None) is not None


# -- boundaries


def segments(batch: TensorDictBase) -> Boundaries:
    """Return the boundaries that a recurrent module sees in ``batch``, which has ``is_init``."""
    return boundaries_in(batch)


def ends_before(batch: TensorDictBase) -> Tensor:
    """Return bool ``[*B, T]``: the step before, in the same row, ended an episode."""
    done = batch.get((NEXT, DONE), None)
    if done is None:
        return torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    done = done.reshape(batch.batch_size)
    return torch.cat([torch.zeros_like(done[..., :1]), done[..., :-1]], -1)


# -- comparing


def distance(seen: Tensor, expected: Tensor, at: Tensor) -> float:
    """Return the largest difference at the tokens ``at``, in units of the largest expected magnitude.

    Args:
        seen: ``[*B, T, ...]``.
        expected: likewise.
        at: bool, as many elements as there are tokens.
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
    """Return the relative difference that rounding may make over a sequence."""
    if value.is_cuda and value.dtype == torch.float32:
        return _TF32
    return _TOLERANCE.get(value.dtype, 0.0)


def altered(value: Tensor, at: Tensor) -> Tensor:
    """Return ``value`` with noise added at the tokens ``at`` (bool, one element per token), the same in every call."""
    at = at.reshape(-1)
    flat = value.reshape(at.shape[0], -1).clone()
    noise = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
    return torch.where(at.unsqueeze(-1), flat + noise, flat).reshape(value.shape)


# -- what a batch must hold


def flags_of(batch: TensorDictBase) -> Tensor:
    """Return ``is_init`` as bool ``[*B, T]``; a Fault if it is missing or malformed."""
    flags = batch.get(IS_INIT, None)
    if flags is None:
        raise Fault("the batch has no is_init: nothing says where episodes begin", TRACKER)
    if flags.dtype != torch.bool or flags.shape not in (batch.batch_size, (*batch.batch_size, 1)):
        raise Fault(
            f"is_init must be bool of shape {[*batch.batch_size, 1]}, got {flags.dtype} {list(flags.shape)}", TRACKER
        )
    return flags.reshape(batch.batch_size)


def changes(ids: Tensor) -> Tensor:
    """Return bool, shaped like ``ids``: the id differs from that of the step before in the row."""
    return torch.cat([torch.zeros_like(ids[..., :1], dtype=torch.bool), ids[..., 1:] != ids[..., :-1]], -1)


def stored_states(policy: Any, batch: TensorDictBase) -> list[NestedKey]:
    """Return the keys of the policy's states; a Fault if the batch lacks one, at the root or under ``"next"``."""
    states = states_in(policy, batch)
    for state in states:
        require_next_key(state)
        for key in (state.read, next_key(state.read)):
            if not has(batch, key):
                raise Fault(f"the batch has no {key!r}: the state is not fed back, the policy has no memory", PRIMER)
    return [state.read for state in states]


def require_next_key(state: State) -> None:
    """Raise a Fault unless the state is written to where it comes back from."""
    if state.written != next_key(state.read):
        name = state.owner or "the policy"
        raise Fault(
            f"{name} reads its state from {state.read!r} but writes it to {state.written!r}: it never comes back",
            f"write it to {next_key(state.read)!r}: out_keys=[..., {next_key(state.read)!r}]",
        )


def close(what: str, seen: Tensor, expected: Tensor, at: Tensor, fix: str) -> float:
    """Return the distance of ``seen`` and ``expected`` at the tokens ``at``; a Fault if it is more than rounding."""
    gap = distance(seen, expected, at)
    if not gap <= tolerance(seen):
        raise Fault(f"{what} differ by {gap:.2g} (relative)", fix)
    return gap


def with_noise(batch: TensorDictBase, states: list[NestedKey], at: Tensor) -> TensorDictBase:
    """Return ``batch`` with noise on the states at the tokens ``at``."""
    noisy = batch.copy()
    for key in states:
        noisy.set(key, altered(batch.get(key), at))
    return noisy


def observed(before: TensorDictBase, after: TensorDictBase, states: list[NestedKey]) -> list[NestedKey]:
    """Return the entries to compare: what the policy computed at the root, or else its new states."""
    keys = [key for key in written(before, after) if key not in states]
    return keys or [next_key(key) for key in states if has(after, next_key(key))]
