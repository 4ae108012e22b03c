"""Trunk of every network of a run: encoder and memory."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from recurl import specs
from recurl.keys import IS_INIT, NestedKey, next_key
from recurl.modules import MLP, CellModule, ObservationNorm
from recurl.recurrence import load_cell
from recurl.trainers.config import NO_CELL, RunConfig


class FlatObservation(nn.Module):
    """Turns the observations of one step into one vector.

    Images (uint8) are divided by 255, everything is flattened and concatenated in the order of the keys.

    Args:
        spec: observations of the environments, ``[*B]``.

    Shapes:
        one tensor ``[..., *shape]`` per key to ``[..., features]``, float32.

    Example:
        >>> flat = FlatObservation(specs.Composite({"b": specs.Unbounded(2), "a": specs.Unbounded(1, 2)}))
        >>> flat.keys, flat(torch.ones(1, 1, 2), torch.zeros(1, 2))
        (['a', 'b'], tensor([[1., 1., 0., 0.]]))
    """

    def __init__(self, spec: specs.Composite) -> None:
        super().__init__()
        leaves = dict(spec.items(include_nested=True, leaves_only=True))
        self.keys: list[NestedKey] = sorted(leaves, key=str)
        shapes = [leaves[key].shape[len(spec.shape) :] for key in self.keys]
        self._dims = [len(shape) for shape in shapes]
        self.features = sum(shape.numel() for shape in shapes)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the vector."""
        flat = [_flatten(value, dims) for value, dims in zip(observations, self._dims, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def _flatten(value: Tensor, dims: int) -> Tensor:
    value = value / 255 if value.dtype == torch.uint8 else value.to(torch.float32)
    if dims == 0:
        return value.unsqueeze(-1)
    return value.flatten(-dims) if dims > 1 else value


class Encoder(nn.Module):
    """Flat observation, normalisation, one hidden layer: ``[*B, *shape]`` per key to ``[*B, hidden]``."""

    def __init__(self, flat: FlatObservation, norm: ObservationNorm | None, hidden_size: int) -> None:
        super().__init__()
        self.flat = flat
        self.norm = norm
        self.layer = nn.Linear(flat.features, hidden_size)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the embedding."""
        flat = self.flat(*observations)
        return torch.tanh(self.layer(flat if self.norm is None else self.norm(flat)))


def make_trunk(
    config: RunConfig, flat: FlatObservation, norm: ObservationNorm | None, prefix: str
) -> list[TensorDictModuleBase]:
    """Return encoder and memory of a network, untrained.

    Args:
        config: cell, sizes, backend.
        flat: turns observations into one vector.
        norm: statistics of these vectors, or None.
        prefix: what the keys that they write begin with.
    """
    encoder = Encoder(flat, norm, config.hidden_size)
    initialised(encoder.layer, math.sqrt(2))
    embedding, memory = f"{prefix}embedding", f"{prefix}memory"
    encode = TensorDictModule(encoder, in_keys=cast(Any, flat.keys), out_keys=[embedding])
    return [encode, _memory(config, embedding, memory, prefix)]


def _memory(config: RunConfig, embedding: str, memory: str, prefix: str) -> TensorDictModuleBase:
    size = config.hidden_size
    if config.cell == NO_CELL:
        # Two layers through 4 x hidden hold as many weights as an LSTM's two 4 x hidden matrices.
        net = MLP(size, size, num_cells=[4 * size], activate_last_layer=True)
        for layer in net:
            if isinstance(layer, nn.Linear):
                initialised(layer, math.sqrt(2))
        return TensorDictModule(net, in_keys=[embedding], out_keys=[memory])
    cell = load_cell(config.cell)
    states = [f"{prefix}state_{name}" for name in cell.state_names]
    module = CellModule(
        cell,
        input_size=size,
        hidden_size=size,
        num_layers=config.num_layers,
        in_keys=[embedding, *states, IS_INIT],
        out_keys=[memory, *map(next_key, states)],
        recurrent_backend=config.backend,
    )
    module.net.reset_parameters(for_training=True)
    return module


def initialised(layer: nn.Linear, gain: float) -> nn.Linear:
    """Return ``layer`` with orthogonal weights of this gain and no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
