"""Reading the networks of another run, to start from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recurl.core.errors import ArgumentError
from recurl.trainers.algorithms.table import ALGORITHMS
from recurl.trainers.files.checkpoints import load_checkpoint, restoring
from recurl.trainers.networks.initial import Initial
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.run.folder import RunFolder

__all__ = ["read_networks"]


def read_networks(source: str, notify: Callable[[str], None]) -> Initial:
    """Read the networks of a run as data: nothing that its options name is imported.

    Args:
        source: run folder, of which the newest checkpoint is read, or a checkpoint.
        notify: see :class:`RunFolder`.

    Raises:
        ArgumentError: there is no such run, or its checkpoint can't be read.
        NonFiniteError: a parameter isn't finite.
    """
    path = Path(source)
    if path.is_dir():
        folder = RunFolder(path, notify)
        folder.read_values()  # reports that the folder holds no run
        path, state = folder.read_checkpoint()
    elif path.is_file():
        state = load_checkpoint(path)
    else:
        raise ArgumentError(
            f"--init-from: there is no run {source}: name a folder that recurl train wrote, or one of its checkpoints."
        )
    with restoring(path):
        options, algorithm = dict(state.get("config", {})), dict(state["algorithm"])
        check_finite(algorithm["agent"], f"the networks in {path}")
        name = str(options.get("algorithm"))
        registered = ALGORITHMS.get(name.rpartition(":")[2])
        kind = None if registered is None else registered.config.actor_kind
        return Initial(str(path), options, kind or name, algorithm)
