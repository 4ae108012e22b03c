"""Fast execution of networks and steps: lowered to tensors, compiled, or captured as CUDA graphs."""
