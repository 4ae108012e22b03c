"""Concentration: find pairs among face-down cards."""

from __future__ import annotations

import math
from typing import Any

from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import CARDS, KINDS, Kind, one_hot_space, shuffle
from recurl.envs.tasks.popgym.count_recall import check_kind


class Concentration(Dynamics):
    """Turn cards over, one per step: two that match stay face up, others are turned back.

    POPGym's Concentration. Observation: for each place of the table, the value of its card, or an extra value for a
    face-down card, one-hot each, `[cards * (values + 1)]`. Action: a place. Reward: `2 / cards` for a pair; otherwise
    `-1 / step_limit` for each card of a failed attempt, which ends with the second card, or with a card that is already
    face up; 0 for the first card of an attempt. Terminated when all cards are face up. The step limit is
    `ceil(2 n - n / (2 n - 1))` for n cards.

    As in the package, a card that ends a failed attempt is shown at this step only.

    State: `values`, int8 `[cards, rows]`; `up` and `shown`, bool `[cards, rows]`, the cards permanently face up and
    those visible at this step; `first`, int64 `[rows]`, the place turned over first, or -1.

    Args:
        num_decks: decks of 52 cards; at least 1.
        deck_type: property that must match: `ranks` or `colors`.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_decks: int = 1, deck_type: Kind = "ranks") -> None:
        self.num_decks = check_count("num_decks", num_decks, minimum=1)
        self.deck_type: Kind = check_kind(deck_type, ("colors", "ranks"))
        self.num_values, self.num_cards = KINDS[deck_type], CARDS * num_decks
        n = self.num_cards
        super().__init__(
            observation_space=one_hot_space(*[self.num_values + 1] * n),
            actions=n,
            step_limit=math.ceil(2 * n - n / (2 * n - 1)),
        )
        self._found, self._failed = 1 / (n // 2), -1 / self.step_limit

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Lay shuffled cards on the table."""
        values = shuffle(xp, draw, self.num_decks, self.deck_type)
        none = xp.zeros(tuple(values.shape), dtype=xp.bool)
        first = xp.full((values.shape[1],), -1, dtype=xp.int64)
        return {"values": values, "up": none, "shown": xp.astype(none, xp.bool), "first": first}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Turn a card over."""
        values, up, first = state["values"], state["up"], state["first"]
        second = first >= 0
        places = xp.arange(self.num_cards)[:, None]
        turned = (places == actions) | (places == first)
        lay_up = xp.pick(up, actions)
        same = xp.pick(values, actions) == xp.pick(values, xp.clip(first, 0, self.num_cards - 1))
        pair = second & ~lay_up & same & (first != actions)
        ended = second | lay_up
        cards = xp.where(second, 2 * self._failed, self._failed)
        reward = xp.where(pair, self._found, xp.where(ended, cards, 0.0))
        now_up = up | (turned & pair)
        first = xp.where(ended, -1, actions)
        after = {"values": values, "up": now_up, "shown": up | turned, "first": first}
        return after, reward, xp.all(now_up, axis=0)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the table."""
        seen = xp.where(state["shown"], state["values"], self.num_values)
        bits = seen.T[:, :, None] == xp.arange(self.num_values + 1)
        return xp.astype(xp.reshape(bits, (-1, *(self.observation_space.shape or ()))), xp.int8)
