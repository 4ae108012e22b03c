import sys

import pytest

from recurl.errors import ArgumentError, MissingDependencyError
from recurl.importing import load_object


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
    with pytest.raises(MissingDependencyError, match=r"no module 'ale_pyy': install it \(pip install ale_pyy\)"):
        load_object("--callback", "ale_pyy:Thing")
