"""Large matrix products that are faster than ATen's."""
