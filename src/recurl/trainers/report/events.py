"""Synchronous writer of TensorBoard events."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurl.trainers.files.durable import make_folder, write_all, writing

_NUMBERS = itertools.count()
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)


class Events:
    """Writer of TensorBoard scalars over environment steps, unbuffered.

    Args:
        folder: folder of the event files.
        purge_step: hide events of earlier processes from this step on; None for a new run.

    Raises:
        StorageError: the file can't be written; also from :meth:`write`.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        # Lazy import. TensorBoard's own writers write from a thread, whose errors only appear as its traceback.
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - see above
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415 - see above

        self._record: Any = RecordWriter
        self._protos: Any = event_pb2
        self._summaries: Any = summary_pb2
        make_folder(folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._path = folder / name
        with writing(self._path):
            self._descriptor = os.open(self._path, _FLAGS, 0o666)
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            log = self._protos.SessionLog
            self._add(step=purge_step, session_log=log(status=log.START))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write scalars, keyed by tag, at an environment step."""
        values = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self._add(step=step, summary=self._summaries.Summary(value=values))

    def _add(self, **content: Any) -> None:
        record = io.BytesIO()
        self._record(record).write(self._protos.Event(wall_time=time.time(), **content).SerializeToString())
        with writing(self._path):
            write_all(self._descriptor, record.getvalue())

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            os.close(self._descriptor)
