"""Weights in memory shared with workers."""

import torch
from torch import nn

from recurl.collectors.weights import SharedWeights


def test_every_write_is_seen_once() -> None:
    sender, receiver = nn.Linear(2, 3), nn.Linear(2, 3)
    shared = SharedWeights.of(sender)
    shared.refresh(receiver)
    assert torch.equal(receiver.weight, sender.weight)
    for _ in range(2):
        with torch.no_grad():
            sender.weight.add_(1)
        shared.refresh(receiver)
        assert not torch.equal(receiver.weight, sender.weight)
        shared.write(sender)
        shared.refresh(receiver)
        assert torch.equal(receiver.weight, sender.weight)
        assert torch.equal(receiver.bias, sender.bias)
    with torch.no_grad():
        receiver.weight.zero_()
    shared.refresh(receiver)  # nothing was written
    assert not receiver.weight.any()
    shared.memory.close()
