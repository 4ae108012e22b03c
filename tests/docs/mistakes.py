"""Generator of docs/mistakes.md from the table of likely mistakes, ``mistakes.toml``.

``python -m tests.docs.mistakes`` writes the page; test_mistakes.py makes every mistake, and compares the page.
"""

from __future__ import annotations

import re
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

This page lists common mistakes and recurl's messages, which state what must hold, what was given, and what to do. Find
a message in the index by its first words, or search the page for any part of it. The tests make each of these mistakes
and compare the message.

## Index of messages
"""
SETUP = """\
## Setup of the examples

All examples use this setup:
"""
LONGEST, SHORTEST = 64, 16  # of the opening words of a message that make a heading


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION, index(), SETUP, block("python", TABLE["setup"])]
    for section, mistakes in groupby(MISTAKES, lambda mistake: mistake["section"]):
        parts.append(f"## {section}\n")
        for mistake in mistakes:
            language = "sh" if mistake["error"] == "exit code 2" else "python"
            raised = mistake["error"] not in ("exit code 2", "printed")
            said = f"{mistake['error']}: {mistake['message']}" if raised else mistake["message"]
            heading = f"### {escaped(opening(mistake['message']))} {{: #{anchor(mistake)} }}\n"
            parts += [heading, f"{mistake['cause']}.\n", block(language, mistake["code"]), block("text", wrapped(said))]
    return "\n".join(parts)


def index() -> str:
    """Return the table of messages, sorted by their first words."""
    rows = {
        (opening(mistake["message"]), mistake["cause"]): f"[{mistake['section']}](#{anchor(mistake)})"
        for mistake in MISTAKES
    }
    found = sorted(rows, key=lambda row: [re.sub(r"\W+", " ", text).strip().lower() for text in row])
    lines = [f"| {escaped(words)} | {cause} | {rows[words, cause]} |" for words, cause in found]
    return "\n".join(["| message | cause | section |", "|---|---|---|", *lines, ""])


def opening(message: str) -> str:
    """Return the first words of a message, to the end of a clause or to a length; the program's name is omitted."""
    text = message.removeprefix("recurl: ")
    ends = (match.start() for match in re.finditer(r"[.:;](?= |$)", text))
    clause = text[: next((end for end in ends if end >= SHORTEST), len(text))]
    return (
        clause
        if len(clause) <= LONGEST
        else textwrap.shorten(clause, LONGEST, placeholder=" …", break_on_hyphens=False)
    )


def anchor(mistake: dict[str, Any]) -> str:
    """Return the name of a mistake in links."""
    return re.sub(r"[^a-z0-9]+", "-", mistake["cause"].lower()).strip("-")


def escaped(text: str) -> str:
    """Return text in which Markdown and HTML change nothing."""
    return re.sub(r"([\\`*\[\]{}<>|#])", r"\\\1", text)


def block(language: str, text: str) -> str:
    """Return a code block."""
    return f"```{language}\n{text.strip()}\n```\n"


def wrapped(text: str) -> str:
    """Return a message in lines that fit the page."""
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    PAGE.write_text(page())
