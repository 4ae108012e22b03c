"""Import paths of earlier versions."""

import contextlib
import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from recurl.core.errors import MissingNameError
from recurl.core.moved import ABSENT_MODULES, MOVED, TORCHRL

INNER = (
    "recurl.data.replay_buffers.samplers.",
    "recurl.data.replay_buffers.storages.",
    "recurl.envs.env_creator",
    "recurl.modules.utils.",
    "recurl.trainers.algorithms.",
)
"""Parts of TorchRL's packages that are modules of recurl, a name of both a module and an object, and its trainers."""


@pytest.mark.parametrize("former", MOVED)
def test_a_former_path_is_the_current_module(former):
    current = importlib.import_module(MOVED[former])
    assert importlib.import_module(former) is current
    assert current.__name__ == MOVED[former] == current.__spec__.name
    parent, _, name = former.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is current


def test_modules_of_a_package_move_with_it():
    assert importlib.import_module("recurl.specs.leaves") is importlib.import_module("recurl.core.specs.leaves")


@pytest.mark.parametrize("path", TORCHRL)
def test_torchrls_modules_are_the_package_with_their_names(path):
    assert importlib.import_module(path) is importlib.import_module(f"{path}.inner") is sys.modules[TORCHRL[path]]


def test_torchrls_names_by_torchrls_modules():
    from recurl.envs.transforms.transforms import InitTracker
    from recurl.objectives.utils import SoftUpdate

    from recurl import objectives
    from recurl.objectives.sac import DiscreteSACLoss

    assert SoftUpdate is objectives.SoftUpdate
    assert DiscreteSACLoss is objectives.DiscreteSACLoss
    assert InitTracker.__module__ == "recurl.transforms.init_tracker"
    with pytest.raises(MissingNameError, match=r"^recurl\.objectives has no DDPGLoss: write TD3Loss"):
        exec("from recurl.objectives.ddpg import DDPGLoss")


@pytest.mark.parametrize("path", sorted(ABSENT_MODULES))
def test_absent_modules_say_what_to_write(path):
    parent, _, name = path.rpartition(".")
    for absent in (path, f"{path}.inner"):
        with pytest.raises(MissingNameError, match=f"^recurl has no module {path}: .{{20,}}"):
            importlib.import_module(absent)
    with pytest.raises(MissingNameError, match=path):
        exec(f"from {parent} import {name}")
    assert not hasattr(importlib.import_module(parent), name)


@pytest.mark.parametrize("root", ["collectors", "data", "envs", "modules", "objectives", "trainers", "record"])
def test_every_module_of_torchrl_is_there_or_says_what_to_write(root):
    torchrl = importlib.util.find_spec("torchrl")  # importing it warns, once per process
    if torchrl is None or torchrl.origin is None:
        pytest.skip("TorchRL isn't installed")
    folder, missing = Path(torchrl.origin).parent / root, []
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        path = ".".join(("recurl", *(part for part in parts if part != "__init__")))
        if any(part.startswith("_") for part in path.split(".")) or file.stem == "__main__":
            continue
        with contextlib.suppress(MissingNameError, ModuleNotFoundError):
            importlib.import_module(path)
            continue
        if not any(path == known or path.startswith(f"{known}.") for known in ABSENT_MODULES):
            missing.append(path)
    assert not [path for path in missing if not path.startswith(INNER)]


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
