"""A matrix product per step, in Gluon, for large layers and many rows.

A group of programs processes 64 or 128 slots, each program 16 or 32 units. A step is a product on tensor cores
(wgmma) of the states of all slots and the weights, which stay in shared memory where they fit and are streamed
otherwise.
"""
