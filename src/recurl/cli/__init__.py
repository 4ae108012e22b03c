"""The ``recurl`` command."""

from recurl.cli.main import main

__all__ = ["main"]
