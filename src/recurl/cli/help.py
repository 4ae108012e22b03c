"""Help texts of option dataclasses, with options in groups."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_type_hints

import tyro

from recurl.core.ranges import Field, fields_of, flag

HELP = ("-h", "--help")
HELP_ALL = "--help-all"

_GROUPS = {
    "environment": "env env_kwargs num_envs wrapper vectorization env_workers env_groups env_timeout "
    "collectors ray_address max_lag previous_action previous_reward observation_noise observation_delay "
    "reset_memory_at trial_episodes action_mask show_action_mask drop_observations",
    "network": "cell hidden_size num_layers encoder encoder_width encoder_layers image_layout head_width head_layers "
    "shared_trunk critic_observations normalize_observations",
    "algorithm": "",
    "run": "total_steps seed init_from run_dir overwrite preset config save_config trust_run print_model stop_return "
    "checkpoint_every on_nonfinite rank_timeout callback warm_up updates csv",
    "evaluation": "eval_every eval_episodes eval_env eval_env_kwargs eval_max_steps keep_best stop_eval_return",
    "device": "device backend matmul_precision threads compile cuda_graph overlap store_states drawn_on",
    "logging": "logger",
}
_BASIC = (
    "env env_kwargs num_envs cell hidden_size encoder rollout_steps learning_rate gamma total_steps seed run_dir "
    "preset config eval_every device logger epochs minibatches sequence_length clip_epsilon entropy_coeff gae_lambda "
    "buffer_size learning_starts gradient_steps slices slice_length teacher episodes teacher_observations "
    "warm_up updates csv"
)
GROUPS = {title: tuple(names.split()) for title, names in _GROUPS.items()}
"""Training options by group; options without a group belong to the algorithm."""
BASIC = frozenset(_BASIC.split())
"""Options in the short help of training."""

_MAX_WIDTH = 100
_INDENT = 28
_NO_BREAK = "\xa0"
_NAMES = {str: "STR", int: "INT", float: "FLOAT"}


class _Option(NamedTuple):
    name: str
    syntax: str
    text: str


def show_help(kind: type, prog: str, *, everything: bool) -> None:
    """Print the help of an option dataclass and exit.

    Args:
        kind: the dataclass. Its docstring describes the command, and the docstrings below its fields the options. If it
            nests the options of an algorithm, options are shown in groups.
        prog: the command.
        everything: show all options, not only the basic ones.

    Raises:
        SystemExit: always, with code 0.
    """
    print(help_text(kind, prog, everything=everything, width=min(shutil.get_terminal_size().columns, _MAX_WIDTH)))
    raise SystemExit(0)


def help_text(kind: type, prog: str, *, everything: bool = False, width: int = 80) -> str:
    """Return the help of an option dataclass.

    Args:
        kind: see :func:`show_help`.
        prog: the command.
        everything: show all options, not only the basic ones.
        width: maximum line length, unless a word is longer.

    Example:
        >>> @dataclasses.dataclass
        ... class Options:
        ...     '''Greet.'''
        ...     name: str
        ...     times: int = 1
        >>> print(help_text(Options, "greet"))
        usage: greet --name STR [OPTIONS]
        <BLANKLINE>
        Greet.
        <BLANKLINE>
        options:
          --name STR                (required)
          --times INT               (default: 1)
          -h, --help                Show this help.
    """
    options = list(_options(kind))
    config = next((field.kind for field in fields_of(kind) if hasattr(field.kind, "algorithm")), None)
    needed = " ".join(option.syntax for option in options if option.text.endswith("(required)"))
    lines = [f"usage: {prog} {needed}{' ' if needed else ''}[OPTIONS]", "", *_paragraphs(kind.__doc__ or "", width)]
    own = [_Option("", ", ".join(HELP), "Show this help.")]
    if config is None:
        return "\n".join([*lines, *_group("options", [*options, *own], width)])
    own = [own[0], _Option("", HELP_ALL, f"Show all {len(options)} options.")]
    shown = {option.name for option in options} if everything else BASIC | _user_defined(config)
    for title, members in _grouped(options, config.algorithm.upper()).items():
        lines += _group(title, [option for option in members if option.name in shown], width)
    return "\n".join([*lines, *_group("help", own, width)])


def list_help(prog: str, kinds: Mapping[str, type], what: str, description: str) -> str:
    """Return the help of a command whose first argument selects one of several dataclasses.

    Args:
        prog: the command.
        kinds: the dataclasses by name.
        what: noun for the names.
        description: first line of the text.

    Example:
        >>> print(list_help("brew", {"tea": dict}, "drink", "Brew a drink."))
        usage: brew {tea} [OPTIONS]
        <BLANKLINE>
        Brew a drink.
        <BLANKLINE>
        drinks:
          tea                       dict() -> new empty dictionary
        <BLANKLINE>
        Options of each: brew DRINK --help
    """
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    texts = {name: (kind.__doc__ or "").partition("\n")[0].removeprefix("Options of ") for name, kind in kinds.items()}
    rows = [_Option(name, name, text) for name, text in texts.items()]
    names = "{" + ",".join(kinds) + "}"
    head = [f"usage: {prog} {names} [OPTIONS]", "", *textwrap.wrap(description, width)]
    return "\n".join([*head, *_group(f"{what}s", rows, width), "", f"Options of each: {prog} {what.upper()} --help"])


def _user_defined(config: type) -> set[str]:
    """Return the options that a user-defined algorithm adds."""
    bases = [base for base in config.__mro__ if base.__module__.partition(".")[0] not in ("recurl", "builtins")]
    return {name for base in bases for name in vars(base).get("__annotations__", {})}


def _grouped(options: list[_Option], algorithm: str) -> dict[str, list[_Option]]:
    groups: dict[str, list[_Option]] = {algorithm if title == "algorithm" else title: [] for title in GROUPS}
    title_of = {name: title for title, names in GROUPS.items() for name in names}
    for option in options:
        groups[title_of.get(option.name, algorithm)].append(option)
    for title, members in groups.items():
        order = GROUPS.get(title, ())
        members.sort(key=lambda option: order.index(option.name) if option.name in order else 0)
    return groups


def _group(title: str, options: list[_Option], width: int) -> list[str]:
    lines = ["", f"{title}:"] if options else []
    for option in options:
        head = f"  {option.syntax}"
        lines_of_text = textwrap.wrap(option.text, width - _INDENT, break_long_words=False, break_on_hyphens=False)
        text = [line.replace(_NO_BREAK, " ") for line in lines_of_text]
        if len(head) < _INDENT - 1 and text:
            head = f"{head:{_INDENT}}{text.pop(0)}"
        lines += [head, *(" " * _INDENT + line for line in text)]
    return lines


def _options(kind: type) -> Iterator[_Option]:
    """Yield the options of a dataclass, including those of nested dataclasses."""
    texts = _texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields_of(kind):
        if dataclasses.is_dataclass(field.kind):
            yield from _options(field.kind)
        else:
            text = " ".join(texts.get(field.name, "").split())
            default = _default(field)
            yield _Option(field.name, _syntax(field, hints[field.name]), f"{text} {default}".strip())


def _syntax(field: Field, hint: Any) -> str:
    markers = get_args(hint)[1:]
    if tyro.conf.Positional in markers:
        return field.name.upper() + (" ..." if field.many else "")
    if field.kind is bool:
        single = tyro.conf.FlagCreatePairsOff in markers
        return flag(field.name) if single else f"{flag(field.name)}, {flag(f'no_{field.name}')}"
    value = "{" + ",".join(map(str, field.choices)) + "}" if field.choices else _NAMES.get(field.kind, "PATH")
    return f"{flag(field.name)} {value}{' ...' if field.many else ''}"


def _default(field: Field) -> str:
    if field.default is dataclasses.MISSING:
        return "(required)"
    if field.default is None or field.default == () or (field.kind is bool and not field.default):
        return ""
    value = " ".join(map(str, field.default)) if field.many else field.default
    return f"(default:{_NO_BREAK}{'on' if value is True else value})"


def _paragraphs(text: str, width: int) -> list[str]:
    """Return the wrapped lines of a docstring up to its first section."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.partition("\n")[0] in ("Raises:", "Args:", "Example:", "Attributes:"):
            break
        lines += [*([""] if lines else []), *textwrap.wrap(" ".join(paragraph.split()), width)]
    return lines


@cache
def _texts(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, by field name."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base)) if dataclasses.is_dataclass(base) else ""
        except (OSError, TypeError):  # created at runtime, or interactively
            continue
        if not source:
            continue
        (tree,) = ast.parse(source).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for before, after in pairwise(body):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[before.target.id] = text.value
    return found
