"""Burn-in and priorities of slices of one length equal those of ragged slices."""

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.data import LazyTensorStorage, MidEpisodeBurnIn, SliceSampler, TensorDictReplayBuffer, slice_priorities
from recurl.data.replay_buffers.device import ByStep, DeviceSliceBuffer, RowBurnIn, row_priorities
from recurl.execution.lowering import leaves
from recurl.execution.readback import refuse_read_back
from recurl.modules import GRUModule, set_recurrent_mode
from tests.data.replay_buffers.test_device import batches


def samples(length):
    """Return a sample from the host and the same one from the device, of short and long trajectories."""
    torch.manual_seed(1)
    ends = [step in (1, 4, 11, 23) for step in range(60)]
    (batch,) = batches(2, ends, [30])
    batch["observation"] = torch.randn(2, 30, 3)
    batch["recurrent_state"] = torch.randn(2, 30, 1, 5)
    host = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60, ndim=2),
        sampler=SliceSampler(slice_len=length, strict_length=False, by_step=True),
        batch_size=20 * length,
    )
    device = DeviceSliceBuffer(60, 20, length, ByStep())
    host.extend(batch)
    device.extend(batch)
    torch.manual_seed(0)
    ragged = host.sample()
    torch.manual_seed(0)
    return ragged, device.sample()


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_burn_in_equals_that_of_ragged_slices(steps):
    gru = GRUModule(3, 5, in_key="observation", out_key="features", recurrent_backend="loop")
    ragged, sample = samples(6)
    before = {path: value.clone() for path, value in leaves(sample)}
    expected = MidEpisodeBurnIn(gru, steps)(ragged)
    rest = RowBurnIn(gru, steps)(sample)
    assert all(torch.equal(value, before[path]) for path, value in leaves(sample))
    mask = rest.get(("collector", "mask"))
    assert mask.sum() == expected.numel() < ragged.numel()
    assert torch.equal(rest["step"][mask], expected["step"])
    assert torch.equal(rest["is_init"][mask], expected["is_init"])
    starts = expected["is_init"].squeeze(-1)
    states = rest["recurrent_state"][mask]
    torch.testing.assert_close(states[starts], expected["recurrent_state"][starts])
    assert not states.requires_grad
    with set_recurrent_mode(True):
        features = gru(rest.to_tensordict())["features"][mask]
        torch.testing.assert_close(features, gru(expected)["features"])
    error = torch.rand(20, 6, 1)
    torch.testing.assert_close(
        row_priorities(rest, error).unsqueeze(-1).expand(20, 6)[sample["collector", "mask"]],
        slice_priorities(ragged, error[mask], expected),
    )


def test_burn_in_reads_nothing_back():
    gru = GRUModule(3, 5, in_key="observation", out_key="features", recurrent_backend="fastest")
    _, sample = samples(6)
    with refuse_read_back():
        RowBurnIn(gru, 2)(sample)


def test_values_out_of_range():
    gru = GRUModule(3, 5, in_key="observation", out_key="features")
    with pytest.raises(ArgumentError, match="burn-in steps must be positive, got 0"):
        RowBurnIn(gru, 0)
    with pytest.raises(ArgumentError, match=r"eta must be in \[0, 1\], got 2"):
        row_priorities(samples(3)[1], torch.zeros(20, 3), eta=2.0)
