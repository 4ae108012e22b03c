"""The ``triton`` backend: recurrence kernels for NVIDIA GPUs. Triton itself is loaded when a layer first runs."""

from recurl.recurrence.cuda.backend import TritonKernels

__all__ = ["TritonKernels"]
