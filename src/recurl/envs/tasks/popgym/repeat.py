"""RepeatFirst and RepeatPrevious: name the suit of an earlier card."""

from __future__ import annotations

from typing import Any

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import CARDS, KINDS, entry_at, one_hot, one_hot_space, score, shuffle

_SUITS = KINDS["suits"]


class _Repeat(Dynamics):
    """Base class: a deck is dealt card by card, and the suit of an earlier card must be named."""

    def __init__(self, num_decks: int) -> None:
        self.num_decks = check_count("num_decks", num_decks, minimum=1)
        self.num_cards = CARDS * num_decks
        super().__init__(observation_space=one_hot_space(_SUITS), actions=_SUITS, step_limit=self.num_cards - 1)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Shuffle the deck."""
        return {"suits": shuffle(xp, draw, self.num_decks, "suits")}

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the suit of the newest card."""
        return one_hot(xp, (entry_at(xp, state["suits"], steps),), (_SUITS,))

    def _terminated(self, steps: Any) -> Any:
        return steps >= self.step_limit - 1


class RepeatFirst(_Repeat):
    """Name the suit of the first card at every step, while a deck is dealt.

    POPGym's RepeatFirst. Observation: the newest card's suit, one-hot `[4]`. Action: a suit. Reward: `1 / (cards - 1)`
    for a right answer, the negative of that for a wrong one. Terminated when the last card has been dealt.

    The package documents an indicator that marks the first card, but has none. Neither does this class.

    State: `suits`, int8 `[cards, rows]`, in the order of dealing.

    Args:
        num_decks: decks of 52 cards; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_decks: int = 1) -> None:
        super().__init__(num_decks)

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Score the answer."""
        right = actions == state["suits"][0]
        return state, score(xp, right, 1 / (self.num_cards - 1)), self._terminated(steps)


class RepeatPrevious(_Repeat):
    """Name the suit of the card dealt k cards ago, while a deck is dealt.

    POPGym's RepeatPrevious. Observation: the newest card's suit, one-hot `[4]`. Action: a suit. Reward: 0 while fewer
    than `k` cards are dealt, then `1 / (cards - k)` for a right answer and the negative of that for a wrong one.
    Terminated when the last card has been dealt.

    As in the package, `k` includes the newest card: with `k = 4`, the answer was dealt three steps before it. For
    `recurl/RepeatPrevious-v0`, it would be four steps.

    State: `suits`, int8 `[cards, rows]`, in the order of dealing.

    Args:
        num_decks: decks of 52 cards; at least 1.
        k: age of the card to name, 1 for the newest; less than the number of cards.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_decks: int = 1, k: int = 4) -> None:
        super().__init__(num_decks)
        self.k = check_count("k", k, minimum=1)
        if k >= self.num_cards:
            raise ArgumentError(f"k must be less than the {self.num_cards} cards; got {k}")

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Score the answer."""
        place = steps + 1 - self.k
        right = actions == entry_at(xp, state["suits"], place)
        reward = xp.where(place < 0, 0.0, score(xp, right, 1 / (self.num_cards - self.k)))
        return state, reward, self._terminated(steps)
