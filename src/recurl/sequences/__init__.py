"""Sequences: their index, continuity, stored states, recurrent mode, and returns."""
