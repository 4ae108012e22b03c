"""Collection in actors of Ray, on this machine or on many."""
