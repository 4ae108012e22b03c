"""Symmetries named by the options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from recurl.core.errors import ArgumentError
from recurl.core.importing import load_object
from recurl.core.symmetry import Symmetry

__all__ = ["load_symmetries"]


def load_symmetries(texts: Sequence[str]) -> list[Symmetry]:
    """Import symmetries, each ``module:object``.

    Raises:
        ArgumentError: there is no such object, or it is neither a symmetry nor a list of them.
        MissingDependencyError: its module is not installed.

    Example:
        >>> load_symmetries(["fractions:Fraction"])
        Traceback (most recent call last):
        recurl.core.errors.ArgumentError: --symmetry fractions:Fraction must be a Symmetry or a list of them, got ...
    """
    found: list[Symmetry] = []
    for text in texts:
        named: Any = load_object("--symmetry", text, "object")
        several = cast("list[Any]", list(named)) if isinstance(named, list | tuple) else [named]
        if not several or not all(isinstance(one, Symmetry) for one in several):
            raise ArgumentError(f"--symmetry {text} must be a Symmetry or a list of them, got {named!r:.80}.")
        found += several
    return found
