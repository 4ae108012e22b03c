"""A single step of a layer on a GPU, as one kernel."""
