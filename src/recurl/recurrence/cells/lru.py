"""LRU (linear recurrent unit) cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.recurrence.cells.blocks import check_flags, check_numbers, check_optional_sizes
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.state_space import StateSpace, input_to_state, polar
from recurl.recurrence.cells.time import ONE_STEP, Time


@dataclass(frozen=True, repr=False)
class LRUCell(StateSpace, name="lru"):
    """LRU cell: h = a h + gamma (B u), y = Re(C h) + D u.

    Source: Orvieto et al., "Resurrecting recurrent neural networks" (2023).

    a = exp(-exp(nu) + i exp(theta)) is constant in time; gamma is learned and starts at sqrt(1 - abs(a)^2). Block and
    initial values follow the paper's appendix: layer norm, recurrence, GELU, gated linear unit, skip connection.

    Args:
        state_size: N, number of complex numbers in the state; None for H.
        norm: whether the block has a layer norm.
        min_radius: smallest initial modulus of a; moduli are sampled uniformly by area.
        max_radius: largest initial modulus of a.
        max_phase: largest initial phase of a.
    """

    state_size: int | None = None
    norm: bool = True
    min_radius: float = 0.0
    max_radius: float = 1.0
    max_phase: float = 2 * math.pi
    child_name: ClassVar[str] = "lru"

    def __post_init__(self) -> None:
        check_flags(norm=self.norm)
        check_numbers(min_radius=self.min_radius, max_radius=self.max_radius, max_phase=self.max_phase)
        check_optional_sizes(state_size=(self.state_size, 1))
        if not 0 <= self.min_radius < self.max_radius <= 1:
            raise ArgumentError(
                f"min_radius and max_radius must be in order and in [0, 1], got {self.min_radius} and "
                f"{self.max_radius}: a state whose modulus grows is unbounded."
            )
        if not 0 < self.max_phase < math.inf:
            raise ArgumentError(f"max_phase must be positive and finite, got {self.max_phase}.")

    def modes(self, sizes: Sizes) -> int:
        """Return the number of complex numbers in the state."""
        return self.state_size or sizes.hidden_size

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        modes = self.modes(sizes)
        shapes: dict[str, Shape] = {"nu_log": (modes,), "theta_log": (modes,), "gamma_log": (modes,)}
        return shapes | dict(super().parameters(sizes))

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize one parameter."""
        if name == "nu_log":
            with torch.no_grad():
                parameter.uniform_(self.min_radius**2, self.max_radius**2).clamp_(1e-12, 1 - 1e-6)
                parameter.log_().mul_(-0.5).log_()
        elif name == "theta_log":
            with torch.no_grad():
                parameter.uniform_(0, self.max_phase).clamp_(min=1e-6).log_()
        elif name == "weight_b":
            nn.init.normal_(parameter, std=1 / math.sqrt(2 * sizes.hidden_size))
        elif name == "weight_c":
            nn.init.normal_(parameter, std=1 / math.sqrt(self.modes(sizes)))
        elif name == "gamma_log":
            nn.init.zeros_(parameter)  # set by initialize_layer, since it depends on nu
        else:
            super().initialize(name, parameter, sizes)

    def initialize_layer(self, parameters: Mapping[str, Tensor], sizes: Sizes, *, for_training: bool = False) -> None:
        """Initialize all parameters of one layer."""
        super().initialize_layer(parameters, sizes, for_training=for_training)
        with torch.no_grad():
            square = torch.expm1(-2 * parameters["nu_log"].exp()).neg()
            parameters["gamma_log"].copy_(0.5 * square.log())

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        nu_log: Tensor,
        theta_log: Tensor,
        gamma_log: Tensor,
        weight_b: Tensor,
        weight_c: Tensor,
        skip: Tensor,
        weight_glu: Tensor,
        bias_glu: Tensor | None = None,
        scale_norm: Tensor | None = None,
        bias_norm: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x, u = self.block_input(x, weight_in, bias_in, scale_norm, bias_norm)
        a = polar(-nu_log.exp(), theta_log.exp())
        h = time.recur_complex(a, gamma_log.exp().unsqueeze(-1) * input_to_state(u, weight_b), states[0])
        y = F.linear(h.flatten(1), weight_c) + skip * u
        return self.block_output(x, y, weight_glu, bias_glu), (h,)


LRU = LRUCell()
