"""Use of recurl's recurrent modules with TorchRL. recurl itself never imports TorchRL.

Most of this works without an adapter. TorchRL's losses and its ``set_recurrent_mode`` also set the mode of recurl's
modules (see :mod:`recurl.sequences.mode`). Keys, shapes and parameter names are the same, so batches and state dicts
are interchangeable. Only primers differ: TorchRL's environments accept only TorchRL's primers.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, TypeVar

from torch import nn

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.keys import NestedKey
from recurl.core.specs import TensorSpec
from recurl.modules.agents_as_rows import AgentsAsRows
from recurl.modules.utils import recurrent_modules

__all__ = ["for_torchrl"]

_M = TypeVar("_M", bound=nn.Module)


def for_torchrl(module: _M) -> _M:
    """Make the recurrent modules in ``module`` create TorchRL primers, and return ``module``.

    TorchRL's environments, collectors (``auto_register_policy_transforms`` included) and
    ``get_primers_from_module`` then accept the policy. recurl's environments need recurl's primers: use another
    policy there, such as one with the same state dict.

    Args:
        module: a policy, or any module that contains an ``LSTMModule`` or ``GRUModule`` of recurl.

    Raises:
        ArgumentError: ``module`` contains no recurrent module of recurl.
        MissingDependencyError: TorchRL is not installed.

    Example:
        >>> from recurl.modules import GRUModule
        >>> gru = for_torchrl(GRUModule(4, 8, in_keys=["observation", "rs"], out_keys=["features", ("next", "rs")]))
        >>> type(gru.make_tensordict_primer()).__module__.split(".")[0]
        'torchrl'
    """
    _torchrl("torchrl.envs")
    found = recurrent_modules(module)
    if not found:
        raise ArgumentError(
            f"for_torchrl needs a module that contains an LSTMModule or GRUModule of recurl, got {module}."
        )
    for recurrent in found:
        recurrent.primer_type = _primer
    for agents in module.modules():
        if isinstance(agents, AgentsAsRows):
            for recurrent in recurrent_modules(agents):
                recurrent.primer_type = partial(_primer, group=agents.group, n_agents=agents.n_agents)
    return module


def _primer(states: dict[NestedKey, TensorSpec], group: str | None = None, n_agents: int = 1) -> Any:
    data: Any = _torchrl("torchrl.data")
    lead = () if group is None else (n_agents,)
    primers: Any = {key: data.Unbounded((*lead, *spec.shape), dtype=spec.dtype) for key, spec in states.items()}
    if group is not None:
        primers = {group: data.Composite(primers, shape=lead)}
    return _torchrl("torchrl.envs").TensorDictPrimer(primers, expand_specs=True)


def _torchrl(name: str) -> Any:
    # Not an import statement: the layering check ensures that recurl does not depend on TorchRL.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("for_torchrl needs TorchRL: pip install 'recurl[torchrl]'.") from error
