"""Sequences: their boundaries, continuity, stored states, recurrent mode, and returns."""
