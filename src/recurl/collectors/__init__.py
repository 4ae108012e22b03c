"""Collection of experience: batches of interaction with the policy's states carried, wired by itself."""

from recurl.collectors.collector import Collector

__all__ = ["Collector"]
