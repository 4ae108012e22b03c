"""Handling of NaN and infinity in a run: stop or skip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recurl.core.errors import NonFiniteError
from recurl.core.keys import DONE, MASK, NEXT, REWARD, TRAJ_STEPS
from recurl.distributed import gather, world_size
from recurl.modules import recurrent_modules
from recurl.trainers.optim.finite import BatchCheck
from recurl.trainers.optim.reading import Reading
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.motion import MOTION, motion_of

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor

    from recurl.trainers.algorithms.learner import Learner

MOST_IN_A_ROW = 10


class FaultWatch:
    """Check of batches and updates that stops the run at a fault, or counts skipped ones.

    Args:
        learner: the learner.
        stats: episode statistics, which exclude episodes with a non-finite number.
        skip: skip batches and gradient steps that aren't finite; otherwise the first one ends the run.

    Attributes:
        skipped: number of batches and updates of which something was skipped.
    """

    def __init__(self, learner: Learner[Any, Any], stats: EpisodeStats, *, skip: bool) -> None:
        states = [key for module in recurrent_modules(learner.agent.policy) for key in module.state_keys]
        self._check = BatchCheck(learner.agent.all_observations.keys, states)
        self._learner = learner
        self._stats = stats
        self._skip = skip
        self._in_a_row = 0
        self._ending: Tensor | None = None  # rows that are reset only after the next batch
        self.skipped = 0

    def begin(self, batch: TensorDictBase) -> Callable[[], bool]:
        """Launch the check of a batch and the count of its episodes, without waiting for its device.

        Args:
            batch: the newest batch, ``[B, T]``. Its entries may be replaced, but not changed in place, until the
                returned function is called.

        Returns:
            A function that waits for the result and resets environments with non-finite numbers. It returns whether the
            batches of all ranks may be learned from, and raises NonFiniteError if the run must end.
        """
        check = self._check.begin(batch, self._learner.env_steps)
        tensors = {"finite": check.finite, "reward": batch[NEXT, REWARD][..., 0], "done": batch[NEXT, DONE][..., 0]}
        numbers, present = batch.get(TRAJ_STEPS, None), batch.get(MASK, None)
        if numbers is not None:  # absent from batches of old checkpoints
            tensors["begins"] = numbers[..., 0] == 0
            if self._learner.real_actions:
                tensors["motion"] = motion_of(batch)
        if present is not None:
            tensors["present"] = present
        reading = Reading([*tensors.values()])

        def wait() -> bool:
            read = dict(zip(tensors, reading(), strict=True))
            motion = read.pop("motion", None)
            self._stats.motion = (math.nan,) * len(MOTION) if motion is None else tuple(motion.tolist())
            return self._admits(None if read.pop("finite") else check.culprit(), **read)

        return wait

    def _admits(
        self,
        found: tuple[Tensor, str] | None,
        reward: Tensor,
        done: Tensor,
        begins: Tensor | None = None,
        present: Tensor | None = None,
    ) -> bool:
        ending, self._ending = self._ending, None
        without = ending
        culprits = gather(None if found is None else found[1])
        culprit = next((_on_rank(text, number) for number, text in enumerate(culprits) if text is not None), None)
        if culprit is not None:
            self._count(culprit)
        if found is not None:
            rows = self._learner.whole_envs(found[0])
            again = rows if ending is None else rows & ~ending
            without = rows if ending is None else rows | ending
            if self._learner.restart(again):
                self._ending = again
        self._stats.update(reward, done, begins=begins, without=without, present=present)
        return culprit is None

    def learned(self, update: int) -> None:
        """Check an update.

        Args:
            update: number of the update.

        Raises:
            NonFiniteError: if a metric isn't finite and the run must end.
        """
        if self._learner.fault is None:
            self._in_a_row = 0
        else:
            self._count(f"In update {update} {self._learner.fault}")

    def _count(self, culprit: str) -> None:
        if not self._skip:
            raise NonFiniteError(f"{culprit}, but only finite numbers can be learned from.")
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise NonFiniteError(f"{culprit}, the {MOST_IN_A_ROW}th batch or update in a row that isn't finite.")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, "ending": self._ending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by :meth:`state_dict`."""
        self.skipped, self._in_a_row, self._ending = (state[name] for name in ("skipped", "in_a_row", "ending"))


def _on_rank(text: str, number: int) -> str:
    return text if world_size() == 1 else f"{text} on rank {number}"
