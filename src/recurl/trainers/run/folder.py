"""Folder of a run: its files, and who may write them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from recurl.errors import ArgumentError, StorageError
from recurl.trainers.algorithms.table import read_options
from recurl.trainers.algorithms.written import WrittenOptions
from recurl.trainers.config import RunConfig
from recurl.trainers.env_name import EnvSource
from recurl.trainers.files.checkpoints import latest_checkpoint, load_newest
from recurl.trainers.files.durable import is_partial, make_folder, remove_partials, sync_folder, write_whole, writing
from recurl.trainers.files.lock import LOCK_FILES, FolderLock
from recurl.trainers.trust import check_names, resume_command
from recurl.untrusted import check_folder, read_json

CHECKPOINTS = ("newest", "best")
"""Names of the checkpoints that :meth:`RunFolder.read_checkpoint` reads."""


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of one run, and the lock on it.

    Args:
        path: the folder; it need not exist yet.
        notify: called with notices that are no errors, such as a damaged checkpoint in whose place an older one is
            read; warns by default.
        trust: import what ``config.json`` names: environments, cells, wrappers, callbacks and algorithms outside of
            recurl. Otherwise such a run is refused, unless the program has imported the modules itself: a folder from
            elsewhere runs no code of its choice.

    Example:
        >>> RunFolder(Path("runs/demo")).metrics.as_posix()
        'runs/demo/metrics.csv'
    """

    path: Path
    notify: Callable[[str], None] = field(default=_warn, repr=False, compare=False)
    trust: bool = field(default=False, kw_only=True, repr=False, compare=False)
    _lock: FolderLock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lock", FolderLock(self.path, self.notify))

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keep other processes from training, resuming or replacing a run here, inside the block.

        The folder is made when it is missing. The operating system frees it when the process ends, however that
        happens; the same object may hold it again inside. Where several processes may begin at once, hold it from
        :meth:`create` to the end of the run. Reading needs no such right.

        Raises:
            ArgumentError: a folder in it is a link.
            LockedError: another process holds it.
            StorageError: the folder can't be written.
        """
        with ExitStack() as stack:
            with _naming_another():
                make_folder(self.path)
                self._check_folders()
                stack.enter_context(self._lock.hold())
            yield

    @property
    def config(self) -> Path:
        """The options of the run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """File of the metrics, one row per update."""
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """Folder of the policy of the best evaluation during training."""
        return self.path / "best"

    @property
    def evaluations(self) -> Path:
        """File of the evaluations during training, one row each."""
        return self.path / "evaluations.csv"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def versions(self) -> Path:
        """File of what made the run, one JSON object a line for each start: versions, commit, machine, command."""
        return self.path / "versions.jsonl"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.path / "learning_curve.png"

    @property
    def _folders(self) -> tuple[Path, ...]:
        return self.checkpoints, self.best, self.tensorboard, self.path / "wandb"

    def _check_folders(self) -> None:
        """Refuse links in place of folders: what they point to is not part of the run."""
        for folder in self._folders:
            try:
                check_folder(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ArgumentError(
                    f"{folder} can't be used ({error.strerror}): the folders of a run must be folders in it; move what "
                    "belongs to the run there, or remove it."
                ) from error

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that holds a run or other files.

        Args:
            overwrite: another run may be replaced.

        Raises:
            ArgumentError: the folder can't take a new run.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ArgumentError(f"{self.path} is not a folder: name another with --run-dir.")
        if self.config.exists():
            if not overwrite:
                values: dict[str, Any] = {}
                with suppress(ArgumentError):  # who resumes it is told what is wrong
                    values = self.read_values()
                raise ArgumentError(
                    f"{self.path} holds a run already: go on with it ({resume_command(self.path, values)}), "
                    "replace it (--overwrite) or name another folder (--run-dir)."
                )
        elif self._has_content():
            raise ArgumentError(f"{self.path} is not empty and holds no run: name another folder with --run-dir.")

    def create(self, config: RunConfig, *, overwrite: bool = False) -> None:
        """Make the folder and write the options.

        Args:
            config: the options.
            overwrite: remove what another run left here.

        Raises:
            ArgumentError: the folder holds a run, or something else.
            LockedError: another process works here.
            StorageError: the folder can't be written.
        """
        self.check_free(overwrite=overwrite)
        with self.hold(), _naming_another():
            self.check_free(overwrite=overwrite)
            self._clear()
            self._write(config)

    def extend(self, total_steps: int, given: Collection[str] = ()) -> RunConfig:
        """Return the options of this run with more steps; see :meth:`rewrite`.

        Args:
            total_steps: environment steps in all, those of its newest checkpoint included.
            given: see :meth:`read_config`.

        Raises:
            ArgumentError: there is no run or checkpoint here, or not even one batch would be added.
        """
        self._check_folders()
        config, taken = self.read_config(given=given), int(latest_checkpoint(self.checkpoints).stem)
        extended = replace(config, total_steps=total_steps)
        if extended.updates * extended.frames_per_batch <= taken:
            raise ArgumentError(
                f"--total-steps must exceed the {taken:,} steps of the newest checkpoint in {self.path} by at least "
                f"one batch of {config.frames_per_batch:,}, got {total_steps:,}."
            )
        return extended

    def rewrite(self, config: RunConfig) -> None:
        """Replace the options of the run that is here, such as by those of :meth:`extend`.

        Raises:
            LockedError: another process works here.
            StorageError: the folder can't be written.
        """
        with self.hold(), _naming_another():
            self._write(config)

    def note_start(self, about: Mapping[str, Any]) -> None:
        """Add a line to :attr:`versions`.

        Args:
            about: plain values.

        Raises:
            LockedError: another process works here.
            StorageError: the folder can't be written.
        """
        with self.hold(), _naming_another(), writing(self.versions):
            earlier = self.versions.read_bytes() if self.versions.is_file() and not self.versions.is_symlink() else b""
            write_whole(self.versions, earlier + json.dumps(about).encode() + b"\n")

    def _write(self, config: RunConfig) -> None:
        write_whole(self.config, json.dumps(config.to_dict(), indent=2).encode() + b"\n")

    def _has_content(self) -> bool:
        with writing(self.path):
            return any(path.name not in LOCK_FILES and not is_partial(path) for path in self.path.iterdir())

    def _clear(self) -> None:
        """Remove the files of another run; its options stay until the next ones replace them."""
        with writing(self.path):
            for folder in self._folders:
                if folder.exists():
                    shutil.rmtree(folder)
            for file in (self.metrics, self.evaluations, self.versions, self.curve):
                file.unlink(missing_ok=True)
        for file in (self.config, self.metrics, self.evaluations, self.versions):
            remove_partials(self.path, file.name)
        sync_folder(self.path)

    def read_config(self, env: EnvSource | None = None, *, given: Collection[str] = ()) -> RunConfig:
        """Return the options of the run in this folder.

        Args:
            env: environment to take instead, see ``RunConfig.env``; needed where the run was given a function or an
                object, of which the folder holds the name only.
            given: options in whose place the caller takes others: what they name needs no trust.

        Raises:
            ArgumentError: there is no run here, its options can't be read, or they name code and the folder isn't
                trusted.
        """
        values = self.read_values()
        if not self.trust:
            replaced = {*given, *(() if env is None else ("env",))}
            check_names({name: value for name, value in values.items() if name not in replaced}, self.config)
        try:
            config = read_options(values)
        except ArgumentError as error:
            raise ArgumentError(f"{self.config} can't be used: {error}") from error
        return config if env is None else config.with_env(env)

    def read_written(self) -> WrittenOptions:
        """Return the options of the run in this folder as data, of which nothing is imported, trusted or not.

        Raises:
            ArgumentError: there is no run here, or its options can't be read.
        """
        try:
            return WrittenOptions.read(self.read_values())
        except ArgumentError as error:
            raise ArgumentError(f"{self.config} can't be used: {error}") from error

    def read_values(self) -> dict[str, Any]:
        """Return what is written in ``config.json``.

        Raises:
            ArgumentError: there is no run here, or its options can't be read.
        """
        try:
            values = read_json(self.config)
        except OSError as error:
            raise ArgumentError(
                f"{self.path} holds no run ({self.config} can't be read: {error.strerror}): name the folder that "
                "recurl train wrote."
            ) from error
        except ValueError as error:
            raise ArgumentError(f"{self.config} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ArgumentError(f"{self.config} must hold a JSON object, got {type(values).__name__}.")
        return cast("dict[str, Any]", values)

    def holds(self, config: RunConfig) -> bool:
        """Return whether the run in this folder has these options.

        Raises:
            ArgumentError: see :meth:`read_values`.
        """
        return self.read_values() == json.loads(json.dumps(config.to_dict()))

    def read_checkpoint(self, name: str = "newest") -> tuple[Path, dict[str, Any]]:
        """Return a checkpoint, its path and what it holds.

        Args:
            name: ``"newest"``, or ``"best"``, the one that ``recurl train --keep-best`` kept.

        Raises:
            ArgumentError: there is no such checkpoint, or it can't be read.
        """
        if name not in CHECKPOINTS:
            near = get_close_matches(str(name), CHECKPOINTS, 1)
            raise ArgumentError(
                f"--checkpoint must be one of {', '.join(CHECKPOINTS)}, got {name!r}"
                f"{f': did you mean {near[0]}?' if near else '.'}"
            )
        self._check_folders()
        if name == "newest":
            return load_newest(self.checkpoints, self.notify)
        if not self.best.is_dir():
            raise ArgumentError(
                f"The run {self.path} has no best checkpoint, which recurl train --eval-every STEPS --keep-best "
                "writes: take the newest (--checkpoint newest)."
            )
        return load_newest(self.best, self.notify)


@contextmanager
def _naming_another() -> Generator[None]:
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{error} Another run folder is named with --run-dir.") from error
