"""The parts of an update add up to the whole, and measuring has no side effects."""

import time
from typing import Any

import pytest
import torch

from recurl.core.spans import (
    ACTING,
    ADVANTAGES,
    BACKWARD,
    ENVIRONMENT,
    FORWARD,
    FORWARD_AND_BACKWARD,
    OPTIMIZER,
    REPLAY,
)
from recurl.recurrence.cpu import instruction_sets
from recurl.trainers.algorithms.table import find_algorithm, make_algorithm
from recurl.trainers.run.update_times import time_updates

SMALL: dict[str, Any] = {"env": "recurl/RepeatPrevious-v0", "hidden_size": 8, "num_envs": 4, "rollout_steps": 16}
LEARNT = {ACTING, ENVIRONMENT, FORWARD, BACKWARD, OPTIMIZER}
TOGETHER = {FORWARD_AND_BACKWARD} if instruction_sets() else {FORWARD, BACKWARD}
REPLAYED = {"learning_starts": 128, "gradient_steps": 2, "slices": 4, "slice_length": 8}
KINDS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("ppo", {}, {ACTING, ENVIRONMENT, OPTIMIZER, ADVANTAGES} | TOGETHER),
    ("impala", {}, LEARNT | {ADVANTAGES}),
    ("a2c", {}, LEARNT | {ADVANTAGES}),
    ("dqn", REPLAYED, LEARNT | {REPLAY}),
    ("r2d2", {**REPLAYED, "burn_in": 4}, LEARNT | {REPLAY}),
    ("sac", REPLAYED, LEARNT | {REPLAY}),
    ("td3", {**REPLAYED, "env": "recurl/MaskedPendulum-v1"}, LEARNT | {REPLAY}),
]


@pytest.mark.parametrize(("name", "options", "expected"), KINDS, ids=[kind[0] for kind in KINDS])
def test_parts_of_an_update(name: str, options: dict[str, Any], expected: set[str]) -> None:
    config = find_algorithm(name).config(**{**SMALL, **options})
    plain = make_algorithm(config)
    made = 4 + options.get("learning_starts", 0) // 64
    for _ in range(made):
        learned = plain.learn(plain.collect())
    measured = make_algorithm(config)
    start = time.perf_counter()
    found = time_updates(measured, 2, 2)
    wall = time.perf_counter() - start
    assert measured.env_steps == plain.env_steps == made * 64
    assert expected <= set(found.parts)
    assert all(seconds > 0 for seconds in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(found.wall, rel=0.02, abs=2e-4)
    assert 2 * found.wall < wall
    assert (found.frames, found.gpu_busy, found.gpu_idle) == (64, None, None)
    ours, theirs = measured.agent.state_dict(), plain.agent.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert learned.keys() == set(plain.reported)
    for learner in (plain, measured):
        learner.close()
