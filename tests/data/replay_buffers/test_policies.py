"""Burn-in, zero starts and refreshed states for policies of various structures."""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.collectors import Collector
from recurl.data import BurnIn, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, ZeroStart, refresh_states
from recurl.envs import GymEnv
from recurl.modules import Categorical, GRUModule, ProbabilisticActor, QValueActor


def probabilistic(gru, head):
    net = TensorDictSequential(gru, head)
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical)


def nested(gru, head):
    return TensorDictSequential(gru, ProbabilisticActor(head, ["logits"], distribution_class=Categorical))


def twice(gru, head):
    return TensorDictSequential(TensorDictSequential(probabilistic(gru, head)))


def by_values(gru, head):
    values = TensorDictModule(head.module, ["features"], ["action_value"])
    return QValueActor(TensorDictSequential(gru, values), spec=GymEnv("CartPole-v1").action_spec)


@pytest.mark.parametrize("build", [probabilistic, nested, twice, by_values])
def test_every_build_of_a_policy(build):
    gru = GRUModule(4, 8, in_key="observation", out_key="features", recurrent_backend="loop")
    policy = build(gru, TensorDictModule(torch.nn.Linear(8, 2), ["features"], ["logits"]))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4), batch_size=16)
    with Collector(GymEnv("CartPole-v1"), policy, frames_per_batch=60) as collector:
        buffer.extend(collector.collect())
    sample = buffer.sample()
    plain = TensorDictSequential(gru)
    rest, expected = BurnIn(policy, 2)(sample), BurnIn(plain, 2)(sample)
    assert len(rest) == 8
    assert torch.equal(rest["recurrent_state"], expected["recurrent_state"])
    assert not ZeroStart(policy)(sample)["recurrent_state"][::4].any()
    before = buffer[:]["next", "recurrent_state"]
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.mul_(1.5)
    refresh_states(buffer, sample, policy)
    assert not torch.equal(buffer[:]["next", "recurrent_state"], before)
