"""Weights that stay on the chip, in Gluon, for small and middle sizes with many rows.

To 128 units a program processes eight slots with all weights in registers and shared memory. Above, a group of
programs shares the units of 8 or 16 slots and exchanges h, or the gradients of the gates, through the second-level
cache.
"""
