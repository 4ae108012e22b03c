"""What a run reports: metrics, events, curves, and progress on the terminal."""
