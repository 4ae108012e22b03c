"""Names that users have: those of the documentation, README and examples, and of every package, stay importable.

``public_names.txt`` has a line for each, ``module`` or ``module:name``. A line is added with a new name, and none is
removed without a major version.
"""

import ast
import builtins
import doctest
import importlib
import inspect
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


def test_examples_import_what_they_use() -> None:
    objects = {
        (one.__module__, one.__qualname__): one
        for module, _, name in (line.partition(":") for line in NAMES)
        if inspect.isroutine(one := getattr(importlib.import_module(module), name, None)) or inspect.isclass(one)
    }
    methods = {
        (*key, name): method
        for key, one in objects.items()
        if inspect.isclass(one)
        for name, method in vars(one).items()
        if inspect.isroutine(method) or isinstance(method, property)
    }
    missing = {
        ".".join(key): free
        for key, one in {**objects, **methods}.items()
        if (free := _free_names(one.__doc__ or "") - {"torch", *key[1].split(".")})
    }
    assert missing == {}


def _free_names(text: str) -> set[str]:
    """Return the names that the examples in a docstring use and neither define nor import."""
    code = "".join(example.source for example in doctest.DocTestParser().get_examples(text))
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name
    }
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    return {node.id for node in names} - bound
