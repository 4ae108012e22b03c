"""Benchmarks and studies: commands that the library itself never imports."""
