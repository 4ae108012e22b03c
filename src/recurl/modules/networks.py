"""Feed-forward networks, which act on the last dimension with any number of leading dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from recurl.core.errors import ArgumentError

__all__ = ["MLP", "LearnedScale"]

_DEFAULT_CELLS = 32


class MLP(nn.Sequential):
    """Multi-layer perceptron: linear layers with activations in between.

    Args:
        in_features: size of the last input dimension; ``None`` infers it at the first call.
        out_features: size of the last output dimension.
        depth: number of hidden layers. Implied by ``num_cells`` if that is a sequence.
        num_cells: width of the hidden layers: one number for all ``depth`` layers (32 if only ``depth`` is given), or
            one per layer. Without both, the network is a single linear layer.
        activation_class: class or function that creates the activation after each hidden layer.
        activate_last_layer: also apply the activation to the output.
        device: device of the parameters.

    Shapes:
        input ``[..., in_features]``, output ``[..., out_features]``. Several inputs are first concatenated along the
        last dimension.

    Raises:
        ArgumentError: ``out_features`` is missing, ``num_cells`` is one number without a ``depth``, or its length
            is not ``depth``.

    Example:
        >>> net = MLP(in_features=3, out_features=2, num_cells=[64, 64])
        >>> net(torch.zeros(5, 4, 3)).shape
        torch.Size([5, 4, 2])
    """

    def __init__(
        self,
        in_features: int | None = None,
        out_features: int | None = None,
        depth: int | None = None,
        num_cells: int | Sequence[int] | None = None,
        activation_class: Callable[[], nn.Module] = nn.Tanh,
        *,
        activate_last_layer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if out_features is None:
            raise ArgumentError("MLP needs out_features, the size of its output, got None.")
        layers: list[nn.Module] = []
        inputs = in_features
        for outputs in (*_hidden_sizes(depth, num_cells), out_features):
            layers.append(
                nn.LazyLinear(outputs, device=device) if inputs is None else nn.Linear(inputs, outputs, device=device)
            )
            layers.append(activation_class())
            inputs = outputs
        super().__init__(*(layers if activate_last_layer else layers[:-1]))
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[reportIncompatibleMethodOverride] # several inputs
        """Apply the network to ``inputs``, concatenated along the last dimension."""
        return super().forward(inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1))


class LearnedScale(nn.Module):
    """Scale of a normal distribution that is a parameter, the same for all inputs.

    As the last module of an actor's network, whose outputs are the means: ``nn.Sequential(MLP(...), LearnedScale(n))``.

    Args:
        size: n, the number of components.
        initial: initial value.
        log: learn the logarithm instead of the scale itself.
        bounds: smallest and largest scale, positive; values beyond count as these.

    Shapes:
        ``[..., n]``, the means, to a tuple of them and of the scales ``[..., n]``.

    Raises:
        ArgumentError: the bounds or the initial value are not positive.

    Example:
        >>> loc, scale = LearnedScale(2, 0.5)(torch.zeros(3, 2))
        >>> loc.shape, scale[0].tolist()
        (torch.Size([3, 2]), [0.5, 0.5])
    """

    def __init__(
        self, size: int, initial: float = 1.0, *, log: bool = False, bounds: tuple[float, float] = (1e-6, 1e6)
    ) -> None:
        super().__init__()
        if not 0.0 < bounds[0] <= bounds[1] or initial <= 0.0:
            raise ArgumentError(f"A scale and its bounds must be positive, got {initial} and {bounds}.")
        self.log, self.bounds = log, bounds
        self.value = nn.Parameter(torch.full((size,), math.log(initial) if log else initial))

    def forward(self, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and scales."""
        low, high = map(math.log, self.bounds) if self.log else self.bounds
        scale = self.value.clamp(low, high)
        return loc, (scale.exp() if self.log else scale).expand_as(loc)


def _hidden_sizes(depth: int | None, num_cells: int | Sequence[int] | None) -> list[int]:
    if num_cells is None:
        return [_DEFAULT_CELLS] * (depth or 0)
    if isinstance(num_cells, int):
        if depth is None:
            raise ArgumentError(
                f"num_cells={num_cells} needs a depth: pass depth=1, or num_cells=[{num_cells}], for one hidden layer."
            )
        return [num_cells] * depth
    if depth is not None and depth != len(num_cells):
        raise ArgumentError(f"num_cells={list(num_cells)} has {len(num_cells)} layers, but depth={depth}: pass one.")
    return list(num_cells)
