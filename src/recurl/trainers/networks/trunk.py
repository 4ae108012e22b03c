"""Trunk of the networks of a run: encoder and memory."""

from __future__ import annotations

import math
from typing import Any, cast

from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from recurl.core.keys import IS_INIT, next_key
from recurl.modules import MLP, CellModule
from recurl.recurrence import load_cell
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.networks.encoders import make_encoder
from recurl.trainers.networks.layers import initialized
from recurl.trainers.networks.observations import Observations


def make_trunk(config: RunConfig, observations: Observations, prefix: str) -> list[TensorDictModuleBase]:
    """Build the untrained encoder and memory of a network.

    Args:
        config: encoder, cell, sizes, backend.
        observations: inputs of the encoder.
        prefix: prefix of the output keys.
    """
    encoder = make_encoder(config, observations)
    embedding, memory = f"{prefix}embedding", f"{prefix}memory"
    encode = TensorDictModule(encoder, in_keys=cast(Any, observations.keys), out_keys=[embedding])
    return [encode, _memory(config, encoder.features, embedding, memory, prefix)]


def _memory(config: RunConfig, inputs: int, embedding: str, memory: str, prefix: str) -> TensorDictModuleBase:
    size = config.hidden_size
    if config.cell == NO_CELL:
        # Two layers of width 4 x hidden have as many weights as the two 4 x hidden matrices of an LSTM.
        net = MLP(inputs, size, num_cells=[4 * size], activate_last_layer=True)
        for layer in net:
            if isinstance(layer, nn.Linear):
                initialized(layer, math.sqrt(2))
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
