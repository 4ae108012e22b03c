"""Autoencode: watch a deck, then name its suits in reverse order."""

from __future__ import annotations

from typing import Any

from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import CARDS, KINDS, entry_at, one_hot, one_hot_space, score, shuffle

_SUITS = KINDS["suits"]


class Autoencode(Dynamics):
    """Watch a deck card by card, then name the suits from the last card back to the first.

    POPGym's Autoencode. Observation: one-hot of the phase (0 play, 1 watch), then of the suit shown, `[6]`; while
    playing, the suit is 0, except at the first step, which shows the last card. Action: a suit. Reward: 0 while
    watching, then `1 / cards` for a right answer and `-1 / cards` for a wrong one. Terminated after the last answer.

    State: `suits`, int8 `[cards, rows]`, in the order of dealing.

    Args:
        num_decks: decks of 52 cards; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_decks: int = 1) -> None:
        self.num_decks = check_count("num_decks", num_decks, minimum=1)
        self.num_cards = CARDS * num_decks
        space = one_hot_space(2, _SUITS)
        super().__init__(observation_space=space, actions=_SUITS, step_limit=2 * self.num_cards - 1)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Shuffle the deck."""
        return {"suits": shuffle(xp, draw, self.num_decks, "suits")}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Show the next card, or score the answer."""
        last = self.num_cards - 1
        right = actions == entry_at(xp, state["suits"], 2 * last - steps)
        reward = xp.where(steps < last, 0.0, score(xp, right, 1 / self.num_cards))
        return state, reward, steps >= 2 * last

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the phase and the card."""
        shown = xp.where(steps < self.num_cards, entry_at(xp, state["suits"], steps), 0)
        return one_hot(xp, (steps < self.num_cards - 1, shown), (2, _SUITS))
