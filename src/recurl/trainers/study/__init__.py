"""Studies of several runs: sweeps over seeds and options, and comparisons."""

from recurl.trainers.study.comparison import Comparison, Group, compare

__all__ = ["Comparison", "Group", "compare"]
