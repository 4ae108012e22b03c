"""Recurrent reinforcement learning for PyTorch: hidden states that are right by construction."""

__version__ = "0.1.0"
