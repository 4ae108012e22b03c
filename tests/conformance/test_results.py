"""Scripts, verdicts, results and their matrix."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from recurl.conformance import Moment, NotOffered, Outputs, Script, run_checks, terminated, truncated
from recurl.conformance.matrix import Result, matrix, read_results, results_text

from .toy import Toy


def test_an_environment_follows_its_script() -> None:
    env = Script([[], [terminated(1), truncated(2)]]).make(1)
    ends = []
    env.reset()
    env.reset()  # without a step, the same episode
    for _ in range(5):
        place, (_, _, *end, _) = env.place, env.step(0)
        ends.append((place, *end))
        if any(end):
            env.reset()
    assert ends == [
        (Moment(1, 0, 0), True, False),
        (Moment(1, 1, 0), False, False),
        (Moment(1, 1, 1), False, True),
        (Moment(1, 2, 0), False, False),
        (Moment(1, 2, 1), False, False),
    ]


def test_agents_follow_their_script() -> None:
    script = Script([[], [], [terminated(1), truncated(2)], [truncated(3), terminated(2)]], agents=2)
    env = script.make_agents(1)
    steps = []
    for _ in range(6):
        if not env.agents:
            env.reset()
        seen, _, *ends, _ = env.step({})
        steps.append([(script.find(value)[0], *(end[name] for end in ends)) for name, value in seen.items()])
    assert steps[:5] == [  # what each step returns, of those who are present
        [(Moment(2, 0, 1), True, False), (Moment(3, 0, 1), False, False)],
        [(Moment(3, 0, 2), False, False)],
        [(Moment(3, 0, 3), False, True)],
        [(Moment(2, 1, 1), False, False), (Moment(3, 1, 1), False, False)],
        [(Moment(2, 1, 2), False, True), (Moment(3, 1, 2), True, False)],
    ]
    assert list(script.timeline(2, 6)) == [
        *(Moment(2, 0, 0), None, None, Moment(2, 1, 0), Moment(2, 1, 1)),
        Moment(2, 2, 0),
    ]
    with pytest.raises(ValueError, match="3 rows can't be environments of 2 agents"):
        Script([[], [], []], agents=2)
    with pytest.raises(ValueError, match="call make_agents"):
        script.make(0)


def test_adapters_without_agents() -> None:
    class Alone(Toy):
        no_agents = "the toy is alone"

    (refused,) = run_checks(Alone(), ["agents-death"])
    assert str(refused) == "not offered  agents-death: the toy is alone"


def test_observations_tell_their_place() -> None:
    script = Script([[terminated(2)], []], changed=frozenset({Moment(1, 0, 3)}))
    places = [Moment(0, 0, 0), Moment(0, 0, 2), Moment(0, 1, 5), Moment(1, 0, 3)]
    assert script.find(np.stack([script.observation(place) for place in places]).reshape(2, 2, 3)) == places
    assert script.find([Script(script.ends, first=1).observation(Moment(0, 0, 5))]) == [Moment(0, 1, 5)]
    assert not np.array_equal(script.observation(places[3]), Script(script.ends).observation(places[3]))
    with pytest.raises(LookupError, match="it was altered on its way"):
        script.find(script.observation(places[0]) * 1.001)
    with pytest.raises(LookupError, match=r"Row 1, episode 1, step 0 .* reset before episode 0 had ended"):
        script.find(script.observation(Moment(1, 1, 0)))
    with pytest.raises(LookupError, match=r"Row 0, .* step 3 .* ends after 2 steps, but its environment wasn't reset"):
        script.find(script.observation(Moment(0, 0, 3)))


def test_outcomes() -> None:
    class NoEvaluation(Toy):
        def make(self, setup):
            agent = super().make(setup)

            def refuse(*_: object) -> Outputs:
                raise NotOffered("the toy has no evaluation")

            agent.play = refuse
            return agent

    (refused,) = run_checks(NoEvaluation(), ["evaluation"])
    assert str(refused) == "not offered  evaluation: the toy has no evaluation"
    (documented,) = run_checks(Toy("all reset", {"others-go-on": "its README"}), ["others-go-on"])
    assert documented.outcome == "documented"
    assert documented.detail.endswith("(its README)")
    (raised,) = run_checks(Toy("one batch size"), ["other-number-of-environments"])
    assert re.fullmatch(r"raised ValueError: other batch size \(toy.py, line \d+\)", raised.detail)


def test_adapters_that_break_the_protocol() -> None:
    def verdict(name: str, value: object, check: str = "replay") -> str:
        class Broken(Toy):
            def make(self, setup):
                agent = super().make(setup)
                setattr(agent, name, value)
                return agent

        (found,) = run_checks(Broken(), [check])
        return found.detail

    assert "lacks collect" in verdict("collect", None)
    assert "collect must return Outputs, got int" in verdict("collect", lambda: 3)
    assert "learn must return a list" in verdict("learn", lambda: None)
    assert "play must return Outputs, got NoneType" in verdict("play", lambda *_: None, "evaluation")
    seen = np.ones((4, 2, 3), np.float32)
    for entries, text in (
        ({"observations": seen[..., :2], "actions": np.zeros(8)}, r"observations must have the shape \[\.\.\., 3\]"),
        ({"observations": seen, "actions": np.zeros((4, 2, 2))}, r"actions must have a number for each of the 8"),
        ({"observations": seen, "actions": np.full(8, 2)}, r"actions must be 0 or 1, got \[2"),
    ):
        with pytest.raises(ValueError, match=text):
            Outputs(**entries)


def test_outputs_are_copies() -> None:
    values = torch.zeros(1, requires_grad=True)
    outputs = Outputs(np.ones((1, 3)), np.zeros(1), values=values)
    with torch.no_grad():
        values += 1
    assert outputs.flat("values") == 0


def test_an_agent_of_small_probabilities_is_evaluated() -> None:
    class Small(Toy):
        def make(self, setup):
            agent = super().make(setup)
            agent.weights[-1] *= 0.1
            return agent

    assert [verdict.outcome for verdict in run_checks(Small(), ["evaluation", "other-number-of-environments"])] == [
        "passed",
        "passed",
    ]


def test_results_file_and_matrix(tmp_path: Path) -> None:
    results = [
        Result("a", "a 1", "memory", "passed", "", "2026-11-01"),
        Result("a", "a 1", "replay", "failed", 'differs, by "much"', "2026-11-01"),
        Result("b", "b 2", "replay", "not offered", "", "2026-11-01"),
    ]
    (tmp_path / "file.csv").write_text(results_text(results))
    assert read_results(tmp_path / "file.csv") == results
    lines = matrix(results).splitlines()
    assert "| memory | yes |  |" in lines
    assert "| replay | **no** | - |" in lines
    assert lines[-1] == "| passed / offered | 1 / 2 | 0 / 0 |"
