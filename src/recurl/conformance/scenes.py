"""What an agent returns for each place of a script."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from recurl.conformance.adapter import Adapter, Agent, NotOffered, Outputs, Play, Setup
from recurl.conformance.script import Floats, Moment, Script

TOLERANCE = 1e-5
"""Largest difference of equal probabilities, values and advantages (relative to 1 or their size) in float32."""
VISIBLE = 1e-4
"""Smallest difference that counts as a difference."""
Table: TypeAlias = dict[Moment, Floats]
"""What was returned for each place: the probability of action 1 and the value, ``[2]``."""


class Failed(AssertionError):
    """An agent failed a check; the message says what was found."""


@contextmanager
def agent(adapter: Adapter, setup: Setup) -> Generator[Agent]:
    """Create an agent and close it afterwards.

    Raises:
        NotOffered: environments have several agents, which the adapter doesn't offer.
        TypeError: the agent lacks a method.
    """
    why: str = getattr(adapter, "no_agents", "its adapter has no environments of several agents")
    if setup.script.agents > 1 and why:
        raise NotOffered(why)
    made = adapter.make(setup)
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise TypeError(
            f"{type(made).__name__} must have the methods {', '.join(_METHODS)}; it lacks {', '.join(missing)}. Those "
            "without counterpart in the library raise NotOffered."
        )
    with closing(made):
        yield _Checked(made)


_METHODS = ("collect", "learn", "play", "save", "load", "export", "close")


class _Checked:
    """An agent, whose methods must return what the adapter's protocol says."""

    def __init__(self, made: Agent) -> None:
        self._made = made
        self.save, self.load, self.close = made.save, made.load, made.close

    def collect(self) -> Outputs:
        return _outputs("collect", self._made.collect())

    def learn(self) -> list[Outputs]:
        found = cast(object, self._made.learn())
        if not isinstance(found, Sequence) or not found:
            raise TypeError(f"learn must return a list with the Outputs of each minibatch, got {found!r}.")
        return [_outputs("learn", each) for each in cast("Sequence[object]", found)]

    def play(self, script: Script, steps: int) -> Outputs:
        return _outputs("play", self._made.play(script, steps))

    def export(self, path: Path) -> Play:
        play = self._made.export(path)
        return lambda script, steps: _outputs("the exported policy", play(script, steps))


def _outputs(method: str, value: object) -> Outputs:
    if not isinstance(value, Outputs):
        raise TypeError(f"{method} must return Outputs, got {type(value).__name__}.")
    return value


def table(script: Script, outputs: Iterable[Outputs]) -> Table:
    """Return what was returned for each place.

    Raises:
        Failed: a place occurs twice with different outputs.
    """
    found: Table = {}
    for part in outputs:
        places = script.find(part.seen)
        for place, row in zip(places, _pairs(part), strict=True):
            known = found.setdefault(place, row)
            if not np.allclose(known, row, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                raise Failed(f"{named(place)} has two outputs: {shown(known)} and {shown(row)}")
    return found


def _pairs(outputs: Outputs) -> Floats:
    if outputs.log_probs is None or outputs.values is None:
        raise NotOffered("its log-probabilities or values aren't accessible")
    taken = outputs.flat("actions")
    likely = np.exp(outputs.flat("log_probs"))
    return np.stack([np.where(taken == 1, likely, 1 - likely), outputs.flat("values")], -1)


def collected(adapter: Adapter, setup: Setup, rollouts: int = 1) -> Table:
    """Return what a new agent returns while it collects."""
    with agent(adapter, setup) as made:
        return table(setup.script, [made.collect() for _ in range(rollouts)])


def learned(adapter: Adapter, setup: Setup, rollouts: int = 1) -> tuple[Table, Table]:
    """Return what a new agent returns while it collects a rollout after others, and while it learns from it."""
    with agent(adapter, setup) as made:
        for _ in range(rollouts - 1):
            made.collect()
            made.learn()
        acted, replayed = made.collect(), made.learn()
    require_same_samples(setup.script, acted, replayed)
    return table(setup.script, [acted]), table(setup.script, replayed)


def require_same_samples(script: Script, acted: Outputs, learned: Iterable[Outputs]) -> None:
    """Require that an update sees each step with the action and advantage of its collection.

    Raises:
        Failed: it doesn't.
    """
    places = script.find(acted.seen)
    for part in learned:
        found = script.find(part.seen)
        for name in ("actions", "advantages"):
            if getattr(acted, name) is None or getattr(part, name) is None:
                continue
            wanted = dict(zip(places, acted.flat(name), strict=True))
            own = {place: value for place, value in zip(found, part.flat(name), strict=True) if place in wanted}
            if own:
                require_equal(f"{name} of a minibatch and of collection", own, wanted)


def advantages(script: Script, outputs: Outputs) -> dict[Moment, float]:
    """Return the advantages of a rollout by place."""
    if outputs.advantages is None:
        raise NotOffered("its advantages aren't accessible")
    return dict(zip(script.find(outputs.seen), outputs.flat("advantages"), strict=True))


def require_equal(what: str, one: Mapping[Moment, object], other: Mapping[Moment, object]) -> None:
    """Require equal outputs at the places of ``one``, all of which ``other`` has.

    Raises:
        Failed: they differ, one isn't finite, or there are none.
    """
    if not one:
        raise Failed(f"{what}: nothing was returned")
    gone = [place for place in one if place not in other]
    if gone:
        raise Failed(f"{what}: nothing was returned for {named(gone[0])}, and {len(gone) - 1} other places")
    for place, value in one.items():
        a, b = np.asarray(value, np.float64), np.asarray(other[place], np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise Failed(f"{what}: {named(place)} is {shown(a)} and {shown(b)}")
        if np.abs(a - b).max() > TOLERANCE * max(1.0, float(np.abs(b).max())):
            raise Failed(f"{what}: {named(place)} is {shown(a)} instead of {shown(b)}")


def require_different(what: str, one: Table, other: Table, places: Iterable[Moment]) -> None:
    """Require that outputs differ at some of the places.

    Raises:
        Failed: they don't.
    """
    if not any(np.abs(one[place] - other[place]).max() > VISIBLE for place in places):
        raise Failed(what)


def at(found: Table, *, row: int | None = None, episode: int | None = None) -> Table:
    """Select the places of an environment and an episode."""
    return {
        place: value for place, value in found.items() if row in (None, place.row) and episode in (None, place.episode)
    }


def named(place: Moment) -> str:
    """Name a place for messages."""
    return f"row {place.row}, episode {place.episode}, step {place.step}"


def shown(values: Floats) -> str:
    """Write outputs for messages."""
    if values.size == 2:
        return f"(probability {values[0]:.5f}, value {values[1]:.5f})"
    return f"{float(values):.5f}"
