"""The checks: each states a property of correct recurrence and tests it by experiment."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recurl.conformance.adapter import Adapter, NotOffered, Outputs, Setup
from recurl.conformance.scenes import (
    VISIBLE,
    Failed,
    Table,
    advantages,
    agent,
    at,
    collected,
    learned,
    named,
    require_different,
    require_equal,
    table,
)
from recurl.conformance.script import End, Episode, Moment, Script, terminated, truncated

KINDS: tuple[End, ...] = ("terminated", "truncated")


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: its name.
        group: what it is about.
        text: the property that must hold.
        run: the experiment, which raises :class:`~recurl.conformance.scenes.Failed`.
    """

    name: str
    group: str
    text: str
    run: Callable[[Adapter], None]


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def _check(group: str, name: str) -> Callable[[Callable[[Adapter], None]], Callable[[Adapter], None]]:
    def register(function: Callable[[Adapter], None]) -> Callable[[Adapter], None]:
        CHECKS[name] = Check(name, group, (function.__doc__ or "").strip(), function)
        return function

    return register


def _ended(kind: End, length: int = 3) -> Script:
    """Two environments: the first one's first episode ends."""
    return Script([[Episode(length, kind)], []])


def _changed(script: Script, *places: tuple[int, int, int]) -> Script:
    return replace(script, changed=frozenset(Moment(*place) for place in places))


def _differ(adapter: Adapter, script: Script, *places: tuple[int, int, int], rollouts: int = 1) -> tuple[Table, Table]:
    """Return what is collected with a script, and with other observations at some places."""
    other = _changed(script, *places)
    before = collected(adapter, Setup(script), rollouts)
    return before, collected(adapter, Setup(other), rollouts)


def _before(found: Table, step: int) -> Table:
    return {place: value for place, value in found.items() if place.step < step}


def _require_equal_shared(what: str, one: Table, other: Table) -> None:
    """Require equal outputs at the places of both, which must be most: rollouts may be longer than asked for."""
    shared = {place: value for place, value in one.items() if place in other}
    if len(shared) < max(len(one), len(other)) / 2:
        raise Failed(f"{what}: {len(shared)} places of {len(one)} and {len(other)} are the same")
    require_equal(what, shared, other)


def _require_memory(one: Table, other: Table) -> None:
    where = [Moment(0, 0, 2)]
    require_different("another observation at step 1 doesn't change the output at step 2", one, other, where)


# --- acting -----------------------------------------------------------------------------------------------------------


@_check("acting", "seed")
def _(adapter: Adapter) -> None:
    """Two agents with the same seed act alike (the other checks need it)."""
    setup = Setup(Script([[], []]))
    require_equal("with the same seed", collected(adapter, setup), collected(adapter, setup))


@_check("acting", "memory")
def _(adapter: Adapter) -> None:
    """An observation influences later outputs of its episode."""
    one, other = _differ(adapter, Script([[], []]), (0, 0, 1))
    _require_memory(one, other)


@_check("acting", "causality")
def _(adapter: Adapter) -> None:
    """An observation doesn't influence earlier outputs."""
    one, other = _differ(adapter, Script([[], []]), (0, 0, 4))
    before = {place: value for place, value in at(one, row=0).items() if place.step < 4}
    require_equal("with another observation at step 4", before, other)


@_check("acting", "rows")
def _(adapter: Adapter) -> None:
    """An observation doesn't influence the outputs of other environments."""
    one, other = _differ(adapter, Script([[], [], []]), (1, 0, 2))
    for row in (0, 2):
        require_equal("with another observation in environment 1", at(one, row=row), other)


def _leak(adapter: Adapter, kind: End) -> None:
    one, other = _differ(adapter, _ended(kind), (0, 0, 1), (0, 0, 2))
    require_equal(f"with other observations before the episode was {kind}", at(one, row=0, episode=1), other)


@_check("acting", "termination")
def _(adapter: Adapter) -> None:
    """After a termination, outputs don't depend on the episode before."""
    _leak(adapter, "terminated")


@_check("acting", "truncation")
def _(adapter: Adapter) -> None:
    """After a truncation, outputs don't depend on the episode before."""
    _leak(adapter, "truncated")


@_check("acting", "final-observation")
def _(adapter: Adapter) -> None:
    """Outputs don't depend on the final observation of the episode before."""
    for kind in KINDS:
        one, other = _differ(adapter, _ended(kind), (0, 0, 3))
        require_equal(f"with another final observation ({kind})", at(one, row=0, episode=1), other)


@_check("acting", "fresh-start")
def _(adapter: Adapter) -> None:
    """Every episode begins with the state of the first one."""
    second = collected(adapter, Setup(_ended("terminated")))
    alone = collected(adapter, Setup(Script([[], []], first=1)))
    moved = {place._replace(episode=0): value for place, value in at(second, row=0, episode=1).items()}
    require_equal("compared with the same observations in a first episode", moved, alone)


@_check("acting", "others-go-on")
def _(adapter: Adapter) -> None:
    """The end of an episode doesn't reset other environments."""
    for kind in KINDS:
        one = collected(adapter, Setup(Script([[], []])))
        other = collected(adapter, Setup(_ended(kind)))
        _require_equal_shared(f"where environment 0 was {kind}", at(other, row=1), at(one, row=1))


@_check("acting", "short-episodes")
def _(adapter: Adapter) -> None:
    """In episodes of one step, outputs depend on one observation."""
    for kind in KINDS:
        script = Script([[Episode(1, kind)] * 7, []])
        one, other = _differ(adapter, script, (0, 1, 0), (0, 3, 0))
        kept = {place: value for place, value in at(one, row=0).items() if place.episode not in (1, 3)}
        require_equal(f"with other observations in episodes 1 and 3 ({kind})", kept, other)


@_check("acting", "next-rollout")
def _(adapter: Adapter) -> None:
    """An episode goes on in the next rollout with its memory."""
    one, other = _differ(adapter, Script([[], []]), (0, 0, 7), rollouts=2)
    require_different(
        "another observation in the last step of a rollout doesn't change the next one", one, other, [Moment(0, 0, 8)]
    )


@_check("acting", "rollout-length")
def _(adapter: Adapter) -> None:
    """Outputs don't depend on how steps are divided into rollouts; bootstrapping, say, doesn't advance the state."""
    script = Script([[terminated(3)], [truncated(5)]])
    short = collected(adapter, Setup(script, steps=4), 4)
    _require_equal_shared("in rollouts of 4 and of 16 steps", short, collected(adapter, Setup(script, steps=16)))


@_check("acting", "end-of-rollout")
def _(adapter: Adapter) -> None:
    """An episode that ends in the last step of a rollout doesn't influence the next rollout."""
    for kind in KINDS:
        one, other = _differ(adapter, _ended(kind, 8), (0, 0, 6), (0, 0, 7), rollouts=2)
        require_equal(f"after an episode {kind} in the last step", at(one, row=0, episode=1), other)


@_check("acting", "update-between")
def _(adapter: Adapter) -> None:
    """An update with a learning rate of 0 doesn't change what follows: it leaves the acting state alone."""
    script = Script([[terminated(5)], [truncated(11)]])
    with agent(adapter, Setup(script)) as made:
        found: list[Outputs] = []
        for _ in range(3):
            found.append(made.collect())
            made.learn()
    require_equal("with updates between rollouts", table(script, found), collected(adapter, Setup(script), 3))


@_check("acting", "agents-apart")
def _(adapter: Adapter) -> None:
    """Another agent in the same process doesn't change what an agent does."""
    script = Script([[terminated(5)], []])
    with agent(adapter, Setup(script)) as made, agent(adapter, Setup(replace(script, seed=1), seed=1)) as another:
        found: list[Outputs] = []
        for _ in range(2):
            found.append(made.collect())
            another.collect()
    require_equal("with another agent", table(script, found), collected(adapter, Setup(script), 2))


# --- learning ---------------------------------------------------------------------------------------------------------


def _replayed(adapter: Adapter, setup: Setup, rollouts: int = 1) -> None:
    acted, replayed = learned(adapter, setup, rollouts)
    require_equal("learned and collected", replayed, acted)


@_check("learning", "replay")
def _(adapter: Adapter) -> None:
    """An update computes the log-probabilities and values of collection."""
    _replayed(adapter, Setup(Script([[], []])))


@_check("learning", "replay-terminations")
def _(adapter: Adapter) -> None:
    """So it does where episodes terminate inside a rollout."""
    _replayed(adapter, Setup(Script([[terminated(3)], [terminated(5)]])))


@_check("learning", "replay-truncations")
def _(adapter: Adapter) -> None:
    """So it does where episodes are truncated inside a rollout."""
    _replayed(adapter, Setup(Script([[truncated(3)], [truncated(5)]])))


@_check("learning", "replay-short-episodes")
def _(adapter: Adapter) -> None:
    """So it does with episodes of one and two steps."""
    _replayed(adapter, Setup(Script([[terminated(1)] * 7, [truncated(2), terminated(1), terminated(2)]])))


@_check("learning", "replay-next-rollout")
def _(adapter: Adapter) -> None:
    """So it does in a rollout that begins within an episode: its memory was stored."""
    _replayed(adapter, Setup(Script([[], [terminated(11)]])), 2)


@_check("learning", "replay-end-of-rollout")
def _(adapter: Adapter) -> None:
    """So it does where an episode ends in the last step of a rollout, and in its first one."""
    for kind in KINDS:
        _replayed(adapter, Setup(Script([[Episode(8, kind)], [Episode(9, kind)]])), 2)


@_check("learning", "replay-long-episodes")
def _(adapter: Adapter) -> None:
    """So it does with rollouts of 64 steps."""
    _replayed(adapter, Setup(Script([[], [terminated(40)]]), steps=64))


@_check("learning", "replay-any-ends")
def _(adapter: Adapter) -> None:
    """So it does in the third rollout of four environments with random ends."""
    random = np.random.default_rng(0)
    ends = [[Episode(int(random.integers(1, 9)), KINDS[random.integers(2)]) for _ in range(8)] for _ in range(4)]
    _replayed(adapter, Setup(Script(ends), steps=12, minibatches=2), 3)


@_check("learning", "replay-after-updates")
def _(adapter: Adapter) -> None:
    """So it does in the first minibatch after an update that changed the parameters."""
    script = Script([[terminated(5)], []])
    with agent(adapter, Setup(script, learning_rate=1e-2)) as made:
        made.collect()
        made.learn()
        acted = table(script, [made.collect()])
        replayed = table(script, made.learn()[:1])
    require_equal("learned and collected, after an update", replayed, acted)


@_check("learning", "passes")
def _(adapter: Adapter) -> None:
    """With a learning rate of 0 all epochs and minibatches compute the same outputs for a step."""
    _replayed(adapter, Setup(Script([[terminated(11)], [], [truncated(6)], []]), epochs=3, minibatches=2), 2)


@_check("learning", "minibatches")
def _(adapter: Adapter) -> None:
    """Outputs of an update don't depend on the number of minibatches."""
    script = Script([[terminated(11)], [], [truncated(6)], []])
    one, several = (learned(adapter, Setup(script, minibatches=number), 2)[1] for number in (1, 2))
    require_equal("with 2 minibatches and with 1", several, one)


def _require_every_step(adapter: Adapter, script: Script, minibatches: int) -> None:
    with agent(adapter, Setup(script, minibatches=minibatches)) as made:
        _require_once(script, made.collect(), made.learn())


def _first_steps(script: Script, steps: int) -> set[Moment]:
    return {place for row in range(script.num_rows) for place in script.walk(row, steps)}


def _require_once(script: Script, acted: Outputs, learned: list[Outputs]) -> None:
    """Require that the steps of a rollout, and they alone, count once in an epoch."""
    absent = sum(part.absent for part in learned)
    if absent:
        raise Failed(f"{absent} steps of absent agents count")
    places = [place for part in learned for place in script.find(part.seen)]
    wanted = _first_steps(script, 32) & set(script.find(acted.seen))
    for place in places:
        if place not in wanted:
            raise Failed(f"{named(place)} counts, where an episode had ended or before the rollout")
        if places.count(place) > 1:
            raise Failed(f"{named(place)} counts {places.count(place)} times")
    gone = wanted - set(places)
    if gone or not wanted:
        first = f", the first of them {named(min(gone))}" if gone else ""
        raise Failed(f"{len(gone)} of {len(wanted)} steps don't count{first}")


@_check("learning", "every-step-once")
def _(adapter: Adapter) -> None:
    """Every step from which an action was taken counts once in an epoch, and nothing else does."""
    _require_every_step(adapter, Script([[terminated(3)], [truncated(5)], [terminated(8)], []]), 2)
    _require_every_step(adapter, Script([[], [], [], []]), 1)


@_check("learning", "uneven-minibatches")
def _(adapter: Adapter) -> None:
    """So it does if the number of minibatches doesn't divide the number of environments, unless this is refused."""
    try:
        _require_every_step(adapter, Script([[terminated(3)], [], [truncated(5)]]), 2)
    except (Failed, NotOffered):
        raise
    except Exception as error:  # any, of the library under test
        raise NotOffered(f"refused: {error}") from error


def _relearned(adapter: Adapter, script: Script, *places: tuple[int, int, int]) -> tuple[Table, Table]:
    """Return what is learned with a script, and with other observations at some places."""
    one, other = (learned(adapter, Setup(each))[1] for each in (script, _changed(script, *places)))
    return one, other


@_check("learning", "ends")
def _(adapter: Adapter) -> None:
    """In an update, outputs after the end of an episode don't depend on the episode."""
    for kind in KINDS:
        one, other = _relearned(adapter, _ended(kind), (0, 0, 1), (0, 0, 2))
        require_equal(f"in an update, after an episode was {kind}", at(one, row=0, episode=1), other)


@_check("learning", "rows-apart")
def _(adapter: Adapter) -> None:
    """In an update, outputs don't depend on other environments."""
    one, other = _relearned(adapter, Script([[], [], []]), (1, 0, 2))
    for row in (0, 2):
        require_equal("in an update, with another observation in environment 1", at(one, row=row), other)


@_check("learning", "past-only")
def _(adapter: Adapter) -> None:
    """In an update, outputs don't depend on later observations."""
    one, other = _relearned(adapter, Script([[], []]), (0, 0, 4))
    require_equal("in an update, with another observation at step 4", _before(at(one, row=0), 4), other)


@_check("learning", "uses-memory")
def _(adapter: Adapter) -> None:
    """In an update, an observation influences later outputs of its episode."""
    script = Script([[], []])
    one, other = (learned(adapter, Setup(each))[1] for each in (script, _changed(script, (0, 0, 1))))
    _require_memory(one, other)


# --- targets ----------------------------------------------------------------------------------------------------------


def _targets(adapter: Adapter, script: Script, rollouts: int = 1) -> None:
    """Compare the advantages of the last rollout with generalized advantage estimation in float64, of its values.

    Values of final observations, and of those after the rollout, are those of agents whose episodes go on.
    """
    with agent(adapter, Setup(script)) as made:
        outputs = [made.collect() for _ in range(rollouts)][-1]
    found = advantages(script, outputs)
    values = {place: float(pair[1]) for place, pair in table(script, [outputs]).items()}
    carried = 0.0
    wanted: dict[Moment, float] = {}
    for place in sorted(found, reverse=True):
        after = place._replace(step=place.step + 1)
        ends = after.step == script.length(place.row, place.episode)
        goes_on = not ends and after in values
        following = values[after] if goes_on else _following(adapter, script, after, ends=ends)
        error = script.reward(place) + adapter.gamma * following - values[place]
        carried = error + (adapter.gamma * adapter.lmbda * carried if goes_on else 0.0)
        wanted[place] = carried
    require_equal("advantage", found, wanted)


def _endless(script: Script, episode: int = 0) -> Script:
    """Return a script whose first episode is one of another script, and doesn't end."""
    changed = frozenset(place._replace(episode=0) for place in script.changed if place.episode == episode)
    return replace(script, ends=[[] for _ in script.ends], changed=changed, first=script.first + episode)


def _following(adapter: Adapter, script: Script, after: Moment, *, ends: bool) -> float:
    """Return the value of an observation after a rollout or an episode, 0 after a termination."""
    if ends and script.end(after.row, after.episode) == "terminated":
        return 0.0
    alone = _endless(script, after.episode)
    values = collected(adapter, Setup(alone, steps=after.step + 1))
    return float(values[after._replace(episode=0)][1])


@_check("targets", "advantages")
def _(adapter: Adapter) -> None:
    """Without ends, advantages bootstrap at the end of a rollout from the state that goes on."""
    _targets(adapter, Script([[], []]))


@_check("targets", "advantages-of-terminations")
def _(adapter: Adapter) -> None:
    """Terminations don't bootstrap."""
    _targets(adapter, Script([[terminated(3)], [terminated(5)]]))


@_check("targets", "advantages-of-truncations")
def _(adapter: Adapter) -> None:
    """Truncations bootstrap from the value of the final observation, with the state of the episode."""
    _targets(adapter, Script([[truncated(3), truncated(2)], [truncated(4)]]))


@_check("targets", "advantages-of-last-steps")
def _(adapter: Adapter) -> None:
    """Neither do terminations in the last step of a rollout."""
    _targets(adapter, Script([[terminated(8)], []]))


@_check("targets", "advantages-of-truncated-last-steps")
def _(adapter: Adapter) -> None:
    """Truncations in the last step of a rollout do."""
    _targets(adapter, Script([[truncated(8)], []]))


@_check("targets", "advantages-of-the-next-rollout")
def _(adapter: Adapter) -> None:
    """In a later rollout too."""
    _targets(adapter, Script([[terminated(11)], []]), 2)


@_check("targets", "episodes-apart")
def _(adapter: Adapter) -> None:
    """Advantages of an episode don't depend on the next one."""
    for kind in KINDS:
        found: list[dict[Moment, float]] = []
        for script in (_ended(kind), _changed(_ended(kind), (0, 1, 0), (0, 1, 1))):
            with agent(adapter, Setup(script)) as made:
                found.append(advantages(script, made.collect()))
        one = {place: value for place, value in found[0].items() if place[:2] == (0, 0)}
        require_equal(f"advantage before an end ({kind}), with another next episode", one, found[1])


# --- agents -----------------------------------------------------------------------------------------------------------


_LIVES = Script(
    [
        *([terminated(3), truncated(4)], [truncated(20), terminated(2)], [truncated(8), terminated(6)]),
        *([truncated(5), terminated(3)], [terminated(2), truncated(1)], [terminated(4), truncated(5)]),
    ],
    agents=3,
)
"""Two environments, with agents that are absent during a rollout, at its end or beginning, or end with it."""
_SHORT_LIVES = Script(
    [
        *([terminated(1), truncated(2), terminated(1)], [truncated(2), terminated(2), truncated(3)]),
        *([terminated(2), truncated(1)], [truncated(1), terminated(3)]),
    ],
    agents=2,
)


@_check("agents", "agents-death")
def _(adapter: Adapter) -> None:
    """The death of an agent doesn't change the outputs of others, and neither do its observations until then."""
    for kind in KINDS:
        script = Script([[Episode(3, kind)], [], [], []], agents=2)
        one, other = _differ(adapter, script, (0, 0, 1), (0, 0, 2), (0, 0, 3))
        alive = collected(adapter, Setup(_endless(script)))
        for row in (1, 2, 3):
            _require_equal_shared(f"where agent 0 was {kind}", at(one, row=row), at(alive, row=row))
            require_equal(f"with other observations before agent 0 was {kind}", at(one, row=row), other)


@_check("agents", "agents-return")
def _(adapter: Adapter) -> None:
    """An agent that returns begins with the state of a first episode, however long it waited."""
    for script in (_LIVES, _SHORT_LIVES):
        found, alone = collected(adapter, Setup(script), 3), _alone(adapter, script, 32)
        for row in range(script.num_rows):
            places = at(found, row=row).items()
            returned = {place: value for place, value in places if place.episode > 0 and place in alone}
            require_equal("after a return, compared with a first episode", returned, alone)


@_check("agents", "agents-replay")
def _(adapter: Adapter) -> None:
    """An update computes the log-probabilities and values of collection where agents die, wait and return."""
    for script in (_LIVES, _SHORT_LIVES):
        for rollouts in (1, 2, 3):
            _replayed(adapter, Setup(script), rollouts)


@_check("agents", "agents-count")
def _(adapter: Adapter) -> None:
    """Every step of a present agent is collected and counts once in an epoch, and nothing else does."""
    for script in (_LIVES, _SHORT_LIVES, Script([[terminated(3)], [], [], []], agents=2)):
        with agent(adapter, Setup(script)) as made:
            seen: set[Moment] = set()
            for _ in range(3):
                acted = made.collect()
                seen |= set(script.find(acted.seen))
                _require_once(script, acted, made.learn())
        for row in range(0, script.num_rows, script.agents):
            for places in zip(*(script.timeline(each, 32) for each in script.environment_rows(row)), strict=True):
                present = {place for place in places if place is not None}
                if present & seen and present - seen:
                    raise Failed(f"{named(min(present - seen))} wasn't collected, unlike those of the other agents")


@_check("agents", "agents-advantages")
def _(adapter: Adapter) -> None:
    """Advantages are those of each agent alone: nothing crosses its termination, truncation or wait."""
    for rollouts in (1, 2, 3):
        _targets(adapter, _LIVES, rollouts)
    _targets(adapter, _SHORT_LIVES)


# --- evaluation -------------------------------------------------------------------------------------------------------


_SEEDS, _SCRIPT_SEEDS, _PROMISING = 32, 16, 3
_TIE = 1e-4
"""Difference of a probability from one half below which either action is the likelier one."""
_Scenes = list[tuple[Script, Table]]


def _decisive(adapter: Adapter, script: Script, steps: int) -> tuple[int, _Scenes]:
    """Return a seed whose agent's greedy actions depend on earlier observations, and its outputs for two scripts.

    The second script differs at every other step of an episode, so that the same observations need other actions. Both
    have the ends of the given script, with observations for which it shows.
    """
    scripts = [replace(script, seed=script.seed + index) for index in range(_SCRIPT_SEEDS)]
    balanced: list[tuple[float, int]] = []
    for seed in range(_SEEDS):
        found = collected(adapter, Setup(Script([[]] * 4), steps=16, seed=seed))
        ones = float(np.mean([pair[0] > 0.5 for pair in found.values()]))
        balanced.append((min(ones, 1 - ones), seed))
        if sum(share > 0.1 for share, _ in balanced) == _PROMISING:
            break
    for share, seed in sorted(balanced, reverse=True)[:_PROMISING]:
        for each in scripts if share > 0 else ():
            places = (place for row in range(script.num_rows) for place in script.walk(row, steps))
            other = replace(each, changed=frozenset(place for place in places if place.step % 2 == 0))
            one, two = (_alone(adapter, which, steps, seed) for which in (each, other))
            odd = [(one[place][0] - 0.5, two[place][0] - 0.5) for place in one if place.step % 2]
            if all(abs(a - b) < VISIBLE for a, b in odd):
                raise NotOffered("probabilities don't depend on earlier observations")
            if sum(a * b < 0 and min(abs(a), abs(b)) > _TIE for a, b in odd) > 1:
                return seed, [(each, one), (other, two)]
    raise NotOffered(f"the greedy actions of {_SEEDS} untrained agents don't depend on earlier observations")


def _alone(adapter: Adapter, script: Script, steps: int, seed: int = 0) -> Table:
    """Return the outputs of a script's episodes, each collected as a first one, without what others might leave."""
    places = {place for row in range(script.num_rows) for place in script.walk(row, steps)}
    found: Table = {}
    for episode in sorted({place.episode for place in places}):
        table_of_it = collected(adapter, Setup(_endless(script, episode), steps=steps, seed=seed))
        found |= {place._replace(episode=episode): value for place, value in table_of_it.items()}
    return {place: value for place, value in found.items() if place in places}


def _greedy(script: Script, outputs: Outputs) -> dict[Moment, float]:
    return dict(zip(script.find(outputs.seen), outputs.flat("actions"), strict=True))


def _require_greedy(what: str, script: Script, outputs: Outputs, found: Table) -> None:
    """Require that greedy actions are the likelier ones of a table; those as likely as the others don't count."""
    played = _greedy(script, outputs)
    if not any(place in found for place in played):
        raise Failed(f"{what}: nothing was played")
    for place, action in played.items():
        if place.step == script.length(place.row, place.episode):
            raise Failed(f"{what}: it played {named(place)}, the final observation")
        if place not in found:
            continue  # it played for longer
        likely = found[place][0]
        if abs(likely - 0.5) > 1e-4 and (likely > 0.5) != bool(action):
            raise Failed(f"{what}: {named(place)} has action {action:.0f}, the probability of 1 is {likely:.5f}")


def _evaluation(adapter: Adapter, script: Script, steps: int = 16) -> None:
    with agent(adapter, Setup(Script([[], []]))) as made:
        made.play(script, 1)  # whether this is offered at all
    seed, scenes = _decisive(adapter, script, steps)
    with agent(adapter, Setup(Script([[], []]), seed=seed)) as made:
        for each, acted in scenes:
            _require_greedy("evaluation", each, made.play(each, steps), acted)


@_check("evaluation", "evaluation")
def _(adapter: Adapter) -> None:
    """Evaluation steps with memory: greedy actions are those of collection."""
    _evaluation(adapter, Script([[], []]))


@_check("evaluation", "evaluation-of-episodes")
def _(adapter: Adapter) -> None:
    """Every episode of an evaluation begins without memory."""
    _evaluation(adapter, Script([[terminated(3), truncated(4), terminated(2)], [truncated(7)]]))


@_check("evaluation", "other-number-of-environments")
def _(adapter: Adapter) -> None:
    """Evaluation takes another number of environments than training."""
    _evaluation(adapter, Script([[terminated(5)]]))


@_check("evaluation", "evaluation-twice")
def _(adapter: Adapter) -> None:
    """A second evaluation gives the same."""
    script = Script([[terminated(5)], []])
    seed, ((script, _), _) = _decisive(adapter, script, 16)
    with agent(adapter, Setup(Script([[], []]), seed=seed)) as made:
        one, other = (_greedy(script, made.play(script, 16)) for _ in range(2))
    if one != other:
        raise Failed("a second evaluation of the same episodes took other actions")


@_check("evaluation", "evaluation-between")
def _(adapter: Adapter) -> None:
    """An evaluation between two rollouts doesn't change the second one."""
    script = Script([[terminated(11)], []])
    with agent(adapter, Setup(script)) as made:
        found = [made.collect()]
        made.play(Script([[terminated(3)], []], seed=1), 8)
        found.append(made.collect())
    require_equal("after an evaluation", table(script, found), collected(adapter, Setup(script), 2))


# --- files ------------------------------------------------------------------------------------------------------------


@_check("files", "load")
def _(adapter: Adapter) -> None:
    """A loaded agent acts in new environments as the saved one did, from the initial state: no state is left over."""
    setup = Setup(Script([[terminated(11)], []]))
    with tempfile.TemporaryDirectory() as folder, agent(adapter, setup) as made:
        made.collect()
        made.save(Path(folder, "agent"))
        with agent(adapter, replace(setup, seed=1)) as other:
            other.load(Path(folder, "agent"))
            found = table(setup.script, [other.collect()])
    require_equal("loaded", found, collected(adapter, setup))


@_check("files", "load-after-updates")
def _(adapter: Adapter) -> None:
    """A loaded agent has the parameters of the last update."""
    script = Script([[terminated(8)], [truncated(8)]])
    alone = Script([[], []], first=1)
    with tempfile.TemporaryDirectory() as folder, agent(adapter, Setup(script, learning_rate=1e-2)) as made:
        made.collect()
        made.learn()
        made.save(Path(folder, "agent"))
        wanted = {place._replace(episode=0): value for place, value in table(script, [made.collect()]).items()}
        with agent(adapter, Setup(alone, seed=1)) as other:
            other.load(Path(folder, "agent"))
            found = table(alone, [other.collect()])
    _require_equal_shared("loaded after an update", found, wanted)


@_check("files", "load-into-a-used-agent")
def _(adapter: Adapter) -> None:
    """Loading into an agent that has collected leaves no state of other parameters where episodes begin."""
    script = Script([[terminated(8)], [truncated(8)]])
    with tempfile.TemporaryDirectory() as folder, agent(adapter, Setup(script)) as made:
        made.save(Path(folder, "agent"))
        with agent(adapter, Setup(script, seed=1)) as other:
            other.collect()
            other.load(Path(folder, "agent"))
            found = table(script, [other.collect()])
    first = max(place.episode for place in found)  # 0 if loading has replaced the environments
    moved = {place._replace(episode=0): value for place, value in found.items()}
    _require_equal_shared("loaded into a used agent", moved, collected(adapter, Setup(replace(script, first=first))))


def _exported(adapter: Adapter, script: Script) -> None:
    with tempfile.TemporaryDirectory() as folder, agent(adapter, Setup(Script([[], []]))) as made:
        made.export(Path(folder, "policy"))  # whether this is offered at all
    seed, scenes = _decisive(adapter, script, 16)
    with tempfile.TemporaryDirectory() as folder, agent(adapter, Setup(Script([[], []]), seed=seed)) as made:
        play = made.export(Path(folder, "policy"))
        for each, acted in scenes:
            _require_greedy("exported", each, play(each, 16), acted)


@_check("files", "export")
def _(adapter: Adapter) -> None:
    """An exported policy steps with memory."""
    _exported(adapter, Script([[]]))


@_check("files", "export-of-episodes")
def _(adapter: Adapter) -> None:
    """An exported policy begins every episode without memory."""
    _exported(adapter, Script([[terminated(3), truncated(4), terminated(2)]]))
