"""Gradient steps: clipped, fused, captured, and skipped if a number is not finite."""
