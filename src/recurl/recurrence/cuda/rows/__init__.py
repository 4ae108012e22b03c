"""One row per block, in CUDA C++, for small layers.

A CTA processes one slot, with four threads per hidden unit and all recurrent weights in registers. Products are plain
float32 multiplications. A step has one barrier.
"""
