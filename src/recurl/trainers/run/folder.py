"""Run folder: its files and its lock."""

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

from recurl.core.errors import ArgumentError, RecurlWarning, StorageError
from recurl.core.untrusted import check_folder, read_json
from recurl.trainers.algorithms.table import read_options
from recurl.trainers.algorithms.written import WrittenOptions
from recurl.trainers.config import RunConfig
from recurl.trainers.env_name import EnvSource
from recurl.trainers.files.checkpoints import latest_checkpoint, load_newest
from recurl.trainers.files.durable import is_partial, make_folder, remove_partials, sync_folder, write_atomic, writing
from recurl.trainers.files.lock import LOCK_FILES, FolderLock
from recurl.trainers.trust import check_names, resume_command

CHECKPOINTS = ("newest", "best")
"""Checkpoint names accepted by :meth:`RunFolder.read_checkpoint`."""


def _warn(text: str) -> None:
    warnings.warn(text, RecurlWarning, stacklevel=3)


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run: paths of its files, its options and checkpoints, and its lock.

    Args:
        path: the folder; it need not exist yet.
        notify: called with notices, such as that an older checkpoint is read because the newest is damaged; issues a
            warning by default.
        trust: allow importing code named in ``config.json``: environments, cells, wrappers, callbacks and algorithms
            outside recurl. By default such a run is refused, unless the program has already imported the modules, so
            that a folder from an untrusted source can't run arbitrary code.

    Example:
        >>> from pathlib import Path
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
        """Context manager that locks the folder: no other process can train, resume or replace a run in it.

        Creates the folder if it is missing. The lock is reentrant, and the operating system releases it when the
        process ends, for whatever reason. If several processes may start at once, hold it from :meth:`create` to the
        end of the run. Reading needs no lock.

        Raises:
            ArgumentError: if a subfolder is a link.
            LockedError: if another process holds the lock.
            StorageError: if the folder can't be written.
        """
        with ExitStack() as stack:
            with _suggest_run_dir():
                make_folder(self.path)
                self._check_folders()
                stack.enter_context(self._lock.hold())
            yield

    @property
    def config(self) -> Path:
        """File of the options."""
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
        """File of the run's provenance: versions, commit, machine and command, one line of JSON per start."""
        return self.path / "versions.jsonl"

    @property
    def curve(self) -> Path:
        """Plot of the learning curve."""
        return self.path / "learning_curve.png"

    @property
    def _folders(self) -> tuple[Path, ...]:
        return self.checkpoints, self.best, self.tensorboard, self.path / "wandb"

    def _check_folders(self) -> None:
        """Check that no subfolder is a link, as its target is not part of the run."""
        for folder in self._folders:
            try:
                check_folder(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ArgumentError(
                    f"{folder} can't be used ({error.strerror}): it must be a real folder inside the run folder; move "
                    "the files of the run there, or remove it."
                ) from error

    def check_free(self, *, overwrite: bool) -> None:
        """Check that the folder can be used for a new run.

        Args:
            overwrite: allow replacing an existing run.

        Raises:
            ArgumentError: if the folder contains a run or other files.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ArgumentError(f"{self.path} is not a folder: choose another with --run-dir.")
        if self.config.exists():
            if not overwrite:
                values: dict[str, Any] = {}
                with suppress(ArgumentError):  # resuming reports what is wrong
                    values = self.read_values()
                raise ArgumentError(
                    f"{self.path} already holds a run: resume it ({resume_command(self.path, values)}), "
                    "replace it (--overwrite) or choose another folder (--run-dir)."
                )
        elif self._has_content():
            raise ArgumentError(f"{self.path} is not empty and holds no run: choose another folder with --run-dir.")

    def create(self, config: RunConfig, *, overwrite: bool = False) -> None:
        """Create the folder and write the options.

        Args:
            config: the options.
            overwrite: remove the files of an existing run.

        Raises:
            ArgumentError: if the folder contains a run or other files.
            LockedError: if another process uses the folder.
            StorageError: if the folder can't be written.
        """
        self.check_free(overwrite=overwrite)
        with self.hold(), _suggest_run_dir():
            self.check_free(overwrite=overwrite)
            self._clear()
            self._write(config)

    def extend(self, total_steps: int, given: Collection[str] = ()) -> RunConfig:
        """Return the options of this run with a larger ``total_steps``; see :meth:`rewrite`.

        Args:
            total_steps: total number of environment steps, including those already taken.
            given: see :meth:`read_config`.

        Raises:
            ArgumentError: if there is no run or checkpoint, or less than one batch would be added.
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
        """Replace the options of the run, for instance with those of :meth:`extend`.

        Raises:
            LockedError: if another process uses the folder.
            StorageError: if the folder can't be written.
        """
        with self.hold(), _suggest_run_dir():
            self._write(config)

    def note_start(self, about: Mapping[str, Any]) -> None:
        """Append a line to :attr:`versions`.

        Args:
            about: plain values.

        Raises:
            LockedError: if another process uses the folder.
            StorageError: if the folder can't be written.
        """
        with self.hold(), _suggest_run_dir(), writing(self.versions):
            earlier = self.versions.read_bytes() if self.versions.is_file() and not self.versions.is_symlink() else b""
            write_atomic(self.versions, earlier + json.dumps(about).encode() + b"\n")

    def _write(self, config: RunConfig) -> None:
        write_atomic(self.config, json.dumps(config.to_dict(), indent=2).encode() + b"\n")

    def _has_content(self) -> bool:
        with writing(self.path):
            return any(path.name not in LOCK_FILES and not is_partial(path) for path in self.path.iterdir())

    def _clear(self) -> None:
        """Remove the files of the previous run, except its options, which are replaced later."""
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
            env: environment to use instead, see ``RunConfig.env``. Required if the run was given a function or an
                object, of which the folder stores the name only.
            given: names of options that the caller overrides; code named in them needs no trust.

        Raises:
            ArgumentError: if there is no run, its options can't be read, or they name code and the folder isn't
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
        """Return the options of the run in this folder as data, without importing anything they name.

        Raises:
            ArgumentError: if there is no run, or its options can't be read.
        """
        try:
            return WrittenOptions.read(self.read_values())
        except ArgumentError as error:
            raise ArgumentError(f"{self.config} can't be used: {error}") from error

    def read_values(self) -> dict[str, Any]:
        """Return the content of ``config.json``.

        Raises:
            ArgumentError: if there is no run, or its options can't be read.
        """
        try:
            values = read_json(self.config)
        except OSError as error:
            raise ArgumentError(
                f"{self.path} holds no run ({self.config} can't be read: {error.strerror}): pass a folder "
                "written by recurl train."
            ) from error
        except ValueError as error:
            raise ArgumentError(f"{self.config} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ArgumentError(f"{self.config} must contain a JSON object, got {type(values).__name__}.")
        return cast("dict[str, Any]", values)

    def holds(self, config: RunConfig) -> bool:
        """Return whether the run in this folder has these options.

        Raises:
            ArgumentError: see :meth:`read_values`.
        """
        return self.read_values() == json.loads(json.dumps(config.to_dict()))

    def read_checkpoint(self, name: str = "newest") -> tuple[Path, dict[str, Any]]:
        """Return the path and the content of a checkpoint.

        Args:
            name: ``"newest"``, or ``"best"`` for the one saved by ``recurl train --keep-best``.

        Raises:
            ArgumentError: if there is no such checkpoint, or it can't be read.
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
                "saves: use the newest (--checkpoint newest)."
            )
        return load_newest(self.best, self.notify)


@contextmanager
def _suggest_run_dir() -> Generator[None]:
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{error} Use --run-dir to choose another run folder.") from error
