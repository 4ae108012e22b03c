"""Keyword arguments on a command line."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from recurl.core.errors import ArgumentError


def keyword_arguments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse keyword arguments of the form name=value, where a value is a Python literal or else a string.

    Args:
        option: name of the option, for error messages.
        texts: the arguments.

    Raises:
        ArgumentError: if an argument has another form, or a name appears twice.

    Example:
        >>> keyword_arguments("--env-kwargs", ["k=8", "mode=human"])
        {'k': 8, 'mode': 'human'}
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name.isidentifier():
            raise ArgumentError(f"{option} takes name=value, such as k=8, got {text!r}.")
        if name in arguments:
            raise ArgumentError(f"{option} got {name} twice.")
        arguments[name] = _literal(value)
    return arguments


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two: deeply nested
        return text
