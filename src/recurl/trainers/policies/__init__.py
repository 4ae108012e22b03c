"""Inference with trained policies: loading, stepping, and playing episodes."""
