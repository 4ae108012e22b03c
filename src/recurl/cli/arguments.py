"""Command-line arguments from dataclasses, with one-line errors."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from typing import TypeVar

import tyro

from recurl.errors import ArgumentError
from recurl.ranges import check_fields

_T = TypeVar("_T")
_BOX = re.compile(r"[│╭╮╰╯]|\x1b\[[0-9;]*m")


def parse_arguments(kind: type[_T], arguments: Sequence[str], *, prog: str) -> _T:
    """Read a dataclass from command-line arguments.

    Args:
        kind: the dataclass; every field is an option, its docstring the help text.
        arguments: the arguments after the command's name.
        prog: the command, as shown in help texts.

    Raises:
        ArgumentError: the arguments don't fit, or a value is out of its field's range.
        SystemExit: help was asked for and has been printed.
    """
    # tyro draws its boxes, which _one_line reads, in what the encoding of the stream offers.
    said, complaint = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
            wanted = tyro.cli(kind, args=list(arguments), prog=prog)
    except SystemExit as end:
        if end.code:
            raise ArgumentError(_one_line(_text(complaint) or _text(said), prog)) from None
        sys.stdout.write(_text(said))
        raise
    check_fields(wanted)
    return wanted


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def _one_line(box: str, prog: str) -> str:
    lines = [_BOX.sub("", line).strip() for line in box.splitlines()]
    inside: list[str] = []
    for line in lines[1:]:
        if line.startswith("──"):
            break
        inside.append(line)
    text = " ".join(" ".join(inside).split()).removeprefix("Error parsing config: ")
    return f"{text} (see {prog} --help)"
