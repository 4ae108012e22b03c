"""SHM (stable Hadamard memory) cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.recurrence.cells.blocks import Block, affine, check_sizes
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time

_LEAST_SUM = 1e-5  # added to the sums that divide keys and queries, as in the authors' code
_MOST_ROWS = 256  # bfloat16 counts no further


@dataclass(frozen=True, repr=False)
class SHMCell(Block, name="shm"):
    """SHM cell: M = C M + U, elementwise, with C = 1 + tanh(theta v_c^T) and U = eta v k^T; M q is read.

    Source: Le et al., "Stable Hadamard memory" (2024), with the network of the authors' code for POPGym,
    thaihungle/SHM, where the features are relu(W_o (M q + W_s u + b_s) + b_o), except for its positional encoding. Of
    its two linear maps after the read-out, one is kept.

    u is relu(W_in x + b_in), layer-normed; q, k, v and v_c are linear in it, and eta is the sigmoid of a linear map; q
    and k are positive and sum to 1, relu(W u) / (sum + 1e-5). Where no number of W_k u is positive, which is likely
    for small K only, nothing is written. Initial values are those of the authors' code for other tasks: W_in and b_in
    as in ``torch.nn.Linear``, theta as Xavier's, other matrices orthogonal and other biases 0.

    C is between 0 and 2, so M may grow; it is not bounded, whereas the authors' code for other tasks clips it to
    [-100, 100]. At first C is close to 1: M is a sum over the whole episode, of which the last input is a small part,
    so tasks that need recent inputs are learned slowly.

    theta is one of L trainable rows. The paper draws it at random at every step, in training and acting alike, so that
    factors C of different steps are uncorrelated; but a replayed sequence, with other draws, would not compute what
    acting did. Here the rows take turns, and the number of the last one is a state, 0 before an episode. As rows are
    drawn alike at first, any other fixed order of them is the same cell. Unlike draws, turns repeat after L steps, and
    are the same in every episode. (In the released code for POPGym, all draws are the first row: ``rows=1``.)

    Args:
        memory_size: K; M is K x K. The authors use 24 and 72.
        rows: L, at most 256.
    """

    memory_size: int = 32
    rows: int = 128
    state_names: ClassVar[tuple[str, ...]] = ("memory", "turn")
    decays: ClassVar[bool] = False
    child_name: ClassVar[str] = "shm"

    def __post_init__(self) -> None:
        check_sizes(memory_size=(self.memory_size, 1), rows=(self.rows, 1))
        if self.rows > _MOST_ROWS:
            raise ArgumentError(f"rows must be at most {_MOST_ROWS}, which every dtype can count; got {self.rows}.")

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        return (self.memory_size, self.memory_size), (1,)

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        size, hidden, bias = self.memory_size, sizes.hidden_size, sizes.bias
        shapes = affine("in", hidden, sizes.input_size, bias)
        shapes |= {"scale_norm": (hidden,)} | ({"bias_norm": (hidden,)} if bias else {})
        shapes |= affine("memory", 4 * size + 1, hidden, bias=False) | {"theta": (self.rows, size)}
        return shapes | affine("shortcut", size, hidden, bias) | affine("out", hidden, size, bias)

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize theta as Xavier does, W_in and b_in as ``torch.nn.Linear``, and other matrices orthogonally."""
        if name == "theta":
            nn.init.xavier_uniform_(parameter)
        elif name in ("weight_in", "bias_in"):
            bound = 1 / math.sqrt(sizes.input_size)
            nn.init.uniform_(parameter, -bound, bound)
        elif name == "weight_memory":
            for matrix in parameter.data.split([self.memory_size] * 4 + [1]):
                _make_orthogonal(matrix)
        elif name.startswith("weight"):
            _make_orthogonal(parameter.data)
        else:
            super().initialize(name, parameter, sizes)

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        weight_in: Tensor,
        scale_norm: Tensor,
        weight_memory: Tensor,
        theta: Tensor,
        weight_shortcut: Tensor,
        weight_out: Tensor,
        bias_in: Tensor | None = None,
        bias_norm: Tensor | None = None,
        bias_shortcut: Tensor | None = None,
        bias_out: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x = F.linear(x, weight_in, bias_in).relu()
        x = F.layer_norm(x, x.shape[-1:], scale_norm, bias_norm)
        key, query, value, change, strength = F.linear(x, weight_memory).split([self.memory_size] * 4 + [1], -1)
        turn = time.count(states[1], self.rows)
        number = torch.arange(self.rows, device=turn.device, dtype=turn.dtype)
        row = (1 - (turn - number).abs()).relu() @ theta  # the row whose number it is
        calibration = 2 * _outer(2 * row, change).sigmoid()  # 1 + tanh, exact to relative precision also near 0
        memory = time.recur(calibration, _outer(strength.sigmoid() * value, _shares(key)), states[0])
        read = (memory * _shares(query).unsqueeze(-2)).sum(-1) + F.linear(x, weight_shortcut, bias_shortcut)
        return F.linear(read, weight_out, bias_out).relu(), (memory, turn)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def _shares(x: Tensor) -> Tensor:
    """Return positive numbers that sum to 1, or to 0 where none of ``x`` is positive."""
    x = x.relu()
    return x / (x.sum(-1, keepdim=True) + _LEAST_SUM)


def _make_orthogonal(matrix: Tensor) -> None:
    """Fill ``matrix``; torch draws orthogonal matrices in float32 and float64 only."""
    matrix.copy_(nn.init.orthogonal_(torch.empty_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))))


SHM = SHMCell()
