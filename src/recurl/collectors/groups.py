"""Groups of an environment, which are stepped in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import RESET
from recurl.envs import EnvBase
from recurl.sequences.entries import Entries, Step

__all__ = ["Groups", "plain"]


class Groups:
    """The groups of an environment; see :attr:`EnvBase.groups`.

    Args:
        env: the environment.

    Attributes:
        envs: the groups, at least one.
        rows: index of each group's rows in the environment.

    Example:
        >>> from recurl.envs import GroupedEnv, GymEnv
        >>> env = GroupedEnv([GymEnv("CartPole-v1", num_envs=2) for _ in range(2)])
        >>> Groups(env).rows
        [slice(0, 2, None), slice(2, 4, None)]
        >>> Groups(GymEnv("CartPole-v1")).rows
        [Ellipsis]
    """

    def __init__(self, env: EnvBase) -> None:
        self.envs = env.groups
        self.rows: list[Any] = [...]
        if len(self.envs) > 1:
            ends = itertools.accumulate((group.batch_size.numel() for group in self.envs), initial=0)
            self.rows = [slice(start, end) for start, end in itertools.pairwise(ends)]

    def reset(self) -> list[Step]:
        """Reset all rows and return the roots."""
        return [group.reset() for group in self.envs]

    def reset_rows(self, roots: Sequence[Step], mask: Tensor) -> list[Step]:
        """Reset the rows selected by ``mask``, bool ``[*B]``, and return the roots."""
        parts = zip(self.envs, roots, self.rows, strict=True)
        return [group.reset(plain(root).set(RESET, mask[rows].unsqueeze(-1))) for group, root, rows in parts]

    def joined(self, roots: Sequence[Step]) -> TensorDictBase:
        """Return a copy of the groups' roots as one root of all rows."""
        parts: list[Any] = [plain(root) for root in roots]
        return parts[0].clone() if len(parts) == 1 else cast(TensorDictBase, torch.cat(parts))

    def split(self, root: TensorDictBase) -> list[Step]:
        """Return the roots of the groups, given one root of all rows."""
        return [root[rows].clone() for rows in self.rows]


def plain(root: Step) -> TensorDictBase:
    """Return a root as a TensorDict."""
    return root.to_tensordict() if isinstance(root, Entries) else cast(TensorDictBase, root)
