"""Collectors of experience that carry recurrent states and append the transforms these need."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.collectors.acting import explain as explain
    from recurl.collectors.acting import why_not_lowered
    from recurl.collectors.actors.collector import RayCollector
    from recurl.collectors.actors.group import Replacement
    from recurl.collectors.collector import Collector
    from recurl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
    from recurl.collectors.overlapped import OverlappedCollector

lazy_names(
    __name__,
    {
        ".acting": "explain why_not_lowered",
        ".actors.collector": "RayCollector",
        ".actors.group": "Replacement",
        ".collector": "Collector",
        ".multi": "MultiAsyncCollector MultiSyncCollector",
        ".overlapped": "OverlappedCollector",
    },
)

__all__ = [
    "Collector",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "OverlappedCollector",
    "RayCollector",
    "Replacement",
    "why_not_lowered",
]
