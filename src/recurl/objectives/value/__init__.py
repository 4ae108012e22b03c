"""Value estimation: advantages, returns and value targets."""

from recurl.objectives.value.advantages import GAE

__all__ = ["GAE"]
