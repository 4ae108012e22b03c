"""Generator of docs/mistakes.md from the table of likely mistakes, ``mistakes.toml``.

``python -m tests.docs.mistakes`` rewrites the page; test_mistakes.py makes every mistake and compares the page.
"""

from __future__ import annotations

import textwrap
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MISTAKES: list[dict[str, Any]] = TABLE["mistake"]
INTRODUCTION = """\
# Mistakes and their messages

This page lists common mistakes and recurl's error messages, which state what must hold, what was given, and what to do.
The tests make each of these mistakes and compare the message. All examples use this setup:
"""


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION, block("python", TABLE["setup"])]
    for section, mistakes in groupby(MISTAKES, lambda mistake: mistake["section"]):
        parts.append(f"## {section}\n")
        for mistake in mistakes:
            language = "sh" if mistake["error"] == "exit code 2" else "python"
            raised = mistake["error"] not in ("exit code 2", "printed")
            said = f"{mistake['error']}: {mistake['message']}" if raised else mistake["message"]
            parts += [f"### {mistake['title']}\n", block(language, mistake["code"]), block("text", wrapped(said))]
    return "\n".join(parts)


def block(language: str, text: str) -> str:
    """Return a code block."""
    return f"```{language}\n{text.strip()}\n```\n"


def wrapped(text: str) -> str:
    """Return a message in lines that fit the page."""
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    PAGE.write_text(page())
