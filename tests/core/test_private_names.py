"""Private names of other packages are used in their compatibility files only, and may be missing at import."""

import ast
import functools
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from torch import nn

import recurl
from recurl.core.errors import UnsupportedError
from recurl.core.private_names import Absent, absent_error, find, load, needs

SOURCE = Path(recurl.__file__).parent
COMPATIBILITY = sorted(SOURCE.rglob("*_compat.py"))
PRIVATE = re.compile(r"_[A-Za-z]\w*")
UNSTABLE = ("triton.runtime", "triton.compiler", "torch.fx.experimental", "opcode")  # private without an underscore
SAVED = {"torch._C.Generator"}  # class names in files
INSTANCES = (
    *(nn.Linear(1, 1), torch.zeros(1), torch.optim.Adam([torch.zeros(1)]), torch, torch.compiler),
    *(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")]), gym.make("CartPole-v1")),
)
PATH = re.compile(r"(torch|tensordict|gymnasium|ray|triton|asyncio)([.:]\w+)*[.:]_[A-Za-z][\w.]*")
OVERRIDDEN = {name for name, value in vars(nn.Module).items() if PRIVATE.fullmatch(name) and callable(value)}
FOREIGN = {name for held in INSTANCES for name in (*dir(held), *vars(held)) if PRIVATE.fullmatch(name)}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def all_own_names() -> set[str]:
    """Return the names that recurl defines or assigns anywhere."""
    names = {name for path in SOURCE.rglob("*.py") for name in own_names(tree_of(path))}
    return names | {"_asdict", "_fields", "_replace", "_exit"}


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the private names that an import statement imports from other packages."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        first = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for path in (first + alias.name for alias in node.names):
            private = any(PRIVATE.fullmatch(part) for part in path.split("."))
            if not path.startswith("recurl.") and (private or path.startswith(UNSTABLE)):
                yield path


def foreign_private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of other packages that code uses."""
    here = set(own_names(tree))
    for node in ast.walk(tree):
        yield from imported(node)
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and not node.attr.endswith("__"):
            if node.attr not in (here if node.attr in FOREIGN else all_own_names()):
                yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef) and node.name in OVERRIDDEN:
            yield f"def {node.name}"
        elif isinstance(node, ast.Constant) and PATH.fullmatch(str(node.value)) and node.value not in SAVED:
            yield repr(node.value)


@pytest.mark.slow
def test_other_files_use_no_private_names():
    packages = ("gymnasium", "python", "ray", "tensordict", "torch", "triton")
    assert sorted(path.name for path in COMPATIBILITY) == [f"{package}_compat.py" for package in packages]
    found = {
        str(path.relative_to(SOURCE)): used
        for path in SOURCE.rglob("*.py")
        if path not in COMPATIBILITY and (used := list(foreign_private_names(tree_of(path))))
    }
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from torch._inductor import compile",
        "import ray._private.ray_constants",
        "from torch import _VF",
        "torch._foreach_copy_(a, b)",
        "tensor._backward_hooks",
        "asyncio._get_running_loop()",
        "module._modules",
        "env._observations",
        "from triton.runtime import driver",
        "import_module('torch._guards')",
        "class A(nn.Module):\n def _apply(self, fn): ...",
    ],
)
def test_private_names_are_found(code):
    assert list(foreign_private_names(ast.parse(code)))


@pytest.mark.slow
@pytest.mark.parametrize("code", ["self._kept = 1\nself._kept", "from torch import nn", "named._asdict()"])
def test_other_names_are_not_private(code):
    assert not list(foreign_private_names(ast.parse(code)))


def wanted_names() -> list[str]:
    """Return the private names that the compatibility files look up."""
    calls = [node for path in COMPATIBILITY for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("find", "load", "needs")]
    paths = (argument.value for call in named for argument in call.args if isinstance(argument, ast.Constant))
    return sorted({path for path in paths if isinstance(path, str)})


IMPORT_WITHOUT = """
import importlib, json, os, sys
import torch, tensordict.nn, gymnasium.vector, asyncio, opcode, torch.fx.experimental.proxy_tensor, triton

class Without:  # an object without one attribute; its own package still sees it
    def __init__(self, inner, names):
        self.__dict__.update(inner=inner, names=names)

    def __getattr__(self, name):
        first, *rest = self.names
        if name != first:
            return getattr(self.inner, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self.inner, name), rest)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

def remove(path):
    module, _, names = path.partition(":")
    found = sys.modules.get(module)
    sys.modules[module] = Without(found, names.split(".")) if names and found else None

def import_all():
    for room in ("", ".modules", ".objectives", ".envs", ".collectors", ".trainers", ".recurrence.cuda"):
        found = importlib.import_module("recurl" + room)
        for name in getattr(found, "__all__", ()):
            getattr(found, name)

for removed in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        try:
            for path in removed:
                remove(path)
            import_all()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(removed)
"""


def check_import_without(groups: list[list[str]]) -> None:
    """Check that recurl can be imported if the names of a group are missing, for each group."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_WITHOUT, json.dumps(groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", done.stderr


def covering_groups(names: list[str]) -> list[list[str]]:
    """Return few groups of names such that for any two names, one group has the first without the second."""
    count = next(count for count in itertools.count(1) if math.comb(count, count // 2) >= len(names))
    groups_of = dict(zip(names, itertools.combinations(range(count), count // 2), strict=False))
    return [[name for name in names if group in groups_of[name]] for group in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_groups_part_every_two_names(count):
    names = [str(place) for place in range(count)]
    groups = covering_groups(names)
    assert all(any(a in group and b not in group for group in groups) for a in names for b in names if a != b)


@pytest.mark.slow
def test_missing_private_names_do_not_break_the_import():
    names = wanted_names()
    assert len(names) > 30
    check_import_without([names, *covering_groups(names)])


@pytest.mark.slow
@pytest.mark.full
def test_a_missing_private_name_does_not_break_the_import():
    check_import_without([[name] for name in wanted_names()])


def test_every_name_exists():
    for name in wanted_names():
        assert not isinstance(find(name), Absent)


def test_find():
    assert find("math:pi") == load("math:pi")
    assert load("math") is sys.modules["math"]
    assert find("math:tau.real.real") > 6
    assert find("math:_tau", 3) == 3
    assert find("math:_tau", None) is None
    assert find("no_such_module:name", 4) == 4
    assert repr(find("math:_tau")) == "<absent math:_tau>"


def test_a_missing_name_is_named_at_its_first_use():
    with pytest.raises(UnsupportedError, match=rf"^torch {re.escape(torch.__version__)} has no torch\._nothing, a pr"):
        find("torch:_nothing")(1, 2)
    with pytest.raises(UnsupportedError, match=r"install a release that recurl supports, .*torch"):
        load("torch._nothing:at_all")
    with pytest.raises(UnsupportedError, match=r"^Python 3\..* has no math\._sine, .* use a release that recurl supp"):
        find("math:_sine")()
    assert isinstance(absent_error("torch:_x"), UnsupportedError)


def test_needs():
    def function() -> int:
        return 1

    assert needs("math:pi", "math:tau")(function) is function
    assert needs("math:pi", "math:_tau", fallback=lambda: 2)(function)() == 2
    with pytest.raises(UnsupportedError, match=r"math\._tau"):
        needs("math:pi", "math:_tau")(function)()
