"""Private names of tensordict used by recurl, each with its purpose and a fallback if it disappears.

They are looked up where they are used, so that a missing name doesn't break ``import recurl``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import nn

from recurl.core.private_names import find

__all__ = ["is_biased_softplus", "passes_keywords", "returns_other_entries", "samples"]


def samples(sequence: nn.Module) -> bool:
    """Return whether a ``ProbabilisticTensorDictSequential`` ends with sampling.

    Fallback: False, so none is lowered.
    """
    return getattr(sequence, "_requires_sample", False)


def passes_keywords(module: nn.Module) -> bool:
    """Return whether a ``TensorDictModule`` passes keyword arguments.

    Fallback: True, so none is lowered.
    """
    inner = cast(Any, module)
    return bool(
        inner.method_kwargs or getattr(inner, "_get_kwargs", True) or getattr(inner, "_kwargs", True) is not None
    )


def returns_other_entries(module: nn.Module) -> bool:
    """Return whether a TensorDict module keeps only some of its outputs (``select_out_keys``).

    Fallback: compare ``out_keys`` with ``out_keys_source`` only, which misses a selection of all outputs.
    """
    inner = cast(Any, module)
    selects = hasattr(type(module), "_select_before_return") and inner._select_before_return  # only sequences do
    return selects or inner.out_keys != inner.out_keys_source


def is_biased_softplus(mapping: object) -> bool:
    """Return whether a scale mapping is a ``biased_softplus``, whose class is not public.

    Fallback: False, so none is compiled.
    """
    return type(mapping) is _biased_softplus()


@cache
def _biased_softplus() -> type | None:
    return find("tensordict.nn.utils:biased_softplus", None)
