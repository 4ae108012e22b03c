import resource
import threading
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurl.core.errors import StorageError
from recurl.trainers.report.events import Events


@pytest.mark.slow
def test_events_after_a_purge_are_hidden(tmp_path):
    for purge, steps in ((None, (1, 2, 3)), (2, (2,))):
        time.sleep(1.0 if purge else 0.0)  # files are read in the order of the timestamps (in seconds) in their names
        events = Events(tmp_path, purge_step=purge)
        for step in steps:
            events.write(step, {"x": 10.0 * step})
        events.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("x")] == [(1, 10.0), (2, 20.0)]


def test_are_there_as_soon_as_they_are_written_without_a_thread(tmp_path):
    threads = threading.active_count()
    events = Events(tmp_path / "a" / "b")
    for step in (1, 2):
        events.write(step, {"x": 1.0})
        read = EventAccumulator(str(tmp_path / "a" / "b"))
        read.Reload()
        assert [event.step for event in read.Scalars("x")][-1] == step
    assert threading.active_count() == threads
    events.close()


def test_no_room(tmp_path, capfd):
    events = Events(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        events.write(1, {"x": 1.0})
        with pytest.raises(
            StorageError, match=r"Can't write .*tfevents.* \(File too large\): raise the file size limit"
        ):
            events.write(2, {"x": 1.0})
        events.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capfd.readouterr() == ("", "")
