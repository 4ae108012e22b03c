"""Collection in actors of Ray, on this machine or on many."""

from recurl.collectors.actors.collector import RayCollector
from recurl.collectors.actors.group import Replacement

__all__ = ["RayCollector", "Replacement"]
