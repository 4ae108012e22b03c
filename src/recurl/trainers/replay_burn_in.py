"""Burn-in that leaves the beginnings of episodes to be learnt from."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.continuity import boundaries_in
from recurl.data import BurnIn
from recurl.keys import IS_INIT

_COLLECTED = ("collector", "stored", IS_INIT)


class MidEpisodeBurnIn(BurnIn):
    """A :class:`~recurl.data.BurnIn` of the slices that begin within an episode.

    A slice that begins with its episode starts from zero, which is exact: there is nothing to bring up to date. And it
    is the only one through which a gradient can reach the episode's first steps: burnt in as well, what is shown there
    and nowhere else (the cue of a T-maze) would never be learnt.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> marked = (torch.arange(10) % 5 == 0).unsqueeze(-1)  # two slices, the first begins an episode
        >>> sample = TensorDict({"observation": torch.randn(10, 4), "is_init": marked}, [10])
        >>> sample["collector", "stored", "is_init"] = (torch.arange(10) == 0).unsqueeze(-1)
        >>> MidEpisodeBurnIn(gru, 3)(sample)["is_init"].squeeze(-1).tolist()
        [True, False, False, False, False, True, False]
    """

    def prefix(self, sample: TensorDictBase) -> Tensor:
        """Return which steps of a sample ``[N]`` are burnt in, bool ``[N]``."""
        starts = boundaries_in(sample).start_index
        begins_episode = torch.as_tensor(sample.get(_COLLECTED)).reshape(-1)[starts]
        return super().prefix(sample) & ~begins_episode
