"""Keys, errors, specs, archives, and what else knows torch alone."""
