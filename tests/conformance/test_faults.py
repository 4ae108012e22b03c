"""Every check passes for a sound agent, and fails for agents with a fault that it is about."""

import pytest

from recurl.conformance import CHECKS, run_checks

from .toy import Toy

FAULTS = {
    "unseeded": "seed",
    "no memory": "memory next-rollout uses-memory",
    "peeks": "causality past-only",
    "rows mixed": "rows rows-apart",
    "no reset at terminations": "termination short-episodes end-of-rollout fresh-start",
    "no reset at truncations": "truncation short-episodes end-of-rollout",
    "reset before the final observation": "final-observation fresh-start",
    "other start": "fresh-start",
    "all reset": "others-go-on agents-death",
    "rollouts apart": "next-rollout rollout-length",
    "bootstrap advances": "rollout-length",
    "late reset": "end-of-rollout",
    "learning overwrites": "update-between",
    "shared state": "agents-apart",
    "replay from zeros": "replay-next-rollout replay-any-ends",
    "noise": "replay",
    "actions of other steps": "replay",
    "advantages of other steps": "replay",
    "replay through ends": "replay-terminations replay-truncations replay-short-episodes replay-any-ends ends",
    "replay through first ends": "replay-end-of-rollout",
    "short replay": "replay-long-episodes",
    "acts with old parameters": "replay-after-updates",
    "second epoch from zeros": "passes",
    "minibatches from zeros": "minibatches",
    "last step lost": "every-step-once",
    "padding": "every-step-once uneven-minibatches",
    "rows left out": "uneven-minibatches",
    "bootstrap without memory": "advantages advantages-of-truncations advantages-of-the-next-rollout",
    "bootstrap at terminations": "advantages-of-terminations",
    "no bootstrap at truncations": "advantages-of-truncations advantages-of-truncated-last-steps",
    "bootstrap in last steps": "advantages-of-last-steps",
    "no bootstrap in last steps": "advantages advantages-of-the-next-rollout",
    "no bootstrap at last truncations": "advantages-of-truncated-last-steps",
    "next episode": "episodes-apart",
    "the dead are seen": "agents-death",
    "no reset at returns": "agents-return",
    "agents transposed": "agents-return",
    "replay through returns": "agents-replay",
    "waiting counts": "agents-count",
    "returns left out": "agents-count",
    "advantages cross deaths": "agents-advantages",
    "evaluation without memory": "evaluation",
    "evaluation without resets": "evaluation-of-episodes",
    "one batch size": "other-number-of-environments",
    "evaluation goes on": "evaluation-twice",
    "evaluation overwrites": "evaluation-between",
    "loads the state": "load",
    "saves initial parameters": "load-after-updates",
    "load goes on": "load-into-a-used-agent",
    "export without memory": "export",
    "export without resets": "export-of-episodes",
}


def test_a_sound_agent_passes() -> None:
    failed = [str(verdict) for verdict in run_checks(Toy()) if verdict.outcome != "passed"]
    assert not failed


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    verdicts = list(run_checks(Toy(fault), FAULTS[fault].split()))
    assert len(verdicts) == len(FAULTS[fault].split())
    passed = [verdict.check.name for verdict in verdicts if verdict.outcome != "failed"]
    assert not passed


def test_every_check_can_fail() -> None:
    assert {name for names in FAULTS.values() for name in names.split()} == set(CHECKS)
