"""Bounds on the time and memory of one piece of code, whatever else has run in the process."""

import gc
import resource
import time
from contextlib import contextmanager


@contextmanager
def within(seconds, megabytes=None):
    """Assert that the block takes less CPU time, and adds less memory to the peak of the process.

    Garbage collections look at what the block made alone, not at all that thousands of tests before it left.
    """
    gc.collect()
    gc.freeze()
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        yield
    finally:
        taken = time.thread_time() - begin
        gc.unfreeze()
    assert taken < seconds
    if megabytes is not None:
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000 < megabytes
