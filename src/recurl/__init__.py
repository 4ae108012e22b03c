"""Recurrent reinforcement learning for PyTorch, with hidden states that are correct by construction."""

from recurl._version import __version__ as __version__
