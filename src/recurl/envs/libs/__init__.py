"""Where TorchRL keeps the environments of other libraries."""
