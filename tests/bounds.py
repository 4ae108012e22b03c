"""Bounds on the time and memory of a block of code, independent of other code run in the process."""

import gc
import resource
import time
from contextlib import contextmanager


@contextmanager
def within(seconds, megabytes=None):
    """Assert bounds on the CPU time of the block, and on the memory it adds to the peak of the process.

    Garbage collection only visits objects created in the block, not those left by earlier tests, whose number grows to
    millions. Garbage among them is frozen rather than collected, as collection takes a second per block.
    """
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
