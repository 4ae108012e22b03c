"""Algorithms: the options and the learner of each, and the table of them all."""
