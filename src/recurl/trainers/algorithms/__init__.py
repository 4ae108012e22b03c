"""Algorithms: options, learners, and their registry."""
