"""Collection in Ray actors, on one or several machines."""
