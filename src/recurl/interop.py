"""recurl's recurrent modules in programs of TorchRL, which recurl itself never imports.

What needs no help: losses and blocks of TorchRL set the recurrent mode of recurl's modules too (see
:mod:`recurl.mode`); keys, shapes and the names of parameters are the same, so batches and state dicts go both ways.
Only a primer belongs to the environment that it is appended to, and TorchRL's environments take TorchRL's.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from torch import nn

from recurl.errors import ArgumentError, MissingDependencyError
from recurl.keys import NestedKey
from recurl.modules.utils import recurrent_modules
from recurl.specs import TensorSpec

__all__ = ["for_torchrl"]

_M = TypeVar("_M", bound=nn.Module)


def for_torchrl(module: _M) -> _M:
    """Let the recurrent modules in ``module`` make TorchRL's primers from now on, and return it.

    TorchRL's environments, collectors (``auto_register_policy_transforms`` included) and
    ``get_primers_from_module`` then take the policy as one of their own. For environments of recurl, which need
    recurl's primers, use another policy, for instance one with the same state dict.

    Args:
        module: a policy, or any module with an ``LSTMModule`` or ``GRUModule`` of recurl in it.

    Raises:
        ArgumentError: there is no recurrent module of recurl in ``module``.
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
            f"for_torchrl needs a module with an LSTMModule or GRUModule of recurl in it, got {module}."
        )
    for recurrent in found:
        recurrent.primer_type = _primer
    return module


def _primer(states: dict[NestedKey, TensorSpec]) -> Any:
    unbounded: Any = _torchrl("torchrl.data").Unbounded
    primers = {key: unbounded(spec.shape, dtype=spec.dtype) for key, spec in states.items()}
    return _torchrl("torchrl.envs").TensorDictPrimer(primers, expand_specs=True)


def _torchrl(name: str) -> Any:
    # Not an import statement: nothing of recurl depends on TorchRL, and the layering check holds that.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("for_torchrl needs TorchRL: pip install 'recurl[torchrl]'.") from error
