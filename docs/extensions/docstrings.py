"""Convert the project's docstrings, plain text with Sphinx roles, to the Markdown of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`(~?)([\w.]+)`")


class Docstrings(griffe.Extension):
    """Extension that converts every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)


def _markdown(text: str) -> str:
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return _ROLE.sub(_code, text)


def _code(role: re.Match[str]) -> str:
    short, name = role.groups()
    return f"`{name.rsplit('.', 1)[-1] if short else name}`"
