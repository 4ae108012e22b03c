"""A cluster of blocks, in CUDA C++, for layers of middle size.

A cluster of two, four or eight CTAs processes eight slots; each CTA has its share of the units, a warp eight of them.
Weights are float16 in registers and shared memory, products run on tensor cores, and h or the gradients of the gates
are sent directly into the shared memory of the other CTAs.
"""
