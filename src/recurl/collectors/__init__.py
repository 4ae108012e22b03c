"""Collectors of experience that carry recurrent states and append the transforms these need."""

from typing import TYPE_CHECKING

from recurl.collectors.acting import explain as explain
from recurl.collectors.acting import why_not_lowered
from recurl.collectors.actors.collector import RayCollector
from recurl.collectors.actors.group import Replacement
from recurl.collectors.collector import Collector
from recurl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from recurl.collectors.overlapped import OverlappedCollector
from recurl.core.messages import absent_names

if not TYPE_CHECKING:  # type checkers assume that a module with __getattr__ has every name
    __getattr__ = absent_names(__name__)

__all__ = [
    "Collector",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "OverlappedCollector",
    "RayCollector",
    "Replacement",
    "why_not_lowered",
]
