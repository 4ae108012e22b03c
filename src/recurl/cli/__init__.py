"""Command-line interface ``recurl``."""

from recurl.cli.main import main

__all__ = ["main"]
