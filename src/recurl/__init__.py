"""Recurrent reinforcement learning for PyTorch, with hidden states that are correct by construction."""

__version__ = "0.1.0"
