"""Names that users have: those of the documentation, README and examples, and of every package, stay importable.

``public_names.txt`` has a line for each, ``module`` or ``module:name``. A line is added with a new name, and none is
removed without a major version.
"""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = Path(__file__).with_name("public_names.txt").read_text().split()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
MODULES = sorted({name.partition(":")[0] for name in NAMES})


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_importable(module: str) -> None:
    imported = importlib.import_module(module)
    names = [name.partition(":")[2] for name in NAMES if name.startswith(f"{module}:")]
    assert [name for name in names if not hasattr(imported, name)] == []


def test_names_that_the_papers_import_are_listed() -> None:
    imports = re.compile(r"^from (recurl[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
    found = {
        (page.name, module, name)
        for page in PAGES
        for module, names in imports.findall(page.read_text())
        for name in re.findall(r"(\w+)(?: as \w+)?", names.partition("#")[0])
    }
    assert [one for one in sorted(found) if not {f"{one[1]}:{one[2]}", f"{one[1]}.{one[2]}"} & {*NAMES}] == []
