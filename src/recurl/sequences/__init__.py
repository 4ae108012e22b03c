"""Sequences: their index, continuity, stored states, recurrent mode, returns, and groups of agents."""
