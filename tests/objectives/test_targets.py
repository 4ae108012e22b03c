import pytest
import torch
from torch import nn

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.modules import QValueActor
from recurl.objectives import DQNLoss, HardUpdate, SoftUpdate


def make_loss(**options):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    loss = DQNLoss(QValueActor(net, action_space="categorical"), **options)
    with torch.no_grad():
        for tensor in (*loss.value_network.parameters(), *loss.value_network.buffers()):
            tensor.copy_(torch.randn(tensor.shape))
    return loss


def tensors(network):
    return [tensor.clone() for tensor in (*network.parameters(), *network.buffers())]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("options", [{"tau": 0.25}, {"eps": 0.75}])
def test_soft_update(options):
    loss = make_loss()
    online, before = tensors(loss.value_network), tensors(loss.target_value_network)
    update = SoftUpdate(loss, **options)
    update.step()
    parameters = len(list(loss.value_network.parameters()))
    expected = [0.75 * b + 0.25 * a for a, b in zip(online, before, strict=True)][:parameters] + online[parameters:]
    for found, wanted in zip(tensors(loss.target_value_network), expected, strict=True):
        torch.testing.assert_close(found, wanted.to(found.dtype))
    assert same(tensors(loss.value_network), online)
    update.init_()
    assert same(tensors(loss.target_value_network), online)


def test_hard_update_copies_every_few_steps():
    loss = make_loss()
    before = tensors(loss.target_value_network)
    update = HardUpdate(loss, value_network_update_interval=3)
    for _ in range(2):
        update.step()
        assert same(tensors(loss.target_value_network), before)
    resumed = HardUpdate(loss, value_network_update_interval=3)
    resumed.load_state_dict(update.state_dict())
    resumed.step()
    assert same(tensors(loss.target_value_network), tensors(loss.value_network))
    assert not any(p.requires_grad for p in loss.target_value_network.parameters())
    assert all(p.requires_grad for p in loss.value_network.parameters())


def test_invalid_arguments():
    loss = make_loss()
    with pytest.raises(ArgumentError, match="no target network to update"):
        SoftUpdate(make_loss(delay_value=False), tau=0.1)
    for options in ({}, {"eps": 0.9, "tau": 0.1}):
        with pytest.raises(ArgumentTypeError, match="exactly one of eps and tau"):
            SoftUpdate(loss, **options)
    for options in ({"eps": 1.0}, {"tau": 1.5}, {"tau": 0.0}):
        with pytest.raises(ArgumentError, match=r"must be in \(0, 1\]"):
            SoftUpdate(loss, **options)
    with pytest.raises(ArgumentError, match="interval must be positive, got 0"):
        HardUpdate(loss, value_network_update_interval=0)


def test_a_network_of_other_parameters_is_refused():
    loss = make_loss()
    update = HardUpdate(loss, value_network_update_interval=1)
    loss.value_network = QValueActor(nn.Linear(2, 3), action_space="categorical")
    with pytest.raises(ArgumentError, match=r"must have parameters of the same shapes.*create a new target"):
        update.step()


def test_counting_copies_nothing():
    loss = torch.nn.Module()
    loss.net, loss.target_net = (torch.nn.Linear(1, 1) for _ in range(2))
    update = HardUpdate(loss, value_network_update_interval=2)
    before = loss.target_net.weight.clone()
    assert [update.count() for _ in range(4)] == [False, True, False, True]
    assert torch.equal(loss.target_net.weight, before)
