"""Import paths of earlier versions."""

import importlib
import pickle
import subprocess
import sys

import pytest

from recurl.core.moved import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_a_former_path_is_the_current_module(former):
    current = importlib.import_module(MOVED[former])
    assert importlib.import_module(former) is current
    assert current.__name__ == MOVED[former] == current.__spec__.name
    parent, _, name = former.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is current


def test_modules_of_a_package_move_with_it():
    assert importlib.import_module("recurl.specs.leaves") is importlib.import_module("recurl.core.specs.leaves")


@pytest.mark.slow
def test_names_are_imported_and_unpickled_by_former_paths():
    code = (
        "from recurl.errors import ArgumentError; import recurl.specs as specs; import recurl.core.errors as new; "
        "import pickle; assert new.ArgumentError is ArgumentError; assert specs.Bounded; "
        "assert pickle.loads(b'crecurl.errors\\nArgumentError\\n.') is ArgumentError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert pickle.loads(b"crecurl.lowering\nEntries\n.").__module__ == "recurl.sequences.entries"


def test_a_wrong_path_fails_as_usual():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'recurl.core.specs.nothing'"):
        importlib.import_module("recurl.specs.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'recurl.nothing'"):
        importlib.import_module("recurl.nothing")
