"""Random command lines generated from the option fields of each command: valid, borderline and absurd."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from recurl.cli import train
from recurl.cli.doctor import Doctor
from recurl.cli.evaluate import Evaluate
from recurl.cli.export import Export
from recurl.cli.main import check_text, error_line, load
from recurl.cli.play import Play
from recurl.core.ranges import Field, Range, fields_of, flag
from recurl.experiments import bench
from recurl.trainers.algorithms.footprint import check_machine

KINDS: dict[tuple[str, ...], Any] = {
    **{("train", name): kind for name, kind in train.kinds().items() if name != "distill"},  # needs a teacher
    ("train",): train.Resume,
    ("evaluate",): Evaluate,
    ("play",): Play,
    ("export",): Export,
    **{("bench", name): kind for name, kind in bench.KINDS.items()},
}
POSITIONAL = "run"

_DOCTOR = ("--env", "--num-envs", "--env-kwargs", "--policy", "--steps", "--auto-register-policy-transforms", "run")
_STRANGE = [
    "",
    " ",
    "-",
    "--",
    "=",
    "\udcff\udcfe",
    "\U0001f98a",
    "\u0663",
    "\x00",
    "%s",
    "{}",
    "a" * 5000,
    "../..",
    "*",
]
_NUMBERS = ["nan", "inf", "-inf", "1e6", "1e-320", "1e309", "10k", "0x10", "1_0", "9" * 5000, "-0", "+1", "1.", "True"]
_NAMED: dict[str, list[str]] = {
    "env": [
        "recurl/TMaze-v0",
        "CartPole-v1",
        "Pendulum-v1",
        "NoSuch-v0",
        "a:b:c",
        "..:x",
        "os:path",
        "recurl/",
        ":",
        "1",
    ],
    "env_kwargs": ["k=8", "corridor_length=3", "k", "=", "k=" + "(" * 500, "class=1", "k=1e999", "k=\udcff", "a b=1"],
    "device": [
        "cpu",
        "cuda",
        "cuda:9",
        "cpu:3",
        "cpu:-1",
        "meta",
        "hpu",
        "xla",
        "mps",
        "gpu",
        "cuda:",
        "cpu:0",
        "vulkan",
    ],
    "backend": ["fastest", "auto", "loop", "pad", "cpu", "triton", "scan", "magic"],
    "symmetry": ["recurl.envs.tasks:ARM_MIRROR", "recurl.envs.tasks:CARTPOLE_MIRROR", "os:path", "a:b:c", ":"],
    "preset": ["masked-cartpole", "tmaze", "no-such"],
    "backends": ["loop", "pad", "magic", "fastest"],
    "policy": ["os:getcwd", "no.such:thing", ":", "os", "os:", ":f", "a:b:c", "..:f", "sys:argv"],
}


def commands(count: int, seed: int = 0, folder: Path | None = None) -> Iterator[list[str]]:
    """Yield random command lines, without the name of the program.

    Args:
        count: number of command lines.
        seed: seed of the random choices.
        folder: folder that generated paths point into; it need not exist. It may contain a run named ``run``.
    """
    generator = random.Random(seed)
    place = Path("torture") if folder is None else folder
    for _ in range(count):
        command = generator.choice([*KINDS, ("doctor",)])
        words = _doctor(generator, place) if command == ("doctor",) else _options(KINDS[command], generator, place)
        for _ in range(generator.choice([0, 0, 0, 1, 2])):
            words = generator.choice(_MISHAPS)(words, generator)
        yield [*command, *words]


def _options(kind: type, generator: random.Random, place: Path) -> list[str]:
    """Return a random subset of the options of a command, some with values out of range."""
    words: list[str] = []
    wrong = generator.choice([0.0, 0.0, 0.1, 0.5])
    for field in leaf_fields(kind):
        needed = field.default is MISSING
        if generator.random() < (0.95 if needed else 0.15):
            words += _option(field, generator, place, wrong)
    return words


def leaf_fields(kind: type) -> Iterator[Field]:
    """Yield the fields of a dataclass of options and of the dataclasses nested in it."""
    for field in fields_of(kind):
        if is_dataclass(field.kind):
            yield from leaf_fields(field.kind)
        else:
            yield field


def _option(field: Field, generator: random.Random, place: Path, wrong: float) -> list[str]:
    if field.kind is bool:
        return [flag(field.name if generator.random() < 0.5 else f"no-{field.name}")]
    count = generator.choice([0, 1, 1, 2, 3]) if field.many else 1
    values = [_value(field, generator, place, generator.random() < wrong) for _ in range(count)]
    if field.name == POSITIONAL:
        return values
    name = flag(field.name)
    return [f"{name}={values[0]}"] if len(values) == 1 and generator.random() < 0.2 else [name, *values]


def _value(field: Field, generator: random.Random, place: Path, wrong: bool) -> str:
    if wrong:
        return generator.choice([*_STRANGE, *_NUMBERS, *edges(field.range, field.kind, outside=True)])
    if field.choices:
        return str(generator.choice(field.choices))
    if field.kind is Path:
        return str(place / generator.choice(["run", "new", "file", "none/new", "../outside", "n" * 300]))
    if field.name in _NAMED:
        return generator.choice(_NAMED[field.name])
    return generator.choice(edges(field.range, field.kind, outside=False))


def edges(found: Range | None, kind: type, *, outside: bool) -> list[str]:
    """Return numbers at the edges of a range and inside it, or numbers outside it."""
    number: Callable[[float], Any] = int if kind is int else float
    if found is None:
        return ["text"]
    low, high = max(found.low, -1e9), min(found.high, 1e18)
    if outside:
        return [str(number(value)) for value in (low - 1, high + 1, -high, high * 1000)]
    small = [low + part for part in ((1, 2, 7) if kind is int else (0.001, 0.5, 1.0))]
    return [str(number(value)) for value in (low, high, *small)]


def _doctor(generator: random.Random, place: Path) -> list[str]:
    """Return options of ``recurl doctor``, always including one that makes it stop early."""
    words = ["--policy", generator.choice(_NAMED["policy"])]
    for name in generator.sample(_DOCTOR, generator.randrange(4)):
        if name == "run":
            words.append(str(place / "nothing"))
        elif name.startswith("--auto"):
            words.append(name)
        else:
            pool = _NAMED.get(name.removeprefix("--").replace("-", "_"), [*_NUMBERS, "-1", "0", "4"])
            words += [name, generator.choice([*pool, *_STRANGE])]
    return words


def _drop(words: list[str], generator: random.Random) -> list[str]:
    place = generator.randrange(len(words) + 1)
    return words[:place] + words[place + 1 :]


def _double(words: list[str], generator: random.Random) -> list[str]:
    place = generator.randrange(len(words) + 1)
    return [*words, *words[place : place + 2]]


def _misspell(words: list[str], generator: random.Random) -> list[str]:
    if not words:
        return ["--hepl"]
    place = generator.randrange(len(words))
    word = words[place]
    at = generator.randrange(len(word) + 1)
    changed = generator.choice(
        [word[:at] + word[at + 1 :], word[:at] + word[at:][::-1], word.upper(), word + word[-1:]]
    )
    return [*words[:place], changed, *words[place + 1 :]]


def _insert(words: list[str], generator: random.Random) -> list[str]:
    place = generator.randrange(len(words) + 1)
    return [*words[:place], generator.choice([*_STRANGE, *_NUMBERS, "stray", "-x"]), *words[place:]]


_MISHAPS = (_drop, _double, _misspell, _insert)


def check(arguments: Sequence[str]) -> str:
    """Parse and check a command line without executing it.

    Returns:
        ``"accepted"``, ``"helped"``, or the error line for stderr.

    Raises:
        Exception: any error that would end the command with a traceback.
    """
    try:
        check_text(arguments)
        command = load(arguments)
        wanted = command.read(list(arguments[1:]))
        if isinstance(wanted, Doctor):  # random options always make the doctor stop early
            return "accepted" if command.run(wanted) in (0, 1) else "refused"
        if hasattr(wanted, "options"):
            check_machine(wanted.options)
    except SystemExit as end:
        if end.code:
            raise
        return "helped"
    except Exception as error:
        said = error_line(error)
        if said is None:
            raise
        return said
    return "accepted"
