"""One flipped bit in a checkpoint or an exported policy: it is detected, or the loaded data doesn't change."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from recurl.core.errors import RecurlError
from recurl.trainers import check_export, export_run
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from torture_kinds.forks import Broken
from torture_kinds.small_runs import ALGORITHMS, differing, whole

COUNT = 1200
EXPORTS = {"export, torch": ("torch", "policy.pt2"), "export, onnx": ("onnx", "policy.onnx")}


def attack(number: int, place: Path) -> tuple[str, str]:
    what = [*ALGORITHMS, *EXPORTS][number % 6]
    path = exported(place, what) if what in EXPORTS else checkpoint(place, what)
    data, draw = bytearray(path.read_bytes()), random.Random(number)
    bit = draw.randrange(len(data) * 8) if number % 12 < 9 else draw.randrange(len(data) * 8 - 40_000, len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    flipped = place / path.name
    flipped.write_bytes(data)
    try:
        if what in EXPORTS:
            shutil.copy(path.with_name(path.name + ".json"), place)
            check_export(flipped)
            raise Broken(what, f"bit {bit} of {path} is not detected")
        state = load_checkpoint(flipped)
    except RecurlError:
        return what, "detected"
    except Broken:
        raise
    except Exception as error:
        raise Broken(what, f"bit {bit} of {path}: {type(error).__name__}: {error}") from error
    changed = differing(state, load_checkpoint(path))
    if changed is not None:
        raise Broken(what, f"bit {bit} of {path} changes {changed}")
    return what, "changes nothing"


def checkpoint(place: Path, algorithm: str) -> Path:
    return latest_checkpoint(whole(place, algorithm)[0].checkpoints)


def exported(place: Path, what: str) -> Path:
    kind, name = EXPORTS[what]
    folder = whole(place, "ppo")[0]
    path = folder.path / name
    return path if path.exists() else export_run(folder, kind)
