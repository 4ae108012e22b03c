"""The two cells as data: gate count, state names, pointwise step.

No other file knows what a gate means, but for the hand-written derivatives of the fast backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

States: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Cell:
    """What distinguishes one recurrent cell from another. H is the hidden size, G the number of gates.

    Attributes:
        name: ``"lstm"`` or ``"gru"``.
        state_names: names of the states; the first is the output h.
        num_gates: G; weights have G * H rows, in the gate order of ``torch.nn``.
        step: ``(x_gates, h_gates, states) -> new states``, pointwise over ``[..., G * H]`` and ``[..., H]``;
            x_gates = W_ih x + b_ih, h_gates = W_hh h + b_hh.
        fused: ``(x, states, (w_ih, w_hh, b_ih, b_hh)) -> new states``: a whole step by ATen's own kernel.
    """

    name: str
    state_names: tuple[str, ...]
    num_gates: int
    step: Callable[[Tensor, Tensor, States], States]
    fused: Callable[[Tensor, States, Sequence[Tensor | None]], States]


def _lstm_step(x_gates: Tensor, h_gates: Tensor, states: States) -> States:
    """Hochreiter and Schmidhuber 1997 with forget gate, as torch.nn.LSTM: gates i, f, g, o."""
    i, f, g, o = (x_gates + h_gates).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(x_gates: Tensor, h_gates: Tensor, states: States) -> States:
    """Cho et al. 2014 in the variant of torch.nn.GRU (reset gate after the product): gates r, z, n."""
    x_r, x_z, x_n = x_gates.chunk(3, -1)
    h_r, h_z, h_n = h_gates.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (n + (x_z + h_z).sigmoid() * (states[0] - n),)


def _lstm_fused(x: Tensor, states: States, weights: Sequence[Tensor | None]) -> States:
    return torch.lstm_cell(x, states, *weights)  # pyright: ignore[reportArgumentType] - None is a missing bias


def _gru_fused(x: Tensor, states: States, weights: Sequence[Tensor | None]) -> States:
    return (torch.gru_cell(x, states[0], *weights),)  # pyright: ignore[reportArgumentType] - None is a missing bias


LSTM = Cell("lstm", ("h", "c"), 4, _lstm_step, _lstm_fused)
GRU = Cell("gru", ("h",), 3, _gru_step, _gru_fused)
CELLS = {cell.name: cell for cell in (LSTM, GRU)}


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer in one direction, in the layout of ``torch.nn``.

    Attributes:
        w_ih: ``[G * H, I]``.
        w_hh: ``[G * H, P or H]``.
        b_ih: ``[G * H]`` or None.
        b_hh: ``[G * H]`` or None.
        w_hr: ``[P, H]``, the LSTM's projection of its output to P units, or None.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None

    def state_sizes(self, cell: Cell) -> tuple[int, ...]:
        """Width of each state: the output is P wide with projection, all else H."""
        hidden = self.w_hh.shape[0] // cell.num_gates
        return (self.w_hh.shape[1], *(hidden for _ in cell.state_names[1:]))

    def step(self, cell: Cell, x: Tensor, states: States) -> States:
        """One step from the definition: x ``[..., I]``, states ``[..., P or H]`` and ``[..., H]`` -> states after."""
        x_gates = F.linear(x, self.w_ih, self.b_ih)
        h_gates = F.linear(states[0], self.w_hh, self.b_hh)
        h, *rest = cell.step(x_gates, h_gates, states)
        return (h if self.w_hr is None else F.linear(h, self.w_hr), *rest)

    def fast_step(self, cell: Cell, x: Tensor, states: States) -> States:
        """The same through ATen's cell kernels, which know no projection: x ``[B, I]``."""
        if self.w_hr is not None:
            return self.step(cell, x, states)
        return cell.fused(x, states, (self.w_ih, self.w_hh, self.b_ih, self.b_hh))
