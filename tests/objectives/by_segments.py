"""Reference networks over the segments of a batch, each from its stored state, in plain torch.nn."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl.core.keys import TRAJ_IDS
from tests.objectives.simulate import HIDDEN, OBS

LAYERS = 2


def with_cuts(batch: TensorDict, chance: float = 0.15) -> TensorDict:
    """Return the batch with sequences that begin anywhere, from the states stored there."""
    cuts = torch.rand(*batch.shape, 1) < chance
    return batch.clone().set("is_init", batch["is_init"] | cuts)


def segments(batch: TensorDict) -> list[tuple[int, int, int]]:
    """Return row, first token and end (exclusive) of every segment of ``[B, T]``, by definition."""
    rows, steps = batch.batch_size
    ids, is_init, done = batch[TRAJ_IDS].numpy(), batch["is_init"].numpy(), batch["next", "done"].numpy()
    found = []
    for row in range(rows):
        starts = [
            t
            for t in range(steps)
            if t == 0 or is_init[row, t, 0] or done[row, t - 1, 0] or ids[row, t] != ids[row, t - 1]
        ]
        found += [(row, a, b) for a, b in zip(starts, [*starts[1:], steps], strict=True)]
    return found


def features(module: Any, cell: str, batch: TensorDict, segment: tuple[int, int, int]) -> Tensor:
    """Return features of the observations of a segment and of the one after it: ``[n + 1, HIDDEN]``."""
    row, a, b = segment
    observations = torch.cat([batch["observation"][row, a:b], batch["next", "observation"][row, b - 1 : b]])
    if cell == "none":
        return module(TensorDict({"observation": observations}, [b - a + 1]))["features"]
    net = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](OBS, HIDDEN, LAYERS, batch_first=True, dtype=torch.float64)
    weights = dict(getattr(module, cell).named_parameters())
    states = tuple(batch[key][row, a].unsqueeze(1) for key in module.in_keys[1:-1])
    start = states if cell == "lstm" else states[0]
    return torch.func.functional_call(net, weights, (observations.unsqueeze(0), start))[0].squeeze(0)


def outputs(module: Any, head: Any, cell: str, batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the outputs of ``head`` for every token and for its true next observation: ``[B, T, n]`` each."""
    here, after = {}, {}
    for row, a, b in segments(batch):
        out = head(features(module, cell, batch, (row, a, b)))
        for t in range(a, b):
            here[row, t], after[row, t] = out[t - a], out[t - a + 1]
    rows, steps = batch.batch_size
    stacked = (torch.stack([torch.stack([x[i, t] for t in range(steps)]) for i in range(rows)]) for x in (here, after))
    first, second = stacked
    return first, second
