"""Trunk of every network of a run: encoder and memory."""

from __future__ import annotations

import math
from typing import Any, cast

from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from recurl.keys import IS_INIT, next_key
from recurl.modules import MLP, CellModule
from recurl.recurrence import load_cell
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.networks.encoders import make_encoder
from recurl.trainers.networks.layers import initialised
from recurl.trainers.networks.observations import Observations


def make_trunk(config: RunConfig, observations: Observations, prefix: str) -> list[TensorDictModuleBase]:
    """Return encoder and memory of a network, untrained.

    Args:
        config: encoder, cell, sizes, backend.
        observations: what the encoder reads.
        prefix: what the keys that they write begin with.
    """
    encoder = make_encoder(config, observations)
    embedding, memory = f"{prefix}embedding", f"{prefix}memory"
    encode = TensorDictModule(encoder, in_keys=cast(Any, observations.keys), out_keys=[embedding])
    return [encode, _memory(config, encoder.features, embedding, memory, prefix)]


def _memory(config: RunConfig, inputs: int, embedding: str, memory: str, prefix: str) -> TensorDictModuleBase:
    size = config.hidden_size
    if config.cell == NO_CELL:
        # Two layers through 4 x hidden hold as many weights as an LSTM's two 4 x hidden matrices.
        net = MLP(inputs, size, num_cells=[4 * size], activate_last_layer=True)
        for layer in net:
            if isinstance(layer, nn.Linear):
                initialised(layer, math.sqrt(2))
        return TensorDictModule(net, in_keys=[embedding], out_keys=[memory])
    cell = load_cell(config.cell)
    states = [f"{prefix}state_{name}" for name in cell.state_names]
    module = CellModule(
        cell,
        input_size=inputs,
        hidden_size=size,
        num_layers=config.num_layers,
        in_keys=[embedding, *states, IS_INIT],
        out_keys=[memory, *map(next_key, states)],
        recurrent_backend=config.backend,
    )
    module.net.reset_parameters(for_training=True)
    return module
