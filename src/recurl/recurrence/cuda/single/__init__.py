"""One slot per program, in Gluon, for the layers of one row per block that NVRTC's kernels don't serve.

Float32 weights are in registers, partly in shared memory. Four threads share the columns of a unit.
"""
