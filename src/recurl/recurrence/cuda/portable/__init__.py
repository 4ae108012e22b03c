"""Portable kernels, in Triton, for every NVIDIA GPU from compute capability 8.0 on.

A group of programs processes 16 slots. Each program holds up to 64 units; programs of a group exchange h, or the
gradients of the gates, through global memory and wait for each other at every step. Weights are resident in registers
where they fit.
"""
