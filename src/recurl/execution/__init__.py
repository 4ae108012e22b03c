"""Ways to run a function of a batch: lowered, compiled, captured."""
