"""The benchmark on the tasks of POPGym: settings, score, results."""

from recurl.trainers.study.popgym.results import Result, Results
from recurl.trainers.study.popgym.score import MaxMeanReturn
from recurl.trainers.study.popgym.settings import CELLS, SETTINGS, Run, find_tasks, make_runs, options_text
from recurl.trainers.study.popgym.summary import Summary

__all__ = [
    "CELLS",
    "SETTINGS",
    "MaxMeanReturn",
    "Result",
    "Results",
    "Run",
    "Summary",
    "find_tasks",
    "make_runs",
    "options_text",
]
