"""Linear recurrences on a GPU."""
