"""Checks of a policy by running it in an environment."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from recurl.collectors.acting import explain
from recurl.core.errors import ArgumentError, RecurlError
from recurl.core.keys import NestedKey
from recurl.core.specs import TensorSpec
from recurl.diagnostics.batch import check_batch
from recurl.diagnostics.collection import collect
from recurl.diagnostics.experiment import EVALUATE, PRIMER, REWIRE, TRACKER, flags_of, has, require_next_key
from recurl.diagnostics.preserve import evaluating, preserved
from recurl.diagnostics.result import PROBLEMS, CheckResult, Fault, check, one_line
from recurl.diagnostics.rows import replacements_of_plain_networks
from recurl.diagnostics.states import are_alternatives, recurrent_submodules, states_of
from recurl.envs import Compose, EnvBase, TransformedEnv
from recurl.envs.wiring import policy_transforms
from recurl.sequences.mode import ExplorationType, set_exploration_type


@check("state_keys")
def check_state_keys(policy: Any) -> str:
    """Check that every state read from ``key`` is written to ``("next", key)`` and belongs to one module."""
    owners: dict[NestedKey, str] = {}
    states = states_of(policy)
    for state in states:
        require_next_key(state)
        if state.read in owners and not are_alternatives(policy, owners[state.read], state.owner):
            other = "other_" + (state.read if isinstance(state.read, str) else state.read[-1])
            raise Fault(
                f"{owners[state.read]!r} and {state.owner!r} share the state {state.read!r} and overwrite each other's",
                f"give one its own keys: in_keys=[value, {other!r}], out_keys=[features, ('next', {other!r})]",
            )
        owners[state.read] = state.owner
    return "; ".join(f"{state.read} of {state.owner or 'the policy'}" for state in states) or "none declared"


@check("tracker")
def check_tracker(env: EnvBase) -> str:
    """Check that a reset of ``env`` sets ``is_init``, bool ``[*B, 1]``, in all rows."""
    root = env.reset()
    if not has(root, "is_init"):
        raise Fault("the environment does not write is_init, which marks where episodes begin", TRACKER)
    if not flags_of(root).all():
        raise Fault("is_init is False after a reset: the state of the last episode leaks into the next", TRACKER)
    return "is_init is set by a reset"


@check("primers")
def check_primers(policy: Any, env: EnvBase) -> str:
    """Check that ``env`` declares every state of ``policy`` with its shape and dtype, and resets it to zeros."""
    root = env.reset()
    expected = _expected(policy)
    states = list(dict.fromkeys(state.read for state in states_of(policy, root)))
    for key in states:
        value, spec = root.get(key, None), expected.get(key)
        if value is None or not (key in env.observation_spec or key in env.state_spec):
            raise Fault(
                f"the environment does not declare the state {key!r}: it is dropped after every step, so the policy "
                "has no memory",
                PRIMER,
            )
        shape = None if spec is None else [*env.batch_size, *spec.shape]
        if spec is not None and (list(value.shape) != shape or value.dtype != spec.dtype):
            raise Fault(
                f"the environment declares {key!r} as {list(value.shape)} {value.dtype}, but the module needs {shape} "
                f"{spec.dtype}",
                REWIRE,
            )
        if value.any():
            raise Fault(
                f"the state {key!r} is not zero after a reset: a step with is_init starts from zero, but a replay "
                "starts from the stored state",
                REWIRE,
            )
    return ", ".join(f"{key} {_describe(root.get(key))}" for key in states) + ", zero after a reset"


def _expected(policy: Any) -> dict[NestedKey, TensorSpec]:
    specs: dict[NestedKey, TensorSpec] = {}
    for _, module in recurrent_submodules(policy):
        try:
            specs.update(module.make_tensordict_primer().primers.items(True, True))
        except RecurlError:
            continue  # a state that isn't written under "next": reported by check_state_keys
    return specs


def _describe(value: Tensor) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def check_wiring(
    policy: Any, env: EnvBase, steps: int = 64, *, auto_register_policy_transforms: bool = False
) -> list[CheckResult]:
    """Check experimentally that ``policy`` has a working memory in ``env`` and that losses reproduce its outputs.

    ``env`` is reset and stepped (and left open), and some of its episodes are truncated early. The wiring is not
    checked beforehand: faults are found by their effects. If the policy can't be stepped at all, the checks that need a
    batch are skipped. The policy and the random generators of torch, NumPy and Python are left unchanged.

    Args:
        policy: the policy, on its device, in the mode (training or evaluation) used for collection and learning.
        env: the wired environment; a collector would append missing transforms by default.
        steps: number of steps to collect per row, at least 8.
        auto_register_policy_transforms: append missing trackers and primers, as a collector does (``env`` itself is
            not modified).

    Returns:
        One result per check: ``state_keys``, ``tracker``, ``primers``, ``collection``, ``stepping``, and those of
        :func:`check_batch`; fewer for a policy without recurrent states.

    Raises:
        ArgumentError: ``steps`` is below 8.

    Example:
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from recurl.envs import GymEnv, InitTracker, TransformedEnv
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> act = TensorDictModule(lambda x: (x.sum(-1) > 0).long(), ["features"], ["action"])
        >>> policy = TensorDictSequential(gru, act)
        >>> all(result.passed for result in check_wiring(policy, GymEnv("CartPole-v1", policy=policy)))
        True
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())  # and no primer
        >>> results = {result.name: result for result in check_wiring(policy, env)}
        >>> results["primers"].fix
        'env = env.append_transform(get_primers_from_module(policy))  # from recurl.modules'
    """
    if steps < 8:
        raise ArgumentError(f"steps must be at least 8, got {steps}.")
    if auto_register_policy_transforms:
        env = _wired(policy, env)
    results: list[CheckResult] = []
    if states_of(policy, env.reset()):
        results += [check_state_keys(policy), check_tracker(env), check_primers(policy, env)]
    batches: list[TensorDict] = []
    results += [_check_collection(policy, env, steps, batches), check_stepping(policy, env)]
    return results + [result for batch in batches for result in check_batch(policy, batch)]


def _wired(policy: Any, env: EnvBase) -> EnvBase:
    try:
        missing = policy_transforms(policy, env)
        return TransformedEnv(env, Compose(*missing)) if missing else env
    except RecurlError:
        return env  # duplicate state names, or a state not written under "next": reported by check_state_keys


@check("stepping")
def check_stepping(policy: Any, env: EnvBase) -> str:
    """Report in which form a collector runs ``policy`` in ``env``, and why not in a faster one."""
    with set_exploration_type(ExplorationType.RANDOM):
        return str(explain(policy, env)).removeprefix("steps: ")


@check("collection")
def _check_collection(policy: Any, env: EnvBase, steps: int, batches: list[TensorDict]) -> str:
    try:
        with preserved(policy):
            batch = collect(policy, env, steps)
    except PROBLEMS as error:
        raise Fault(f"the policy can't be stepped: {one_line(error)}", _stepping_fix(policy, env)) from error
    batches.append(batch)
    ended = int(batch["next", "done"].sum())
    return f"{batch.numel()} steps, {ended} episode ends"


def _stepping_fix(policy: Any, env: EnvBase) -> str:
    """Return a fix for a policy that can't be stepped."""
    instead = replacements_of_plain_networks(policy)
    if instead:
        return "; ".join(instead)
    try:
        with preserved(policy), evaluating(policy):
            collect(policy, env, 8)
    except PROBLEMS:
        return "fix the failures above, or the cause of this error"
    return EVALUATE
