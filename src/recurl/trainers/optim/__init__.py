"""Gradient steps: clipped, fused, captured, and refused where a number is not finite."""
