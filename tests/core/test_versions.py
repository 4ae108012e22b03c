"""Versions, and the commit of the source, which is read from Git's files."""

import subprocess
from pathlib import Path

import pytest

import recurl
from recurl.core import versions
from recurl.core.versions import source_commit

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "src" / "recurl").mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return tmp_path


def found(root):
    return source_commit(root / "src" / "recurl" / "core" / "versions.py")


def test_commit_of_a_branch(root):
    assert found(root) is None, "no commit yet"
    (root / ".git" / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{COMMITS[0]} refs/heads/main2\n^{COMMITS[0]}\n{COMMITS[1]} refs/heads/main\n"
    )
    assert found(root) == COMMITS[1]
    (root / ".git" / "refs" / "heads" / "main").write_text(f"{COMMITS[0]}\n")
    assert found(root) == COMMITS[0], "newer than the packed one"


def test_commit_of_a_detached_head(root):
    (root / ".git" / "HEAD").write_text(f"{COMMITS[0]}\n")
    assert found(root) == COMMITS[0]


def test_commit_of_a_worktree(root, tmp_path):
    own = root / ".git" / "worktrees" / "other"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/other\n")
    (own / "commondir").write_text("../..\n")
    (root / ".git" / "refs" / "heads" / "other").write_text(f"{COMMITS[1]}\n")
    other = tmp_path / "elsewhere"
    (other / "src" / "recurl").mkdir(parents=True)
    (other / ".git").write_text(f"gitdir: {own}\n")
    assert found(other) == COMMITS[1]


def test_no_commit_where_the_package_is_installed(root):
    """A virtual environment may be inside the checkout of another project."""
    (root / ".git" / "HEAD").write_text(f"{COMMITS[0]}\n")
    assert source_commit(root / "site-packages" / "recurl" / "core" / "versions.py") is None
    (root / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert found(root) is None


@pytest.mark.slow
def test_commit_is_that_of_git():
    """If the tests run in a checkout, both agree; elsewhere both return none."""
    place = Path(recurl.__file__).parent
    said = subprocess.run(["git", "-C", place, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert source_commit() == (said.stdout.strip() if said.returncode == 0 and place.parent.name == "src" else None)


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(versions, "_PACKAGES", ("torch", "recurl-no-such-package"))
    found = versions.versions()
    assert found["torch"]
    assert found["recurl-no-such-package"] is None
