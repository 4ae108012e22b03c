"""Collection of experience: batches of interaction with the policy's states carried, wired by itself."""

from recurl.collectors.collector import Collector, why_not_lowered
from recurl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from recurl.collectors.overlapped import OverlappedCollector

__all__ = ["Collector", "MultiAsyncCollector", "MultiSyncCollector", "OverlappedCollector", "why_not_lowered"]
