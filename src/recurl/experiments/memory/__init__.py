"""Memory benchmark: cells with equal numbers of parameters on tasks that need memory."""
