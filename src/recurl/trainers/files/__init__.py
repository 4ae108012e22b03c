"""Files of a run: written atomically and durably, by one process at a time."""
