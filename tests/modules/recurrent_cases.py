"""Recurrent modules under test, and batches for them."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from recurl.modules import GRUModule, LSTMModule, RecurrentModule

CELLS = {"lstm": LSTMModule, "gru": GRUModule}
INPUTS, HIDDEN = 3, 5


def make(cell: str, **options: object) -> RecurrentModule:
    options = {"input_size": INPUTS, "hidden_size": HIDDEN, "in_key": "observation", "out_key": "features", **options}
    return CELLS[cell](**options)


def random_batch(module: RecurrentModule, shape: tuple[int, ...], *, zero: bool = False, seed: int = 0) -> TensorDict:
    """Return random values, states and resets; with ``zero``, states stored at resets are zero, as from a primer."""
    torch.manual_seed(seed)
    net = module.net
    is_init = torch.rand(shape) < 0.3
    batch = TensorDict({"observation": torch.randn(*shape, INPUTS, dtype=net.dtype), "is_init": is_init}, shape)
    for key, size in zip(module.state_keys, net.state_sizes, strict=True):
        state = torch.randn(*shape, net.num_layers * net.num_directions, size, dtype=net.dtype)
        batch.set(key, torch.where(is_init[..., None, None], 0, state) if zero else state)
    return batch
