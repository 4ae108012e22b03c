"""Reporting of a run: metrics files, loggers, learning curves, and terminal progress."""
