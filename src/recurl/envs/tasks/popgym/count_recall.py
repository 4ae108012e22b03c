"""CountRecall: count how often a value has been dealt."""

from __future__ import annotations

from typing import Any

from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import CARDS, KINDS, Kind, entry_at, one_hot, one_hot_space, score, shuffle


class CountRecall(Dynamics):
    """Recall how often the queried value has been dealt so far, including the newest card.

    POPGym's CountRecall: cards come from one deck, queries from another one. Observation: the newest card and the
    queried value, one-hot each, `[2 * values]`. Action: the count, from 0 to that in the whole deck. Reward:
    `1 / (cards - 1)` for a right answer, the negative of that for a wrong one. Terminated when the last card has been
    dealt.

    The package's argument `error_clamp` has no effect, and is omitted.

    State: `values` and `queries`, int8 `[cards, rows]`; `counts`, int64 `[values, rows]`.

    Args:
        num_decks: decks of 52 cards; at least 1.
        deck_type: property to count: `colors`, `suits` or `ranks`.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_decks: int = 1, deck_type: Kind = "colors") -> None:
        self.num_decks = check_count("num_decks", num_decks, minimum=1)
        self.deck_type: Kind = check_kind(deck_type, tuple(KINDS))
        self.num_values, self.num_cards = KINDS[deck_type], CARDS * num_decks
        super().__init__(
            observation_space=one_hot_space(self.num_values, self.num_values),
            actions=self.num_cards // self.num_values + 1,
            step_limit=self.num_cards - 1,
        )

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Shuffle both decks."""
        values, queries = (shuffle(xp, draw, self.num_decks, self.deck_type) for _ in range(2))
        return {"values": values, "queries": queries, "counts": xp.astype(self._bits(xp, values[0]), xp.int64)}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Score the answer, and count the next card."""
        query = xp.astype(entry_at(xp, state["queries"], steps), xp.int64)
        right = actions == xp.pick(state["counts"], query)
        counts = state["counts"] + self._bits(xp, entry_at(xp, state["values"], steps + 1))
        reward = score(xp, right, 1 / (self.num_cards - 1))
        return {**state, "counts": counts}, reward, steps >= self.step_limit - 1

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the newest card and the query."""
        seen = [entry_at(xp, state[name], steps) for name in ("values", "queries")]
        return one_hot(xp, seen, (self.num_values, self.num_values))

    def _bits(self, xp: Namespace, value: Any) -> Any:
        return xp.arange(self.num_values)[:, None] == value


def check_kind(kind: Kind, kinds: tuple[str, ...]) -> Kind:
    """Return ``kind``, or raise ArgumentError unless it is one of `kinds`."""
    if kind not in kinds:
        raise ArgumentError(f"deck_type must be one of {', '.join(kinds)}; got {kind!r}.{nearest(str(kind), kinds)}")
    return kind
