"""Check that the rows of a batch are processed independently."""

from __future__ import annotations

import itertools
import operator
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl.core.keys import NestedKey, next_key
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.parts import submodules
from recurl.diagnostics.preserve import evaluating
from recurl.diagnostics.result import Fault, check
from recurl.diagnostics.runs import Call, first_difference, record, run
from recurl.diagnostics.states import states_in
from recurl.nn import LSTM, RecurrentNet

_RNNS = (nn.RNNBase, RecurrentNet)
_CELLS = nn.RNNCellBase
_LSTMS = (nn.LSTM, nn.LSTMCell, LSTM)
_FIX_COUPLING = (
    "make the policy process each row independently: normalize with statistics that are frozen within a batch "
    "(ObservationNorm), attend and average only within a row; and "
) + ex.USE_MODULE


@check("rows")
def check_rows(policy: Any, batch: TensorDictBase) -> str:
    """Check that each row is processed independently of other rows, and that no plain recurrent network is used.

    ``torch.nn.LSTM`` in a ``TensorDictModule`` interprets the rows of the environment as time steps, or loses its state
    at every step. Batch normalization in training mode also mixes rows.

    Args:
        policy: the policy, in the mode used for collection.
        batch: batch as collected, ``[*B, T]``.
    """
    states = [state.read for state in states_in(policy, batch)]
    _raise_on_plain_networks(policy, ex.tokens(batch), bool(states))
    modes = [False] if states else [False, True]  # without memory, the steps of a sequence are independent as well
    for mode in modes:
        coupled = _coupled(policy, ex.sequences(policy, batch)[0] if mode else ex.tokens(batch), mode, states)
        if coupled is not None:
            raise coupled
    return f"each of {batch.numel()} rows is processed independently"


def _coupled(policy: Any, data: TensorDictBase, mode: bool, states: list[NestedKey]) -> Fault | None:
    """Return a Fault if altering every second token changes the outputs of the others, or None."""
    count = data.numel()
    token = torch.arange(count, device=data.device)
    odd = token % 2 == 1
    source = token - odd.long()  # each odd token gets the data of the previous one
    other = data.reshape(-1)[source].reshape(data.batch_size)
    random = ex.random_keys(policy, data, mode)
    before, after = run(policy, data, mode), run(policy, other, mode)
    keys = [*ex.computed_keys(data, before), *map(next_key, states), *ex.actions(before)]
    for key in keys:
        value = before.get(key, None)
        if key in random or value is None or not _differ_at(~odd, after.get(key), value):
            continue
        calls, others = record(policy, data, mode)[0], record(policy, other, mode)[0]
        name, _ = first_difference(calls, others, lambda one, another: _differ_at(~odd, one, another))
        with evaluating(policy):
            first, second = run(policy, data, mode), run(policy, other, mode)
        fixed_by_eval = not _differ_at(~odd, first.get(key), second.get(key))
        return Fault(
            f"{key!r} of a row changes with the data of other rows: {name} mixes them",
            ex.EVALUATE + "; or don't normalize with batch statistics" if fixed_by_eval else _FIX_COUPLING,
        )
    return None


def _differ_at(at: Tensor, first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors differ at the tokens ``at``, which index their leading or second dimensions."""
    count = at.shape[0]
    if first.shape != second.shape or first.numel() == 0:
        return False
    if count in itertools.accumulate(first.shape, operator.mul):
        return ex.distance(first, second, at) > ex.tolerance(first)
    return first.shape[1:2] == (count,) and _differ_at(at, first.transpose(0, 1), second.transpose(0, 1))


def _replacement_for(module: Any) -> str:
    kind = "LSTMModule" if isinstance(module, _LSTMS) else "GRUModule"
    sizes = f"input_size={module.input_size}, hidden_size={module.hidden_size}"
    return (
        f"replace the {type(module).__name__} with {kind}({sizes}, in_key=..., out_key=...) of recurl.modules, which "
        "carries one state per row in the TensorDict"
    )


def replacements_of_plain_networks(policy: Any) -> list[str]:
    """Return a fix for each plain recurrent network in a policy without recurrent modules."""
    modules = submodules(policy).values()
    if any(hasattr(module, "make_tensordict_primer") for module in modules):
        return []
    return [_replacement_for(module) for module in modules if isinstance(module, (*_RNNS, _CELLS))]


def _raise_on_plain_networks(policy: Any, roots: TensorDictBase, has_states: bool) -> None:
    """Raise a Fault for a plain recurrent network that interprets rows as time steps, or steps without a state."""
    calls = [call for call in record(policy, roots, False)[0] if isinstance(call.module, (*_RNNS, _CELLS))]
    twice = record(policy, cast(TensorDictBase, torch.cat([roots, roots])), False)[0] if calls else []
    for call in calls:
        steps, of_twice = (sum(_steps(c) for c in some if c.module is call.module) for some in (calls, twice))
        if steps != of_twice:
            raise Fault(f"{call} reads the rows of the environment as time steps", _replacement_for(call.module))
        if steps == 1 and not (has_states and _given_state(call)):
            raise Fault(f"{call} starts without a state at every step: it has no memory", _replacement_for(call.module))


def _arguments(call: Call) -> list[Any]:
    return [*call.arguments, *call.named.values()]


def _given_state(call: Call) -> bool:
    return len(_arguments(call)) > 1 and _arguments(call)[1] is not None


def _steps(call: Call) -> int:
    """Return the number of time steps in a call of a recurrent network."""
    value, module = _arguments(call)[0], call.module
    if isinstance(module, _CELLS):
        return 1
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return len(value.batch_sizes)
    return value.shape[1 if value.ndim == 3 and getattr(module, "batch_first", False) else 0]
