"""Files of a run: whole and on disk or as they were before, and written by one process at a time."""
