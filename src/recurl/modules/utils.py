"""Environment transforms required by a policy's recurrent modules."""

from __future__ import annotations

import warnings

from torch import nn

from recurl.core.errors import RecurlWarning
from recurl.modules.recurrent import RecurrentModule
from recurl.transforms import Compose, InitTracker, TensorDictPrimer, Transform


def get_primers_from_module(
    module: nn.Module, warn: bool = True, strict: bool = True
) -> TensorDictPrimer | Compose | None:
    """Return the primers of all submodules of ``module`` with recurrent states, without duplicates.

    The result can be appended to an environment, or iterated over.

    Args:
        module: a policy, or any module.
        warn: warn if there is no recurrent submodule.
        strict: propagate errors of a submodule's ``make_tensordict_primer``; if False, warn and skip that submodule.

    Returns:
        One primer, a :class:`~recurl.transforms.Compose` of several, or None.

    Example:
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> [list(primer.primers.keys()) for primer in get_primers_from_module(gru)]
        [['recurrent_state']]
    """
    primers: list[TensorDictPrimer] = []
    for submodule in module.modules():
        make_primer = getattr(submodule, "make_tensordict_primer", None)
        if make_primer is None:
            continue
        try:
            primers.append(make_primer())
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            if strict:
                raise
            warnings.warn(f"No primer from a {type(submodule).__name__}: {error}", RecurlWarning, stacklevel=2)
    if not primers:
        if warn:
            warnings.warn(
                f"{type(module).__name__} has no submodule with recurrent states, so no primer.",
                RecurlWarning,
                stacklevel=2,
            )
        return None
    return primers[0] if len(primers) == 1 else Compose(*primers)


def get_env_transforms_from_module(module: nn.Module, init_key: str = "is_init") -> Transform:
    """Return the transforms that an environment needs for ``module``: an :class:`InitTracker` and the primers.

    Example:
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> [type(transform).__name__ for transform in get_env_transforms_from_module(gru)]
        ['InitTracker', 'TensorDictPrimer']
    """
    tracker = InitTracker(init_key=init_key)
    primers = get_primers_from_module(module, warn=False)
    return tracker if primers is None else Compose(tracker, *primers)


def recurrent_modules(module: nn.Module) -> list[RecurrentModule]:
    """Return the recurrent modules inside ``module``, without duplicates."""
    return [submodule for submodule in module.modules() if isinstance(submodule, RecurrentModule)]
