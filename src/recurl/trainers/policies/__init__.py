"""Use of a trained policy: loaded from a run or an exported file, one step at a time, and shown."""
