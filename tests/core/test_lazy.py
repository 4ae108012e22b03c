"""Packages import their names on first access: table, imports for type checkers, and ``__all__`` agree."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

import pytest

import recurl

SOURCE = Path(recurl.__file__).parents[1]


def calls(file: Path) -> list[ast.Call]:
    """Return the calls ``lazy_names(__name__, {...})`` of a file."""
    calls = [node.value for node in ast.parse(file.read_text()).body if isinstance(node, ast.Expr)]
    return [call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "lazy_names"]


TABLES = {
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.literal_eval(call.args[1])
    for file in sorted(SOURCE.rglob("*.py"))
    for call in calls(file)
    if call.args[1:]
}


def homes(package: str) -> dict[str, str]:
    """Return the module of each name in the table of a package, without names of earlier versions."""
    table = TABLES[package].items()
    return {word: resolve_name(home, package) for home, words in table for word in words.split() if "=" not in word}


def typed(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports for type checkers."""
    tree = ast.parse(Path(import_module(package).__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {name.name: node.module for node in block.body for name in node.names}


def test_tables_are_found() -> None:
    assert {"recurl", "recurl.envs", "recurl.modules", "recurl.objectives.value", "recurl.trainers"} <= TABLES.keys()


@pytest.mark.parametrize("package", TABLES)
def test_tables_and_imports_for_type_checkers_agree(package: str) -> None:
    assert homes(package) == typed(package)


@pytest.mark.parametrize("package", TABLES)
def test_every_name_resolves_and_is_listed(package: str) -> None:
    module, table = import_module(package), homes(package)
    for name, home in table.items():
        assert getattr(module, name) is getattr(import_module(home), name)
    assert {*table, *module.__all__} <= {*dir(module)}
    words = " ".join(TABLES[package].values()).split()
    for former, name in (word.split("=") for word in words if "=" in word):
        assert getattr(module, former) is getattr(module, name)


@pytest.mark.parametrize("package", TABLES)
def test_star_imports_take_all_names(package: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert names.keys() - {"__builtins__"} == set(import_module(package).__all__)


def test_packages_import_their_modules_on_access() -> None:
    code = "import recurl; print(recurl.objectives.value.estimator.__name__)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "recurl.objectives.value.estimator\n"


def test_classes_are_pickled_under_their_own_modules() -> None:
    assert pickle.loads(pickle.dumps(recurl.modules.LSTMModule)) is recurl.modules.LSTMModule
