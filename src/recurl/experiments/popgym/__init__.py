"""POPGym benchmark: settings, score, and results."""
