"""FFM (fast and forgetful memory) cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.recurrence.cells.blocks import Block, affine, check_sizes
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.state_space import polar
from recurl.recurrence.cells.time import ONE_STEP, Time

_LONGEST = 1024  # steps of the slowest initial decay and oscillation
_FORGOTTEN = 0.01  # fraction of an input that the slowest decay leaves after that many steps
_FASTEST = math.log(torch.finfo(torch.float64).max) / _LONGEST - 0.02  # fastest initial decay, as in the authors' code


@dataclass(frozen=True, repr=False)
class FFMCell(Block, name="ffm"):
    """FFM cell: fast and forgetful memory.

    Source: Morad et al., "Reinforcement learning with fast and forgetful memory" (2023).

    The state is a trace of the gated input for each of m decays and c oscillations, h[m, c] =
    exp(-abs(alpha_m) + i omega_c) h[m, c] + (W x)_m sigmoid(W_g x)_m, accumulated step by step and never through
    growing powers. The features are LN(mix [Re h, Im h]) o + (W_s x) (1 - o) with o = sigmoid(W_o x), where the layer
    norm has no weights. Initial values are those of the authors' code.

    Args:
        memory_size: m, number of decays.
        context_size: c, number of oscillations; the state has m * c complex numbers.
    """

    memory_size: int = 32
    context_size: int = 4
    child_name: ClassVar[str] = "ffm"

    def __post_init__(self) -> None:
        check_sizes(memory_size=(self.memory_size, 1), context_size=(self.context_size, 1))

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        return ((self.memory_size, self.context_size, 2),)

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        memory, context, hidden = self.memory_size, self.context_size, sizes.hidden_size
        shapes: dict[str, Shape] = {"alpha": (memory,), "omega": (context,)}
        shapes |= affine("in", 2 * memory + 2 * hidden, sizes.input_size, sizes.bias)
        return shapes | affine("mix", hidden, 2 * memory * context, sizes.bias)

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize linear maps as ``torch.nn.Linear`` does, and space decays and periods evenly."""
        if name == "alpha":
            slowest = -math.log(_FORGOTTEN) / _LONGEST
            parameter.data.copy_(torch.linspace(_FASTEST, slowest, self.memory_size))
        elif name == "omega":
            parameter.data.copy_(2 * math.pi / torch.linspace(1, _LONGEST, self.context_size))
        else:
            memory, context = self.memory_size, self.context_size
            bound = 1 / math.sqrt(2 * memory * context if name.endswith("mix") else sizes.input_size)
            nn.init.uniform_(parameter, -bound, bound)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        alpha: Tensor,
        omega: Tensor,
        weight_in: Tensor,
        weight_mix: Tensor,
        bias_in: Tensor | None = None,
        bias_mix: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        hidden, memory = weight_mix.shape[0], self.memory_size
        candidate, skip, gates = F.linear(x, weight_in, bias_in).split([memory, hidden, memory + hidden], -1)
        input_gate, output_gate = gates.sigmoid().split([memory, hidden], -1)
        decay, phase = torch.broadcast_tensors(-alpha.abs().unsqueeze(-1), omega)
        trace = (candidate * input_gate)[..., None, None]
        h = time.recur_complex(polar(decay, phase), F.pad(trace, (0, 1)).expand_as(states[0]), states[0])
        mixed = F.layer_norm(F.linear(h.flatten(1), weight_mix, bias_mix), (hidden,))
        return mixed * output_gate + skip * (1 - output_gate), (h,)


FFM = FFMCell()
