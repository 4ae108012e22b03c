"""Checks of a policy on sequences: replay reproduces collected outputs, and nothing leaks between episodes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import IS_INIT, TRAJ_IDS, NestedKey, next_key
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.preserve import other_weights, preserved
from recurl.diagnostics.result import PROBLEMS, Fault, check
from recurl.diagnostics.runs import run
from recurl.diagnostics.states import recurrent_submodules, states_in
from recurl.sequences.index import SequenceIndex
from recurl.sequences.mode import ExplorationType, recurrent_mode, set_exploration_type, set_recurrent_mode

_FIX_BOUNDARIES = "mark every boundary: InitTracker in the environment, and keep ('collector', 'traj_ids') in the batch"


@check("leak")
def check_leak(policy: Any, batch: TensorDictBase) -> str:
    """Check that nothing leaks across boundaries: altering all tokens before one doesn't change the outputs after it.

    Boundaries are starts of rows, ends of episodes, steps with ``is_init``, and changes of trajectory. The policy runs
    on sequences ``[*B, T]`` and, with trajectory ids, on ``[N]``.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]``.
    """
    states = ex.stored_states(policy, batch)
    starts = ex.flags_of(batch).clone() | ex.ends_before(batch)
    starts[..., 0] = True
    if ex.has(batch, TRAJ_IDS):
        starts |= ex.changes(batch.get(TRAJ_IDS))
    odd = starts.reshape(-1).cumsum(0) % 2 == 1
    if odd.all():
        return "a single segment: nothing to compare"
    for data in ex.sequences(policy, batch):
        before = run(policy, data, True)
        observed = ex.compared_keys(policy, data, True, states)
        for change in (odd, ~odd):
            after = run(policy, _other_data(data, before, states, change), True)
            for key in observed:
                what = f"{key!r} with other data before the boundary (batch {list(data.shape)})"
                ex.require_close(what, after.get(key), before.get(key), ~change, _FIX_BOUNDARIES)
    return f"altering all other segments does not change any of {int(starts.sum())}"


def _other_data(data: TensorDictBase, outcome: TensorDictBase, states: list[NestedKey], at: Tensor) -> TensorDictBase:
    """Return ``data`` with the inputs and states of other tokens at the tokens ``at``."""
    other = ex.with_exchanged(data, states, at)
    keep = {IS_INIT, *states}
    for key, value in ex.leaves(data):
        if key not in keep and key[0] != TRAJ_IDS[0] and outcome.get(key, None) is value:
            flat = value.reshape(at.shape[0], -1)
            other.set(key, torch.where(at.unsqueeze(-1), flat.roll(1, 0), flat).reshape(value.shape))
    return other


@check("replay")
def check_replay(policy: Any, batch: TensorDictBase) -> str:
    """Check that replay reproduces collection: outputs recomputed in recurrent mode equal the collected ones.

    Compares the floating-point entries that the policy writes and the states at the ends of segments. Only the stored
    states at the starts of segments are used.

    Args:
        policy: policy that collected ``batch``, with the same weights and in the same mode.
        batch: batch as collected, ``[*B, T]``.
    """
    with set_exploration_type(ExplorationType.RANDOM):  # check_log_prob covers the effect of the exploration type
        gaps = [gap for data in ex.sequences(policy, batch) for gap in _replay(policy, data)]
    if not gaps:
        return "the policy writes only the action: nothing to compare"
    names = dict.fromkeys(name for name, _ in gaps)
    return f"{', '.join(names)} recomputed on sequences: difference {max(gap for _, gap in gaps):.0e}"


def _replay(policy: Any, data: TensorDictBase) -> list[tuple[str, float]]:
    states = [state.read for state in states_in(policy, data) if ex.has(data, state.read)]
    boundaries = SequenceIndex.of(data) if states else None
    # A sequence starts from the state stored at its first step. States stored at other steps must not matter, unless
    # they only record observations and actions and so are independent of the weights.
    given = (
        data
        if boundaries is None
        else ex.with_exchanged(data, _learned_states(policy, data, states), ~boundaries.starts)
    )
    replayed, random = run(policy, given, True), ex.random_keys(policy, given, True)
    everywhere = torch.ones(data.numel(), dtype=torch.bool, device=data.device)
    pairs = [(key, everywhere) for key in ex.computed_keys(given, replayed) if key not in states]
    if boundaries is not None:
        written = (state.written for state in states_in(policy, data))
        pairs += [(key, boundaries.ends) for key in written if ex.has(replayed, key)]
    pairs = [(key, at) for key, at in pairs if ex.has(data, key)]
    if not pairs and ex.computed_keys(given, replayed):
        raise Fault("the batch has no entry that the policy writes", "collect the batch with the policy being checked")
    fix = (
        "the replay must start from the collected states and use the same is_init: wire the environment as the other "
        "checks suggest, use LSTMModule, GRUModule or CellModule, and check with the weights used for collection"
    )
    gaps = list[tuple[str, float]]()
    for key, at in pairs:
        if key not in random:
            compared = _as_replayed(key, data), replayed.get(key), data.get(key), at
            gaps.append((str(key), ex.require_close(*compared, fix, ex.rounded(policy, given, True, key))))
    return gaps


def _learned_states(policy: Any, data: TensorDictBase, states: list[NestedKey]) -> list[NestedKey]:
    """Return the states that depend on the policy's weights."""
    before = run(policy, data, True)
    try:
        with other_weights(policy, 0):
            changed = ex.differing(before, run(policy, data, True))
    except PROBLEMS:
        return states  # a policy need not accept arbitrary weights
    return [key for key in states if next_key(key) in changed]


def _as_replayed(key: NestedKey, data: TensorDictBase) -> str:
    return f"{key} as collected and as replayed (batch {list(data.shape)})"


@check("start")
def check_start(policy: Any, batch: TensorDictBase) -> str:
    """Check that a sequence cut from an episode starts from its stored state, by comparing it with the full episode.

    Minibatches and replay buffers cut such sequences. A module that starts each from zero loses the earlier memory.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]``.
    """
    states = ex.stored_states(policy, batch)
    inside = ~(ex.flags_of(batch) | ex.ends_before(batch))
    running = inside.reshape(-1, inside.shape[-1])[:, 1:].sum(0)
    if running.numel() == 0 or not running.any():
        return "no episode has two steps in this batch: nothing to compare"
    cut = int(running.argmax()) + 1
    flat = ex.sequences(policy, batch)[0].ndim < batch.ndim
    full, part = (data.reshape(-1) if flat else data for data in (batch, batch[..., cut:]))
    seen, expected = run(policy, part, True), run(policy, full, True).reshape(batch.batch_size)[..., cut:]
    ends = SequenceIndex.of(part).ends
    random = ex.random_keys(policy, part, True)
    pairs = [(key, torch.ones_like(ends)) for key in ex.compared_keys(policy, part, True, states)]
    pairs += [(key, ends) for key in map(next_key, states) if ex.has(seen, key) and key not in random]
    for key, at in pairs:
        ex.require_close(
            f"{key!r} of sequences that begin inside an episode, and of the full episodes,",
            seen.get(key),
            expected.get(key),
            at,
            f"start each sequence from the states stored at its first step, {', '.join(map(repr, states))}: read them "
            "in recurrent mode as well; or " + ex.USE_MODULE,
            ex.rounded(policy, part, True, key),
        )
    return f"{int(running.max())} sequences cut from episodes start from their stored states"


@check("gradient")
def check_gradient(policy: Any, batch: TensorDictBase) -> str:
    """Check that gradients flow through time, from later outputs of a segment to its first input.

    Each recurrent module is run separately on its inputs in the batch.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]``.
    """
    starts = SequenceIndex.of(batch).starts
    long = starts & ~starts.roll(-1, 0)
    long[-1:] = False
    modules = [(name, m) for name, m in recurrent_submodules(policy) if all(ex.has(batch, key) for key in m.in_keys)]
    if not modules or not long.any():
        return "no recurrent module has its inputs in the batch, or no segment has two steps: nothing to compare"
    for name, module in modules:
        passes = _passes_gradient(policy, module, batch, starts)
        if not passes:
            with other_weights(policy, 0):  # the policy's weights may be zero, or its cells saturated
                passes = any(_passes_gradient(policy, module, batch, starts, noise) for noise in (False, True))
        if not passes:
            raise Fault(
                f"{name or 'the policy'} passes no gradient to the previous step: it can't learn to use its memory",
                "don't detach the state between the steps of a sequence; " + ex.USE_MODULE,
            )
    return f"gradients reach the first step of {int(long.sum())} segments"


def _passes_gradient(policy: Any, module: Any, batch: TensorDictBase, starts: Tensor, noise: bool = False) -> bool:
    """Return whether gradients reach the first input (or noise) of every segment from later outputs of ``module``."""
    first = starts & ~starts.roll(-1, 0)
    first[-1:] = False
    data = batch.select(*module.in_keys, *([TRAJ_IDS] if ex.has(batch, TRAJ_IDS) else [])).clone()
    with preserved(policy), set_recurrent_mode(True), torch.enable_grad():
        value = data.get(module.in_keys[0]).detach()
        value = (torch.randn_like(value) if noise else value.clone()).requires_grad_(True)
        features = module(data.set(module.in_keys[0], value)).get(module.out_keys[0])
    later = features.reshape(batch.numel(), -1)[~starts].square().sum()
    gradient = torch.autograd.grad(later, value)[0] if later.requires_grad else torch.zeros_like(value)
    return bool(gradient.reshape(batch.numel(), -1)[first].any(-1).all())


@check("mode")
def check_mode(policy: Any, batch: TensorDictBase) -> str:
    """Check that recurrent modules honor the recurrent mode and default to sequential mode.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]``.
    """
    roots = ex.tokens(batch)
    expected = {False: (False, roots), True: (True, ex.sequences(policy, batch)[0]), None: (False, roots)}
    where = {False: "set_recurrent_mode(False), as in collection,", True: "set_recurrent_mode(True), as in a loss,"}
    for mode, (sequence, data) in expected.items():
        wrong = sorted({name or "the policy" for name, seen in _modes(policy, data, mode) if seen != sequence})
        if wrong and mode is None:
            raise Fault(
                f"{', '.join(wrong)} runs sequences by default: a loop of policy(td) would read rows as time steps",
                "construct it with default_recurrent_mode=False and replay inside `with set_recurrent_mode(True):`",
            )
        if wrong:
            raise Fault(
                f"inside {where[bool(mode)]} {', '.join(wrong)} runs {'steps' if sequence else 'sequences'}",
                "don't set the recurrent mode inside the policy: collectors, losses and GAE set it around it",
            )
    return "steps in collection, sequences in replay, steps by default"


def _modes(policy: Any, data: TensorDictBase, mode: bool | None) -> list[tuple[str, bool]]:
    """Run ``policy`` and return the name and mode (True: recurrent) of each recurrent module that was called."""
    seen: list[tuple[str, bool]] = []

    def observe(name: str) -> Any:
        return lambda module, _: seen.append((name, bool(getattr(module, "recurrent_mode", recurrent_mode()))))

    hooks = [module.register_forward_pre_hook(observe(name)) for name, module in recurrent_submodules(policy)]
    try:
        run(policy, data, mode)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
