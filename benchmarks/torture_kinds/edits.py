"""Edited, removed or replaced parts of run files: the run resumes, or is refused with a one-line reason."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint
from torture_kinds.forks import Broken, Command
from torture_kinds.small_runs import ALGORITHMS, UPDATES, whole

COUNT = 600
VALUES = (None, "x", [], {}, -1, 0, 1.5, 10**12, True, math.nan, math.inf, {"a": 1}, [1], ["a=1"], "9", "\0", "../x")
_GONE = object()


def attack(number: int, place: Path) -> tuple[str, str]:
    algorithm, draw = [name for name in ALGORITHMS if "overlap" not in name][number % 3], random.Random(number)
    what = ("config.json", "checkpoint", "metrics.csv", "config.json", "checkpoint")[number // 3 % 5]
    source, _ = whole(place, algorithm, every=UPDATES // 2 + 1)
    folder = RunFolder(place / "run")
    shutil.copytree(source.path, folder.path)
    latest_checkpoint(folder.checkpoints).unlink()  # so that part of the run remains to be done
    edit = {"config.json": edit_config, "checkpoint": edit_checkpoint, "metrics.csv": edit_metrics}[what]
    edit(folder, draw)
    command = ["evaluate", folder.path, "--episodes", 2] if draw.random() < 0.3 else ["train", "--resume", folder.path]
    done = Command(command, place / "log")
    if done.wait() == 0:
        return what, "resumed"
    wrong = done.refusal()
    if wrong is not None:
        raise Broken(what, wrong)
    return what, "refused in one line"


def edit_config(folder: RunFolder, draw: random.Random) -> None:
    options = json.loads(folder.config.read_text())
    kind = draw.random()
    if kind < 0.1:
        text = folder.config.read_text()
        cut = draw.randrange(len(text))
        folder.config.write_text(
            draw.choice((text[:cut], text[:cut] + "}" + text[cut:], "[1]", "", "null", "[" * 100_000))
        )
        return
    name = draw.choice(
        [*(name for name in options if name != "total_steps"), "new"]
    )  # which could make the run last for hours
    if kind < 0.3:
        options.pop(name, None)
    else:
        options[name] = draw.choice(VALUES)
    folder.config.write_text(json.dumps(options))


def edit_checkpoint(folder: RunFolder, draw: random.Random) -> None:
    path = latest_checkpoint(folder.checkpoints)
    state = torch.load(path, weights_only=True)
    where = draw.choice(list(places(state)))
    file = io.BytesIO()
    torch.save(put(state, where, _GONE if draw.random() < 0.3 else other(get(state, where), draw)), file)
    path.write_bytes(file.getvalue())


def edit_metrics(folder: RunFolder, draw: random.Random) -> None:
    text = folder.metrics.read_bytes()
    lines = text.splitlines(keepends=True)
    cut = draw.randrange(len(text))
    choices = (
        b"",
        text[:cut],
        text[:cut] + draw.randbytes(5) + text[cut:],
        b"".join(lines[1:]),
        b"".join(draw.sample(lines, len(lines))),
        b"".join(lines[:2] + lines[5:]),
        b"date,price\n1,2\n",
        text.replace(b"update", b"Update"),
        text.replace(b",", b";"),
        text + text,
        draw.randbytes(1000),
    )
    folder.metrics.write_bytes(draw.choice(choices))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all replaceable values in a nested state."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in items:
        if not isinstance(part, int) or isinstance(value, dict):  # skip the 625 words of a generator's state
            yield from places(part, (*path, key))


def get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a nested state with the value at ``path`` replaced, or removed if it is ``_GONE``."""
    if not path:
        return new
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = {key: put(part, path[1:], new) if key == path[0] else part for key, part in items}
    parts = {key: part for key, part in parts.items() if part is not _GONE}
    return parts if isinstance(value, dict) else type(value)(parts.values())


def other(value: Any, draw: random.Random) -> Any:
    """Return a random replacement with another type, shape or value."""
    choices: list[Any] = [*VALUES, torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)]
    if isinstance(value, torch.Tensor):
        choices = [
            value.unsqueeze(0),
            value.flatten()[1:],
            value.double(),
            value.to(torch.int32),
            torch.zeros_like(value),
        ]
        choices += [value + 10**6] if value.dtype != torch.bool else [~value]
        choices += [None, 1.5]
    elif isinstance(value, int | float):
        choices += [value + 1, -value - 1]
    return draw.choice(choices)
