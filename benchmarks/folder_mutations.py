"""Hostile mutations of the folders of runs, sweeps and replay buffers; see ``fuzz_folders.py``.

A mutation is a function of a folder, a random generator and a guard (an outside folder that links may point to). It
modifies the folder and returns a short description of the change.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import socket
import stat
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from archive_attacks import FOREIGN, archive, container
from recurl.core.archive import load_archive, save_archive
from recurl.trainers.checkpoint import save_checkpoint

Mutation = Callable[[Path, random.Random, Path], str]
HUGE, MOST = 20 << 30, 16 << 20
EVIL = "evil_module"
"""Module that records that it was imported; it is in every folder and in the working directory."""


def files_of(folder: Path) -> list[Path]:
    """Return the files that may be changed: no links, whose targets would change, and no huge files."""
    return sorted(path for path in folder.rglob("*") if EVIL not in path.name and _changeable(path))


def _changeable(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and about.st_size < MOST


def a_file(folder: Path, draw: random.Random, suffix: str = "") -> Path:
    found = [path for path in files_of(folder) if path.name.endswith(suffix)]
    by_kind = sorted({path.suffix or path.name for path in found})
    kind = draw.choice(by_kind)  # each kind equally often, regardless of its number of files
    return draw.choice([path for path in found if (path.suffix or path.name) == kind])


def flip_bytes(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw)
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(draw.choice((1, 1, 4, 64))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)
    return f"flipped bytes of {path.name}"


def cut_file(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw)
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data) + 1)])
    return f"cut {path.name}"


def replace_content(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw)
    contents = (
        b"",
        draw.randbytes(1000),
        b"\xff\xfe\0" * 100,
        b"[" * 200_000,
        b"{" * 1000,
        b"\n" * 10_000,
        b"0" * 10_000,
    )
    path.write_bytes(draw.choice(contents) if draw.random() < 0.8 else path.read_bytes() + draw.randbytes(50))
    return f"other content of {path.name}"


def make_huge(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw)
    with path.open("r+b") as file:
        file.truncate(HUGE)
    return f"{path.name} of 20 GiB"


def replace_file(folder: Path, draw: random.Random, guard: Path) -> str:
    """Replace a file by something else."""
    names = (".lock", "learning_curve.png", "results.csv", "sweep.json", "evaluations.csv", "contents.pt", "lanes")
    known = [folder / name for name in names]
    path = draw.choice(known) if draw.random() < 0.2 else a_file(folder, draw)
    kind = draw.choice(
        ("link", "link", "dangling", "loop", "zero", "hard link", "fifo", "socket", "device", "folder", "gone", "mode")
    )
    if kind == "mode":
        if path.exists():
            path.chmod(0)
        return f"{path.name} unreadable"
    path.unlink(missing_ok=True)
    put(path, kind, draw, guard)
    return f"{path.name} as {kind}"


def put(path: Path, kind: str, draw: random.Random, guard: Path) -> None:
    match kind:
        case "link" | "dangling" | "loop" | "zero":
            places = {"dangling": guard / "new file", "loop": path, "zero": Path("/dev/zero")}
            path.symlink_to(places.get(kind) or draw.choice(files_of(guard)))
        case "hard link":
            os.link(draw.choice(files_of(guard)), path)
        case "device" if os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        case "fifo" | "device":
            os.mkfifo(path)
        case "socket":
            here = os.open(path.parent, os.O_RDONLY)  # paths of sockets must be short
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
        case "folder":
            path.mkdir()
            (path / "file").write_text("text")


def replace_folder(folder: Path, draw: random.Random, guard: Path) -> str:
    inner = sorted(path for path in folder.rglob("*") if path.is_dir())
    path = draw.choice([*inner, folder / "tensorboard", folder / "checkpoints", folder / "best", folder / "wandb"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # copying would wait for a writer of a FIFO
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = draw.choice(("guard", "guard", "file", "root", "loop", "fifo", "dangling"))
    match kind:
        case "guard":
            path.symlink_to(guard / "folder")
        case "root":
            path.symlink_to("/usr/lib")
        case "file":
            path.write_text("text")
        case _:
            put(path, kind, draw, guard)
    return f"{path.name} as {kind}"


def add_files(folder: Path, draw: random.Random, guard: Path) -> str:
    places = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    place = draw.choice(places)
    match draw.randrange(4):
        case 0:
            for name in ("²³.pt", "9" * 200 + ".pt", "٣.pt", "-1.pt"):
                (place / name).write_bytes(b"x")
        case 1:
            for number in range(2000):
                (place / f"{10**11 + number:012d}.pt").write_bytes(b"x")
        case 2:
            deep = place
            for _ in range(200):
                deep = deep / "d"
            deep.mkdir(parents=True)
        case _:
            (place / "config.json.1.partial").symlink_to(guard / "text")
            (place / f"{'x' * 200}.json").write_text("{}")
    return f"more files in {place.name}"


TEXTS = (
    *("x" * 100_000, "$\\frac{", "$x^{2", "\0", "\ud800", "../../../etc/passwd", "/dev/zero", "(" * 5000),
    *(f"{EVIL}:Evil", f"{EVIL}:Evil-v0", EVIL, "lstm" + "+lstm" * 5000, "nan", "inf", "cuda:99", "1e999", "--help"),
    *("%s%n", "[red]", "recurl/RepeatPrevious-v0"),
)
NUMBERS = (10**400, -(10**400), 1e308, -1e308, 2147483647, 2**63, 2**31, -1, 0, 1e-320, 0.5, 10**15)


def a_value(draw: random.Random) -> Any:
    match draw.randrange(4):
        case 0:
            return draw.choice(NUMBERS)
        case 1:
            return draw.choice(TEXTS)
        case 2:
            return draw.choice(
                (None, True, False, [], {}, [[]], {"a": 1}, ["k=1", "k=2"], [f"{EVIL}:Evil"], float("nan"))
            )
        case _:
            return draw.choice(([0] * 10_000, ["x=1"] * 2000, {str(key): key for key in range(5000)}))


def edit_json(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw, ".json")
    values = json.loads(path.read_text())
    said = []
    for _ in range(draw.choice((1, 1, 1, 3))):
        target = values
        while True:
            key = draw.choice(sorted(target)) if isinstance(target, dict) else draw.randrange(len(target))
            inner = target[key]
            if not isinstance(inner, dict | list) or not inner or draw.random() < 0.3:
                break
            target = inner
        if draw.random() < 0.1:
            del target[key]
        else:
            target[key] = a_value(draw)
        said.append(str(key))
    text = json.dumps(values)
    if draw.random() < 0.05:
        text = text[:-1] + "," + text[1:]  # every key twice
    path.write_text(text)
    return f"{', '.join(said)} in {path.name}"


def name_code(folder: Path, draw: random.Random, guard: Path) -> str:
    """Insert names of modules in the folder where a run names code."""
    path = a_file(folder, draw, "config.json") if (folder / "config.json").exists() else a_file(folder, draw, ".json")
    values = json.loads(path.read_text())
    options = values.get("options", values)
    name = draw.choice(
        ("algorithm", "env", "cell", "callback", "encoder", "logger", "device", "eval_env", "activation")
    )
    text = draw.choice((f"{EVIL}:Evil", f"{EVIL}:Evil-v0", EVIL, f"{EVIL}:evil"))
    options[name] = [text] if name == "callback" else text
    path.write_text(json.dumps(values))
    return f"code as {name} in {path.name}"


def edit_csv(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw, ".csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    values = (
        "1" + "0" * 400,
        "1e308",
        "-1e308",
        "nan",
        "inf",
        "",
        "x" * 200_000,
        "-1",
        "0",
        '"',
        "\0",
        "1e-400",
        "\u0661",
    )
    match draw.randrange(5):
        case 0 | 1:
            for row in rows[1:]:
                row[draw.randrange(len(row))] = draw.choice(values)
        case 2:
            rows[0][draw.randrange(len(rows[0]))] = draw.choice(("update", "env_steps", "x", ""))
        case 3:
            rows = rows[: draw.choice((0, 1))]
        case _:
            rows += [rows[-1]] * 30_000
    text = "\n".join(",".join(row) for row in rows) + "\n"
    path.write_bytes(text.encode() if draw.random() < 0.9 else text.encode("utf-16"))
    return f"numbers in {path.name}"


def craft_pickle(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw, ".pt")
    name = draw.choice(sorted(FOREIGN))
    code, storages, _ = FOREIGN[name]
    inside = b"}X\x0e\x00\x00\x00format_versionK\x02sX\x01\x00\x00\x00x" + code + b"s" if draw.random() < 0.5 else code
    path.write_bytes(archive(inside, **storages))
    return f"{name} in {path.name}"


def craft_container(folder: Path, draw: random.Random, guard: Path) -> str:
    path = a_file(folder, draw, ".pt")
    with zipfile.ZipFile(path) as archive_file:
        members = {info.filename.partition("/")[2]: archive_file.read(info) for info in archive_file.infolist()}
    kind = draw.choice(("bomb", "deflated", "quine", "twice", "many", "lie", "nested", "prefix", "comment", "sizes"))
    match kind:
        case "bomb" | "deflated":
            file = io.BytesIO()
            method = zipfile.ZIP_BZIP2 if kind == "bomb" else zipfile.ZIP_DEFLATED
            with zipfile.ZipFile(file, "w", method) as made:
                for name, data in members.items():
                    made.writestr(f"archive/{name}", data)
                made.writestr("archive/data/99", bytes(50_000_000))
            data = file.getvalue()
        case "quine":
            data = container({**members, "data/98": b"x" * 1000})
            place = data.rindex(b"PK\1\2")
            data = data[: place + 42] + bytes(4) + data[place + 46 :]
        case "twice":
            data = container({**members, "DATA.pkl": b"\x80\x02N."})
        case "many":
            data = container({**members, **{f"more/{number}": b"" for number in range(20_000)}})
        case "nested":
            data = container({**members, "data/0": container(members)})
        case "prefix":
            data = draw.randbytes(100) + path.read_bytes()
        case "comment":
            data = path.read_bytes() + path.read_bytes()
        case _:
            changed = bytearray(path.read_bytes())
            start = changed.index(b"PK\1\2") if kind == "sizes" else max(0, len(changed) - 98)
            for _ in range(3):
                changed[draw.randrange(start, len(changed))] = draw.choice((0, 1, 255))
            data = bytes(changed)
    path.write_bytes(data)
    return f"{kind} of {path.name}"


def edit_state(folder: Path, draw: random.Random, guard: Path) -> str:
    """Change the state in a file whose checksums match."""
    path = a_file(folder, draw, ".pt")
    state = load_archive(path)
    said = edit_value(state, draw)
    checkpoint = isinstance(state, dict) and "format_version" in state
    if checkpoint:
        state.pop("contents", None)
        step = int(path.stem) if draw.random() < 0.9 else draw.choice((0, 10**11))
        save_checkpoint(path.parent, step, state, keep=9)
    else:
        save_archive(state, path)
    seal(folder)
    return f"{said} in {path.name}"


def edit_value(state: Any, draw: random.Random) -> str:
    target, trail = state, []
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = draw.choice(keys)
        trail.append(str(key))
        inner = target[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.15:
            break
        target = inner
    other: list[Any] = [
        None,
        -1,
        10**15,
        1 << 2000,
        1e308,
        float("nan"),
        "x",
        [],
        {},
        (),
        [0] * 1000,
        b"x",
        True,
        torch.zeros(3),
    ]
    if isinstance(inner, torch.Tensor):
        other += [
            inner.unsqueeze(0),
            inner[:0] if inner.ndim else inner,
            inner.bool(),
            inner.double(),
            torch.full_like(inner, 100),
        ]
        other += [torch.full((2,), 2**62), torch.zeros(0, dtype=inner.dtype), inner.flatten()] * 2
    if draw.random() < 0.1:
        del target[key]
    else:
        target[key] = draw.choice(other)
    return f"{'/'.join(trail)[:60]} changed"


def seal(folder: Path) -> None:
    """Recompute the checksums of a buffer's folder."""
    for contents in folder.rglob("contents.pt"):
        try:
            facts = load_archive(contents)["facts"]
        except Exception:  # noqa: BLE001 - the folder is left unchanged
            continue
        files: dict[str, Any] = {}
        for path in contents.parent.rglob("*"):
            if path != contents and _changeable(path):
                data = path.read_bytes()
                files[path.relative_to(contents.parent).as_posix()] = [len(data), zlib.crc32(data)]
        save_archive({"facts": facts, "files": files}, contents)


def sealed(mutation: Mutation) -> Mutation:
    """Return the mutation followed by a recomputation of checksums."""

    def both(folder: Path, draw: random.Random, guard: Path) -> str:
        said = mutation(folder, draw, guard)
        seal(folder)
        return f"{said}, sealed"

    return both


ANYWHERE: tuple[Mutation, ...] = (
    flip_bytes,
    cut_file,
    replace_content,
    make_huge,
    replace_file,
    replace_file,
    replace_folder,
    add_files,
)
MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "run": (
        *ANYWHERE,
        edit_json,
        edit_json,
        name_code,
        edit_csv,
        craft_pickle,
        craft_container,
        edit_state,
        edit_state,
    ),
    "sweep": (*ANYWHERE, edit_json, edit_json, name_code, edit_csv, edit_csv),
    "buffer": (
        *ANYWHERE,
        *map(sealed, ANYWHERE),
        sealed(edit_json),
        sealed(edit_json),
        edit_state,
        edit_state,
        craft_pickle,
        craft_container,
    ),
    "list": (*ANYWHERE, edit_state, edit_state, craft_pickle, craft_container),
}
