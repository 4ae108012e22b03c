"""Environments of other libraries, under TorchRL's module path."""
