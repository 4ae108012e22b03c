"""``recurl cache`` and the folder of what is compiled."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from recurl.cli.main import main
from recurl.core import cache

VARIABLES = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, which compilers don't use yet."""
    monkeypatch.setenv("RECURL_CACHE_DIR", str(tmp_path / "cache"))
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # restored at the end
        monkeypatch.delenv(variable)
    return tmp_path / "cache"


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["cache", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_compilers_use_the_folder_unless_the_user_chose_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    cache.use_compiled_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache.compiled_folder() / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    assert cache.compiled_folder().parent == folder / "compiled"


def test_a_folder_that_cannot_be_made_is_not_used(folder: Path) -> None:
    folder.write_text("a file")
    cache.use_compiled_folder()
    assert not any(variable in os.environ for variable in VARIABLES)


def test_without_variables_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RECURL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "recurl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "recurl"


def test_other_processors_and_versions_have_other_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = set[str]()

    def add() -> None:
        cache.compiled_name.cache_clear()
        names.add(cache.compiled_name())

    add()
    (name,) = names
    assert re.fullmatch(r"torch-\S+-python-3\.\d+-\w+-[0-9a-f]{8}", name)
    (tmp_path / "cpuinfo").write_text("flags: sse2 avx")
    monkeypatch.setattr(cache, "_CPUINFO", tmp_path / "cpuinfo")
    add()
    (tmp_path / "cpuinfo").write_text("flags: sse2")
    add()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    add()
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda _: "9.9")
    add()
    assert len(names) == 5
    monkeypatch.undo()
    cache.compiled_name.cache_clear()


def test_show_and_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "show") == [f"{folder} is empty"]
    for name, size in ((cache.compiled_name(), 3 * 2**20), ("torch-1", 2**19)):
        path = folder / "compiled" / name / "triton" / "kernel"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (folder / "kernels.json").write_text("{}")
    assert lines(capsys, "show") == [
        str(folder),
        "  compiled, torch-1: 0.5 MiB in 1 files",
        f"  compiled, {cache.compiled_name()} (in use): 3.0 MiB in 1 files",
        "  kernels chosen by recurl bench rnn --tune: kernels.json",
    ]
    assert lines(capsys, "clear") == [f"Deleted 3.5 MiB in 2 files: {folder / 'compiled'}"]
    assert (folder / "kernels.json").exists()
    assert lines(capsys, "clear", "--tuned") == [f"Deleted 0.0 MiB in 0 files: {folder / 'compiled'}"]
    assert lines(capsys, "show") == [f"{folder} is empty"]


def test_warm_runs_the_updates_of_a_run_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--env", "recurl/RepeatPrevious-v0", "--num-envs", "2", "--rollout-steps", "8", "--hidden-size", "8"]
    (line,) = lines(capsys, "warm", "ppo", *options, "--minibatches", "1")
    assert re.fullmatch(r"Done in \d+\.\d s: runs with these options find what could be compiled in .*", line)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["warm"], "recurl cache warm needs an algorithm"),
        (["warm", "nothing"], "There is no algorithm 'nothing'"),
        (["fill"], "There is no action 'fill': use recurl cache show, clear, warm"),
        (["show", "--all"], "--all"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *words]) == 2
    assert message in capsys.readouterr().err
