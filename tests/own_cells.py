"""User-defined cells: written in torch, outside recurl."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from examples.mingru import MinGRU
from torch import Tensor

from recurl.recurrence import (
    Cell,
    GatedDeltaNetCell,
    GTrXLCell,
    Mamba2Cell,
    MinGRUCell,
    MLSTMCell,
    RGLRUCell,
    S5Cell,
    SHMCell,
    Sizes,
    SLSTMCell,
)


class FastWeights(Cell):
    """Simplified Schlag et al. 2021: a matrix of associations [K, H] and a step count [], read with a query.

    Two states of different shapes, features that are neither of them, and a custom size.
    """

    state_names = ("memory", "count")

    def __init__(self, keys: int = 3) -> None:
        self.keys = keys

    def parameters(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        query = (self.keys, sizes.input_size)
        return {"key": query, "query": query, "value": (sizes.hidden_size, sizes.input_size)}

    def state_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        return (self.keys, sizes.hidden_size), ()

    def step(self, x: Tensor, states: tuple[Tensor, ...], key: Tensor, query: Tensor, value: Tensor):
        memory, count = states
        written = F.linear(x, key).tanh().unsqueeze(-1) * F.linear(x, value).unsqueeze(-2)
        memory, count = 0.9 * memory + written, 0.5 * count + 1
        read = (F.linear(x, query).tanh().unsqueeze(-1) * memory).sum(-2)
        return read / count.abs().add(1).unsqueeze(-1), (memory, count)


class FourGates(Cell):
    """Four gates and two states with the shapes of an LSTM, but not an LSTM: the cell state is never squashed."""

    state_names = ("h", "c")

    def parameters(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rows = 4 * sizes.hidden_size
        return {"weight_ih": (rows, sizes.input_size), "weight_hh": (rows, sizes.hidden_size)}

    def step(self, x: Tensor, states: tuple[Tensor, ...], weight_ih: Tensor, weight_hh: Tensor):
        i, f, g, o = (F.linear(x, weight_ih) + F.linear(states[0], weight_hh)).chunk(4, -1)
        c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * c
        return h, (h, c)


__all__ = ["OWN", "VARIANTS", "FastWeights", "FourGates", "MinGRU"]

OWN = {"own_mingru": MinGRU(), "fastweights": FastWeights()}

VARIANTS: dict[str, Cell] = {
    "mingru with a window": MinGRUCell(state_size=4, conv_width=3),
    "rglru with a window": RGLRUCell(state_size=6, heads=2, conv_width=3, feed_forward=0),
    "s5 without norm": S5Cell(state_size=6, norm=False),
    "gtrxl with a short window": GTrXLCell(window=3, heads=1, feed_forward=1),
    "small mlstm": MLSTMCell(heads=2, conv_width=0),
    "small mamba2": Mamba2Cell(heads=2, state_size=3, conv_width=2),
    "small gated_deltanet": GatedDeltaNetCell(heads=2, key_size=3, value_size=2, conv_width=0, feed_forward=0),
    "slstm with a window": SLSTMCell(conv_width=3, feed_forward=0, exponential_forget=True),
    "shm with few rows": SHMCell(memory_size=3, rows=3),
}
"""Built-in cells with non-default options."""
