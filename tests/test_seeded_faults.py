"""The faults of tools/seeded_faults.toml apply to the code; tools/seeded_faults.py runs the tests against them."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses
    spec.loader.exec_module(module)
    return module


seeded_faults = load("seeded_faults")
FAULTS = seeded_faults.read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_old_text_is_in_the_file_once(fault):
    text = (ROOT / "src" / "recurl" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    changed = text.replace(fault.old, fault.new)
    assert changed != text
    if fault.file.endswith(".py"):
        compile(changed, fault.file, "exec")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_entries_are_complete(fault):
    assert fault.file.startswith(f"{fault.room}/")
    assert fault.wrong.endswith(".")
    assert fault.tests
    assert all((ROOT / test).exists() for test in fault.tests)
    assert fault.build == (not fault.file.endswith(".py"))


def test_names_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_every_room_has_faults():
    rooms = {path.parent.name for path in (ROOT / "src" / "recurl").glob("*/__init__.py")}
    counts = Counter(fault.room for fault in FAULTS)
    assert counts.keys() == rooms
    assert min(counts.values()) >= 2


def test_the_table_has_a_caught_fault_in_every_row():
    rows = seeded_faults.read_rows(seeded_faults.RESULTS)
    assert rows.keys() <= {fault.name for fault in FAULTS}
    assert all(row.caught_by for row in rows.values())


def test_a_fault_is_applied_to_a_copy(tmp_path):
    fault = FAULTS[0]
    path = tmp_path / "src" / "recurl" / fault.file
    path.parent.mkdir(parents=True)
    path.write_text(f"before {fault.old} after")
    fault.apply(tmp_path)
    assert path.read_text() == f"before {fault.new} after"
    with pytest.raises(SystemExit, match="must occur once"):
        fault.apply(tmp_path)


def test_tables_keep_the_rows_of_other_faults(tmp_path):
    names = [field.name for field in seeded_faults.fields(seeded_faults.Row)]
    rows = {fault.name: seeded_faults.Row(fault.name, *names[1:]) for fault in reversed(FAULTS[:3])}
    rows["gone"] = seeded_faults.Row("gone", *names[1:])
    seeded_faults.write_rows(tmp_path / "a.csv", rows, FAULTS)
    found = seeded_faults.read_rows(tmp_path / "a.csv")
    assert [*found] == [fault.name for fault in FAULTS[:3]]
    assert all(found[name] == rows[name] for name in found)
