"""Command-line parsing into dataclasses with tyro, and one-line errors."""

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
from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest
from recurl.core.ranges import Field, check_fields, fields_of, flag, whole_number
from recurl.trainers.env_name import EnvSource

_T = TypeVar("_T")
_BOX = re.compile(r"[│╭╮╰╯]|\x1b\[[0-9;]*m")
_RULE = "──"
_CHOICE = re.compile(r"invalid choice '(.*)' for argument .* Expected one of \((.*)\) ?\.")
_OPTIONAL = re.compile(r"no type matching \{None\}\|.* could be instantiated .* Got errors: .*: (must be .*)")
_OPTIONS = ConstructorRegistry()


@_OPTIONS.primitive_rule
def _env(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """Parse environment options as ids; functions and environments are accepted in Python only."""
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
def _integer(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Parse integers with :func:`whole_number`."""
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
    """Options of commands that construct the environment and the networks of a run."""

    trust_run: bool = False
    """Import what the run's files name: an environment, a cell, a wrapper, a callback or an algorithm outside of
    recurl. Use it only for your own folders or those of people you trust, since it runs their code."""


def parse_arguments(kind: type[_T], arguments: Sequence[str], *, prog: str) -> _T:
    """Parse command-line arguments into a dataclass.

    Args:
        kind: the dataclass. Every field is an option, with its docstring as the help text.
        arguments: the arguments after the command's name.
        prog: the command, as shown in help texts.

    Raises:
        ArgumentError: the arguments are invalid, or a value is out of its field's range.
        SystemExit: help was requested and has been printed.
    """
    _show_help_if_requested(kind, arguments, prog)
    arguments = _switches(_merge_repeated(arguments, kind, prog=prog), kind)
    with _tyro_errors(prog):
        args = tyro.cli(kind, args=arguments, prog=prog, registry=_OPTIONS)
    check_fields(args)
    return args


def parse_known_arguments(kind: type[_T], arguments: Sequence[str], *, prog: str) -> tuple[_T, list[str]]:
    """Parse the arguments that belong to a dataclass, and return it with the remaining ones.

    Args:
        kind: see :func:`parse_arguments`.
        arguments: see :func:`parse_arguments`.
        prog: see :func:`parse_arguments`.

    Raises:
        ArgumentError: the arguments are invalid, or a value is out of its field's range.
        SystemExit: help was requested and has been printed.
    """
    _show_help_if_requested(kind, arguments, prog)
    arguments = _switches(_merge_repeated(arguments, kind, prog=prog), kind)
    with _tyro_errors(prog):
        args, others = tyro.cli(kind, args=arguments, prog=prog, registry=_OPTIONS, return_unknown_args=True)
    check_fields(args)
    return args, others


def _show_help_if_requested(kind: type, arguments: Sequence[str], prog: str) -> None:
    if not {*HELP, HELP_ALL}.isdisjoint(arguments):
        show_help(kind, prog, everything=HELP_ALL in arguments)


@contextlib.contextmanager
def _tyro_errors(prog: str) -> Generator[None]:
    """Convert tyro's printed errors inside the block into a one-line ``ArgumentError``."""
    # UTF-8, since tyro chooses the box characters that _one_line parses by the encoding of the stream.
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            yield
    except SystemExit:
        raise ArgumentError(_one_line(_text(stderr) or _text(stdout), prog)) from None


def parse_subcommand(
    kinds: Mapping[str, type[_T]], arguments: Sequence[str], *, prog: str, what: str, description: str
) -> _T:
    """Parse arguments into one of several dataclasses, selected by the first argument.

    Args:
        kinds: the dataclasses by name, with their docstrings as help texts.
        arguments: the arguments after the command's name.
        prog: the command.
        what: noun for the names, for messages and the help.
        description: first line of the help text.

    Raises:
        ArgumentError: the name is unknown, or see :func:`parse_arguments`.
        SystemExit: help was requested and has been printed.
    """
    name = arguments[0] if arguments else ""
    if name in kinds:
        return parse_arguments(kinds[name], arguments[1:], prog=f"{prog} {name}")
    if name in (*HELP, HELP_ALL):
        print(list_help(prog, kinds, what, description))
        raise SystemExit(0)
    raise ArgumentError(f"There is no {what} {name!r}: use {prog} {', '.join(kinds)}.{nearest(name, kinds)}")


def _fields(kind: type) -> dict[str, Field]:
    """Return the fields of a dataclass and its nested dataclasses by flag, including ``--no-x`` flags."""
    found: dict[str, Field] = {}
    for field in fields_of(kind):
        if dataclasses.is_dataclass(field.kind):
            found |= _fields(field.kind)
        else:
            found[flag(field.name)] = field
    off = {flag(f"no_{field.name}"): field for field in found.values() if field.kind is bool and not field.many}
    return off | found  # a field may itself be named no_x


def _option(word: str) -> str:
    """Return the option name of a command-line word in the spelling of the help; other words unchanged."""
    return flag(word.partition("=")[0][2:]) if word.startswith("--") else word


def _merge_repeated(arguments: Sequence[str], kind: type, *, prog: str) -> list[str]:
    """Merge repeated uses of multi-value options into the first one.

    tyro alone would keep only the last use.

    Raises:
        ArgumentError: a single-value option is given twice.

    Example:
        >>> @dataclasses.dataclass
        ... class Options:
        ...     wrapper: tuple[str, ...] = ()
        ...     seed: int = 0
        >>> _merge_repeated(["--wrapper", "a", "--seed", "1", "--wrapper=b"], Options, prog="demo")
        ['--wrapper', 'a', 'b', '--seed', '1']
        >>> _merge_repeated(["--seed", "1", "--seed=2"], Options, prog="demo")
        Traceback (most recent call last):
        ...
        recurl.core.errors.ArgumentError: --seed must be given once, got '--seed 1' and '--seed=2' (see demo --help)
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


def _switches(arguments: Sequence[str], kind: type) -> list[str]:
    """Rewrite switches that are neither on nor off by default: ``--x`` to ``--x True`` and ``--no-x`` to ``--x False``.

    Example:
        >>> @dataclasses.dataclass
        ... class Options:
        ...     compile: bool | None = None
        ...     seed: int = 0
        >>> _switches(["--seed", "1", "--no-compile"], Options)
        ['--seed', '1', '--compile', 'False']
    """
    words: list[str] = []
    fields = _fields(kind)
    for word in arguments:
        name = _option(word)
        field = fields.get(name) if word == word.partition("=")[0] else None
        if field is not None and field.kind is bool and field.optional:
            words += [flag(field.name), str(name == flag(field.name))]
        else:
            words.append(word)
    return words


def without_options(arguments: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the arguments without the options, and their values, that ``others`` override.

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
    """Return the error message in one of tyro's boxes as one line, with the suggested option."""
    message, *more = _sections(box)
    text = re.sub("^Error parsing (config|options): ", "", message)
    near = [option for section in more for option in re.findall(r"^Perhaps you meant: (--[\w-]+)", section)]
    text = _OPTIONAL.sub(r"\1", text)
    choice = _CHOICE.match(text)
    meant = nearest(choice[1], re.findall(r"'([^']*)'", choice[2])) if choice else ""
    return f"{text}{f': did you mean {near[0]}?' if near else meant} (see {prog} --help)"


def _sections(box: str) -> list[str]:
    """Return the texts between the horizontal rules of a box, without the title."""
    sections: list[list[str]] = []
    for line in box.splitlines():
        text = _BOX.sub("", line).strip()
        if _RULE in text:
            sections.append([])
        elif sections:
            sections[-1].append(text)
    return [" ".join(" ".join(lines).split()) for lines in sections]
