"""Checks of a policy on whole sequences: do they give what was collected, and only within episodes?"""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from recurl.diagnostics import experiment as ex
from recurl.diagnostics.result import Fault, check
from recurl.diagnostics.states import recurrent_submodules, states_in
from recurl.keys import IS_INIT, TRAJ_IDS, NestedKey
from recurl.mode import recurrent_mode, set_recurrent_mode

_MARKS = "mark every boundary: an InitTracker in the environment, ('collector', 'traj_ids') kept in the batch"


@check("leak")
def check_leak(policy: Any, batch: TensorDictBase) -> str:
    """Check that nothing leaks over a boundary: altering all before it leaves what follows as it is.

    Boundaries are row starts, ends of episodes, raised ``is_init`` and changes of trajectory; the policy runs on
    sequences, ``[*B, T]`` and, with trajectory ids, ``[N]``.
    """
    states = ex.stored_states(policy, batch)
    starts = ex.flags_of(batch).clone() | ex.ends_before(batch)
    starts[..., 0] = True
    if ex.has(batch, TRAJ_IDS):
        starts |= ex.changes(batch.get(TRAJ_IDS))
    odd = starts.reshape(-1).cumsum(0) % 2 == 1
    if odd.all():
        return "a single segment: nothing to compare"
    with ex.evaluating(policy):
        for data in ex.sequences(batch):
            before = ex.run(policy, data, True)
            observed = ex.observed(data, before, states)
            for change in (odd, ~odd):
                after = ex.run(policy, _other_data(data, before, states, change), True)
                for key in observed:
                    ex.close(
                        f"{key!r} with other data before the boundary (batch {list(data.shape)})",
                        after.get(key),
                        before.get(key),
                        ~change,
                        _MARKS,
                    )
    return f"altering all other segments leaves each of {int(starts.sum())} as it is"


def _other_data(data: TensorDictBase, outcome: TensorDictBase, states: list[NestedKey], at: Tensor) -> TensorDictBase:
    """Put other tokens' inputs, and noisy states, in the place of the tokens ``at``."""
    other = ex.with_noise(data, states, at)
    keep = {IS_INIT, TRAJ_IDS, *states}
    for key, value in ex.leaves(data):
        if key not in keep and outcome.get(key, None) is value:
            flat = value.reshape(at.shape[0], -1)
            other.set(key, torch.where(at.unsqueeze(-1), flat.roll(1, 0), flat).reshape(value.shape))
    return other


@check("replay")
def check_replay(policy: Any, batch: TensorDictBase) -> str:
    """Check that collection equals replay: recomputed in recurrent mode, all is as it was collected.

    Compared are the floating-point entries that the policy writes, the log-probabilities of the collected actions,
    and the states at the ends of segments. Of the stored states only those at which a segment starts are given.

    Args:
        policy: the policy that collected ``batch``, with the weights it had then, in evaluation mode.
        batch: as collected, ``[*B, T]``.
    """
    with ex.evaluating(policy):
        gaps = [gap for data in ex.sequences(batch) for gap in _replay(policy, data)]
    names = dict.fromkeys(name for name, _ in gaps)
    return f"{', '.join(names)} recomputed on sequences: difference {max(gap for _, gap in gaps):.0e}"


def _replay(policy: Any, data: TensorDictBase) -> list[tuple[str, float]]:
    states, boundaries = states_in(policy, data), ex.segments(data)
    # A sequence starts from the state stored at its first step: what is stored at the others must not matter.
    stored = [state.read for state in states if ex.has(data, state.read)]
    given = ex.with_noise(data, stored, ~boundaries.starts)
    replayed = ex.run(policy, given, True)
    everywhere = torch.ones(data.numel(), dtype=torch.bool, device=data.device)
    pairs: list[tuple[str, Tensor, Tensor, Tensor]] = [
        (str(key), replayed.get(key), data.get(key), everywhere)
        for key in ex.written(given, replayed)
        if ex.has(data, key) and key not in stored
    ]
    pairs += [
        (str(key), replayed.get(key), data.get(key), boundaries.ends)
        for key in (state.written for state in states)
        if ex.has(data, key) and ex.has(replayed, key)
    ]
    pairs += [(name, seen, stored, everywhere) for name, seen, stored in _log_probs(policy, replayed, data)]
    if not pairs:
        raise Fault("the batch holds nothing that the policy writes", "collect the batch with the policy to be checked")
    fix = (
        "the replay must start from the collected states and see the same is_init: wire the environment as the other "
        "checks say, use LSTMModule, GRUModule or CellModule, and check with the weights that collected"
    )
    return [
        (name, ex.close(f"{name} as collected and as replayed (batch {list(data.shape)})", seen, expected, at, fix))
        for name, seen, expected, at in pairs
    ]


def _log_probs(policy: Any, replayed: TensorDictBase, data: TensorDictBase) -> list[tuple[str, Tensor, Tensor]]:
    found: list[tuple[str, Tensor, Tensor]] = []
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if not isinstance(module, ProbabilisticTensorDictModule):
            continue
        key, action = cast(Any, module).log_prob_key, cast(str, module.out_keys[0])
        if ex.has(data, key) and ex.has(data, action):
            with torch.no_grad():
                log_prob = cast(Any, module.get_dist(replayed)).log_prob(data.get(action))
            stored = data.get(key)
            found.append(
                (str(key), log_prob.reshape(data.numel(), -1).sum(-1), stored.reshape(data.numel(), -1).sum(-1))
            )
    return found


@check("gradient")
def check_gradient(policy: Any, batch: TensorDictBase) -> str:
    """Check that gradients flow through time: what a segment computes later depends on its first input.

    Each recurrent module runs alone on its inputs in the batch.
    """
    starts = ex.segments(batch).starts
    long = starts & ~starts.roll(-1, 0)
    long[-1:] = False
    modules = [(name, m) for name, m in recurrent_submodules(policy) if all(ex.has(batch, key) for key in m.in_keys)]
    if not modules or not long.any():
        return "no recurrent module has its inputs in the batch, or no segment two steps: nothing to compare"
    for name, module in modules:
        data = batch.select(*module.in_keys, *([TRAJ_IDS] if ex.has(batch, TRAJ_IDS) else []))
        value = data.get(module.in_keys[0]).detach().clone().requires_grad_(True)
        data.set(module.in_keys[0], value)
        with set_recurrent_mode(True), torch.enable_grad():
            features = module(data).get(module.out_keys[0])
        later = features.reshape(batch.numel(), -1)[~starts].square().sum()
        gradient = torch.autograd.grad(later, value)[0] if later.requires_grad else torch.zeros_like(value)
        if not gradient.reshape(batch.numel(), -1)[long].any(-1).all():
            raise Fault(
                f"{name or 'the policy'} passes no gradient from a step to the one before: it can't learn to remember",
                "don't detach the state between the steps of a sequence; " + ex.USE_MODULE,
            )
    return f"gradients reach the first step of {int(long.sum())} segments"


@check("mode")
def check_mode(policy: Any, batch: TensorDictBase) -> str:
    """Check that recurrent modules step where steps are asked for, run sequences where those are, and step by default.

    Args:
        policy: the policy.
        batch: as collected, ``[*B, T]``.
    """
    roots = ex.tokens(batch)
    expected = {False: (False, roots), True: (True, batch), None: (False, roots)}
    where = {False: "set_recurrent_mode(False), as in collection,", True: "set_recurrent_mode(True), as in a loss,"}
    for mode, (sequence, data) in expected.items():
        wrong = sorted({name or "the policy" for name, seen in _modes(policy, data, mode) if seen != sequence})
        if wrong and mode is None:
            raise Fault(
                f"{', '.join(wrong)} runs sequences by default: a loop of policy(td) would take rows for time",
                "construct it with default_recurrent_mode=False and replay inside `with set_recurrent_mode(True):`",
            )
        if wrong:
            raise Fault(
                f"inside {where[bool(mode)]} {', '.join(wrong)} runs {'steps' if sequence else 'sequences'}",
                "don't set the recurrent mode inside the policy: collectors, losses and GAE set it around it",
            )
    return "steps in collection, sequences in replay, steps by default"


def _modes(policy: Any, data: TensorDictBase, mode: bool | None) -> list[tuple[str, bool]]:
    """Run ``policy`` and return in which mode each recurrent module ran."""
    seen: list[tuple[str, bool]] = []

    def note(name: str) -> Any:
        return lambda module, _: seen.append((name, bool(getattr(module, "recurrent_mode", recurrent_mode()))))

    hooks = [module.register_forward_pre_hook(note(name)) for name, module in recurrent_submodules(policy)]
    try:
        with ex.evaluating(policy):
            ex.run(policy, data, mode)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
