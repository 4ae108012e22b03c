import sys

import pytest

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.importing import how_to_install, load_object


def test_modules_of_a_folder_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("thing = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_object("--callback", "own_module:thing") == 3
    sys.modules.pop("own_module")


@pytest.mark.parametrize(
    ("body", "message"),
    [("import no_such_thing", "can't be imported: No module named 'no_such_thing'"), ("x = (", "can't be imported: ")],
)
def test_modules_that_fail(body, message, tmp_path, monkeypatch):
    (tmp_path / "bad_module.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArgumentError, match=message):
        load_object("--callback", "bad_module:thing")


def test_names_that_cannot_be_found():
    with pytest.raises(ArgumentError, match="--callback takes module:Class, got 'json'"):
        load_object("--callback", "json", "Class")
    with pytest.raises(ArgumentError, match=r"the module 'json' has no 'dmps'\. Did you mean dumps\?"):
        load_object("--callback", "json:dmps")
    with pytest.raises(
        MissingDependencyError, match="'ale_pyy': install the package that provides the module 'ale_pyy',"
    ):
        load_object("--callback", "ale_pyy:Thing")


@pytest.mark.parametrize(
    ("module", "how"),
    [
        ("ale_py", "pip install ale-py"),
        ("memory_maze.tasks", "pip install memory-maze"),
        ("Box2D", "pip install 'gymnasium[box2d]'"),
        ("unheard_of", "install the package that provides the module 'unheard_of'"),
    ],
)
def test_packages_are_named_as_pip_calls_them_and_never_guessed(module, how):
    assert how_to_install(module) == how
