"""Names of the value estimators that losses accept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError

__all__ = ["ValueEstimators", "find_kind", "hyperparameters_of"]


class ValueEstimators(Enum):
    """Value estimators, for ``make_value_estimator`` of losses."""

    TD0 = "one reward and a bootstrapped value"
    TD1 = "all rewards to the end of the sequence, and a bootstrapped value there"
    TDLambda = "lambda-return"
    GAE = "generalised advantage estimation"
    VTrace = "V-trace"


def find_kind(
    value_type: ValueEstimators | str, supported: Collection[ValueEstimators], loss: object
) -> ValueEstimators:
    """Return the estimator named ``value_type``, ignoring case.

    Raises:
        ArgumentError: no estimator has this name.
        UnsupportedError: ``loss`` doesn't support it.

    Example:
        >>> find_kind("tdlambda", ValueEstimators, None).name
        'TDLambda'
    """
    found = next(
        (kind for kind in ValueEstimators if str(value_type).lower() in (kind.name.lower(), str(kind).lower())), None
    )
    if found is None:
        raise ArgumentError(f"value_type must be one of {[kind.name for kind in ValueEstimators]}, got {value_type!r}.")
    if found not in supported:
        raise UnsupportedError(
            f"{type(loss).__name__} has no {found.name}: it takes {[kind.name for kind in supported]}."
        )
    return found


def hyperparameters_of(
    kind: ValueEstimators | None, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``defaults`` overridden by ``given``.

    Raises:
        ArgumentTypeError: ``given`` has a name that is not in ``defaults``.
    """
    unknown = sorted(given.keys() - defaults.keys())
    if unknown:
        name = "The default" if kind is None else kind.name
        raise ArgumentTypeError(f"{name} has no hyperparameters {unknown}: it takes {sorted(defaults)}.")
    return {**defaults, **given}
