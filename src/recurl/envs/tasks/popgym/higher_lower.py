"""HigherLower: guess whether the next card is higher or lower."""

from __future__ import annotations

from typing import Any

from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import CARDS, KINDS, entry_at, one_hot, one_hot_space, score, shuffle

_RANKS = KINDS["ranks"]


class HigherLower(Dynamics):
    """Guess whether the next card of a deck has a higher or a lower rank than this one.

    POPGym's HigherLower. Observation: the newest card's rank, one-hot `[13]`. Actions: 0 for higher, 1 for lower.
    Reward: `1 / cards` for a right guess, `-1 / cards` for a wrong one, 0 if the ranks are equal. Terminated when the
    last card has been dealt.

    State: `ranks`, int8 `[cards, rows]`, in the order of dealing.

    Args:
        num_decks: decks of 52 cards; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_decks: int = 1) -> None:
        self.num_decks = check_count("num_decks", num_decks, minimum=1)
        self.num_cards = CARDS * num_decks
        super().__init__(observation_space=one_hot_space(_RANKS), actions=2, step_limit=self.num_cards - 1)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Shuffle the deck."""
        return {"ranks": shuffle(xp, draw, self.num_decks, "ranks")}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Score the guess."""
        this, following = (entry_at(xp, state["ranks"], steps + later) for later in (0, 1))
        guessed = score(xp, (following > this) == (actions == 0), 1 / self.num_cards)
        reward = xp.where(following == this, 0.0, guessed)
        return state, reward, steps >= self.step_limit - 1

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the rank."""
        return one_hot(xp, (entry_at(xp, state["ranks"], steps),), (_RANKS,))
