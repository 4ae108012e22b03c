"""Deployment: the greedy policy of a run as one function, with its hidden states as inputs and outputs.

The function maps ``(observation, is_init, *states)`` of any number of rows to ``(action, *states after)``. It holds
everything that the policy does to an observation, normalisation included, and needs neither recurl nor tensordict.
"""
