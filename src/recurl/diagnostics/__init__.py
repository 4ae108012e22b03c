"""Diagnostics: experimental checks of recurrent policies, a machine report, and backend timings."""

from recurl.diagnostics.batch import check_batch
from recurl.diagnostics.influence import check_action
from recurl.diagnostics.log_prob import check_log_prob
from recurl.diagnostics.machine import machine_report
from recurl.diagnostics.marks import check_is_init, check_traj_ids
from recurl.diagnostics.memory import check_feedback, check_memory, check_reset
from recurl.diagnostics.repeat import check_repeat
from recurl.diagnostics.replay import check_gradient, check_leak, check_mode, check_replay, check_start
from recurl.diagnostics.result import CheckResult
from recurl.diagnostics.rnn_timing import RNNCase, RNNTime, take_turns, time_rnn
from recurl.diagnostics.rows import check_rows
from recurl.diagnostics.wiring import check_primers, check_state_keys, check_stepping, check_tracker, check_wiring

__all__ = [
    "CheckResult",
    "RNNCase",
    "RNNTime",
    "check_action",
    "check_batch",
    "check_feedback",
    "check_gradient",
    "check_is_init",
    "check_leak",
    "check_log_prob",
    "check_memory",
    "check_mode",
    "check_primers",
    "check_repeat",
    "check_replay",
    "check_reset",
    "check_rows",
    "check_start",
    "check_state_keys",
    "check_stepping",
    "check_tracker",
    "check_traj_ids",
    "check_wiring",
    "machine_report",
    "take_turns",
    "time_rnn",
]
