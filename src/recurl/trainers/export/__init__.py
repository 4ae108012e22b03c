"""Export of the greedy policy of a run as one function with hidden states as inputs and outputs.

The function maps ``(observation, is_init, *states)``, with any number of rows, to ``(action, *new states)``. It
includes all preprocessing of observations, such as normalization, and needs neither recurl nor tensordict.
"""
