"""docs/architecture.md has every folder of the package, the contract of its layers, and files that exist."""

import re
import runpy
from pathlib import Path

import pytest

from tests.docs.test_contributing import LAYERS, drawn

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "recurl"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
JOURNEY = ROOT / "docs" / "concepts" / "how_a_batch_travels.md"
NAMED = re.compile(r"`((?:\w+/)+\w+\.\w+)`")


def test_the_rooms_are_the_folders() -> None:
    files = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    sources = SOURCE / "native" / "src"
    folders = {str(path.parent.relative_to(SOURCE)) for path in files if not path.is_relative_to(sources)} - {"."}
    listed = re.findall(r"^\| `([\w/]+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == folders


def test_the_layers_are_the_contract() -> None:
    assert f"`{drawn(LAYERS['recurl'])}`" in " ".join(ARCHITECTURE.read_text().split())


@pytest.mark.parametrize("page", [ARCHITECTURE, JOURNEY], ids=lambda page: page.stem)
def test_files_exist(page: Path) -> None:
    files = [name for name in NAMED.findall(page.read_text()) if not name.startswith("examples/")]
    assert len(files) > 15
    assert [name for name in files if not (SOURCE / name).is_file()] == []


def test_the_picture_is_drawn_by_its_script_and_its_files_exist() -> None:
    script = runpy.run_path(str(ROOT / "tools" / "draw_batch.py"))
    assert script["FILE"].read_text() == script["drawn"](), "python tools/draw_batch.py"
    files = [file for _, file, *_ in script["STATIONS"]]
    assert [name for name in files if not (SOURCE / name).is_file()] == []
    assert set(files) <= set(NAMED.findall(JOURNEY.read_text()))
