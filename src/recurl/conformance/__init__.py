"""Checks of recurrent correctness, which any library with recurrent PPO can run against a small adapter.

The checks need NumPy and Gymnasium alone.
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.conformance.adapter import Adapter, Agent, NotOffered, Outputs, Play, Setup
    from recurl.conformance.checks import CHECKS, Check
    from recurl.conformance.playing import play_steps
    from recurl.conformance.runner import Verdict, run_checks
    from recurl.conformance.script import Episode, Moment, Script, ScriptedAgents, ScriptedEnv, terminated, truncated

lazy_names(
    __name__,
    {
        ".adapter": "Adapter Agent NotOffered Outputs Play Setup",
        ".checks": "CHECKS Check",
        ".playing": "play_steps",
        ".runner": "Verdict run_checks",
        ".script": "Episode Moment Script ScriptedAgents ScriptedEnv terminated truncated",
    },
)

__all__ = [
    "CHECKS",
    "Adapter",
    "Agent",
    "Check",
    "Episode",
    "Moment",
    "NotOffered",
    "Outputs",
    "Play",
    "Script",
    "ScriptedAgents",
    "ScriptedEnv",
    "Setup",
    "Verdict",
    "play_steps",
    "run_checks",
    "terminated",
    "truncated",
]
