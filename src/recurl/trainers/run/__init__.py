"""Runs: folder, training loop, evaluation."""
