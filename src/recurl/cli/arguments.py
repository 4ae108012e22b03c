"""Command lines from dataclasses: tyro parses them, errors become one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from recurl.cli.help import HELP, HELP_ALL, list_help, show_help
from recurl.errors import ArgumentError
from recurl.nearest import nearest
from recurl.ranges import Field, check_fields, fields_of, flag, whole_number
from recurl.trainers.env_name import EnvSource

_T = TypeVar("_T")
_BOX = re.compile(r"[│╭╮╰╯]|\x1b\[[0-9;]*m")
_RULE = "──"
_CHOICE = re.compile(r"invalid choice '(.*)' for argument .* Expected one of \((.*)\) ?\.")
_OPTIONAL = re.compile(r"no type matching \{None\}\|.* could be instantiated .* Got errors: .*: (must be .*)")
_OPTIONS = ConstructorRegistry()


@_OPTIONS.primitive_rule
def _env(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """Read an id where Python also takes functions and environments."""
    if cast(Any, info.type) != EnvSource:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="STR",
        instance_from_str=lambda texts: texts[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


@_OPTIONS.primitive_rule
def _whole(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Read whole numbers as :func:`whole_number` does."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: whole_number(texts[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadsRun:
    """Options of a command that makes the environment and the networks of a run."""

    trust_run: bool = False
    """Import what the run's files name: an environment, a cell, a wrapper, a callback or an algorithm outside of
    recurl. Say so for folders of your own or of someone whom you trust: it runs their code."""


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
    _show_help_if_asked(kind, arguments, prog)
    arguments = _gathered(arguments, kind, prog=prog)
    with _complaining(prog):
        wanted = tyro.cli(kind, args=arguments, prog=prog, registry=_OPTIONS)
    check_fields(wanted)
    return wanted


def parse_known_arguments(kind: type[_T], arguments: Sequence[str], *, prog: str) -> tuple[_T, list[str]]:
    """Read a dataclass from some of the arguments, and return it with the others.

    Args:
        kind: see :func:`parse_arguments`.
        arguments: see :func:`parse_arguments`.
        prog: see :func:`parse_arguments`.

    Raises:
        ArgumentError: the arguments don't fit, or a value is out of its field's range.
        SystemExit: help was asked for and has been printed.
    """
    _show_help_if_asked(kind, arguments, prog)
    arguments = _gathered(arguments, kind, prog=prog)
    with _complaining(prog):
        wanted, others = tyro.cli(kind, args=arguments, prog=prog, registry=_OPTIONS, return_unknown_args=True)
    check_fields(wanted)
    return wanted, others


def _show_help_if_asked(kind: type, arguments: Sequence[str], prog: str) -> None:
    if not {*HELP, HELP_ALL}.isdisjoint(arguments):
        show_help(kind, prog, everything=HELP_ALL in arguments)


@contextlib.contextmanager
def _complaining(prog: str) -> Generator[None]:
    """Turn what tyro prints when it refuses arguments, inside the block, into an error of one line."""
    # tyro draws its boxes, which _one_line reads, with what the encoding of the stream offers.
    said, complaint = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
            yield
    except SystemExit:
        raise ArgumentError(_one_line(_text(complaint) or _text(said), prog)) from None


def parse_subcommand(
    kinds: Mapping[str, type[_T]], arguments: Sequence[str], *, prog: str, what: str, description: str
) -> _T:
    """Read one of several dataclasses, which the first argument names.

    Args:
        kinds: the dataclasses by name; their docstrings are the help text.
        arguments: the arguments after the command's name.
        prog: the command.
        what: kind of the names, for messages and the help.
        description: first line of the help text.

    Raises:
        ArgumentError: there is no such name, or see :func:`parse_arguments`.
        SystemExit: help was asked for and has been printed.
    """
    name = arguments[0] if arguments else ""
    if name in kinds:
        return parse_arguments(kinds[name], arguments[1:], prog=f"{prog} {name}")
    if name in (*HELP, HELP_ALL):
        print(list_help(prog, kinds, what, description))
        raise SystemExit(0)
    raise ArgumentError(f"There is no {what} {name!r}: use {prog} {', '.join(kinds)}.{nearest(name, kinds)}")


def _fields(kind: type) -> dict[str, Field]:
    """Return the fields of a dataclass, those of nested ones included, by the words that set them (``--no-x`` too)."""
    found: dict[str, Field] = {}
    for field in fields_of(kind):
        if dataclasses.is_dataclass(field.kind):
            found |= _fields(field.kind)
        else:
            found[flag(field.name)] = field
    off = {flag(f"no_{field.name}"): field for field in found.values() if field.kind is bool and not field.many}
    return off | found  # a field may have such a name


def _option(word: str) -> str:
    """Return the option that a word of the command line begins with, as its help shows it; other words unchanged."""
    return flag(word.partition("=")[0][2:]) if word.startswith("--") else word


def _gathered(arguments: Sequence[str], kind: type, *, prog: str) -> list[str]:
    """Return the arguments, with all values of an option that takes several at the first place where it is given.

    tyro would take the last ones alone, and of other options the last value.

    Raises:
        ArgumentError: an option that takes one value is given twice.

    Example:
        >>> @dataclasses.dataclass
        ... class Options:
        ...     wrapper: tuple[str, ...] = ()
        ...     seed: int = 0
        >>> _gathered(["--wrapper", "a", "--seed", "1", "--wrapper=b"], Options, prog="demo")
        ['--wrapper', 'a', 'b', '--seed', '1']
        >>> _gathered(["--seed", "1", "--seed=2"], Options, prog="demo")
        Traceback (most recent call last):
        ...
        recurl.errors.ArgumentError: --seed must be given once, got '--seed 1' and '--seed=2' (see demo --help)
    """
    fields = _fields(kind)
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([])
        groups[-1].append(argument)
    gathered: dict[str, list[str]] = {}
    for place, group in enumerate(groups):
        field = fields.get(_option(group[0])) if group else None
        if field is None:
            gathered[str(place)] = group
        elif field.many:
            name, equals, value = group[0].partition("=")
            gathered.setdefault(field.name, [name]).extend(([value] if equals else []) + group[1:])
        elif field.name in gathered:
            given = f"{' '.join(gathered[field.name])!r} and {' '.join(group)!r}"
            raise ArgumentError(f"{flag(field.name)} must be given once, got {given} (see {prog} --help)")
        else:
            gathered[field.name] = group
    return [argument for group in gathered.values() for argument in group]


def without_options(arguments: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the arguments without the options, and their values, that ``others`` give anew.

    Example:
        >>> without_options(["--gamma", "0.9", "--env_kwargs", "k=8", "n=2", "--seed=1"], ["--env-kwargs", "k=3"])
        ['--gamma', '0.9', '--seed=1']
        >>> without_options(["ppo", "--no-compile"], ["--compile"])
        ['ppo']
    """

    def name(word: str) -> str:
        return _option(word).replace("--no-", "--", 1)

    given = {name(word) for word in others if word.startswith("--")}
    kept: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--"):
            dropping = name(word) in given
        if not dropping:
            kept.append(word)
    return kept


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def _one_line(box: str, prog: str) -> str:
    """Return the complaint in a box of tyro's, with the option that it suggests."""
    complaint, *more = _sections(box)
    text = re.sub("^Error parsing (config|options): ", "", complaint)
    near = [option for section in more for option in re.findall(r"^Perhaps you meant: (--[\w-]+)", section)]
    text = _OPTIONAL.sub(r"\1", text)
    choice = _CHOICE.match(text)
    meant = nearest(choice[1], re.findall(r"'([^']*)'", choice[2])) if choice else ""
    return f"{text}{f': did you mean {near[0]}?' if near else meant} (see {prog} --help)"


def _sections(box: str) -> list[str]:
    """Return the text between the rules of a box, the title left out."""
    sections: list[list[str]] = []
    for line in box.splitlines():
        text = _BOX.sub("", line).strip()
        if _RULE in text:
            sections.append([])
        elif sections:
            sections[-1].append(text)
    return [" ".join(" ".join(lines).split()) for lines in sections]
