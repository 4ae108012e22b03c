"""Versions of recurl and its dependencies, and the commit of recurl's source."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from recurl._version import __version__

__all__ = ["source_commit", "versions"]

_PACKAGES = ("torch", "tensordict", "gymnasium", "numpy", "triton")


def versions() -> dict[str, str | None]:
    """Return the versions of recurl, Python and recurl's main dependencies; None for one that is not installed.

    Example:
        >>> list(versions())
        ['recurl', 'python', 'torch', 'tensordict', 'gymnasium', 'numpy', 'triton']
    """
    packages = {package: _version(package) for package in _PACKAGES}
    return {"recurl": __version__, "python": platform.python_version(), **packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_commit(file: Path = Path(__file__)) -> str | None:
    """Return the commit of the Git checkout that recurl is imported from, or None if it is installed otherwise.

    Only files are read and Git is not run, so uncommitted changes are not detected.

    Args:
        file: a file of the package, ``ROOT/src/recurl/ROOM/FILE`` in a checkout.
    """
    _, _, source, root = file.resolve().parents[:4]
    if source.name != "src":
        return None
    try:
        git = root / ".git"
        if git.is_file():  # in a worktree or a submodule
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name, common = head.removeprefix("ref:").strip(), git
        if (git / "commondir").is_file():
            common = git / (git / "commondir").read_text().strip()
        if (common / name).is_file():
            return (common / name).read_text().strip()
        packed = (line.split() for line in (common / "packed-refs").read_text().splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), None)
    except (OSError, UnicodeDecodeError):
        return None
