"""Recurrent reinforcement learning for PyTorch: hidden states that are right by construction."""

from recurl._version import __version__ as __version__
