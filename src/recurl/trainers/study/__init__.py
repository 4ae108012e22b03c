"""Several runs together: sweeps over seeds and options, and comparisons."""
