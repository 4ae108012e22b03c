"""Runs: their folder, training, evaluation."""
