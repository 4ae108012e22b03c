"""A policy captured once and replayed at every step, with a fake capture that runs everything again."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector, captured
from recurl.core.errors import UnsupportedError, UsageError
from recurl.envs import ExplorationType, GroupedEnv, GymEnv, StepCounter
from recurl.modules import Categorical, LSTMModule, ProbabilisticActor
from tests.collectors.test_captured import Plain, assert_same, batches, replace_module, replace_parameter

pytestmark = pytest.mark.usefixtures("recorded")

ROWS, STEPS = 4, 12


def make(*, groups=1, lowered=True, **options) -> Collector:
    rows = ROWS // groups
    env = GroupedEnv([GymEnv("CartPole-v1", num_envs=rows, device="cpu") for _ in range(groups)])
    env = env.append_transform(StepCounter(max_steps=9))
    torch.manual_seed(0)
    memory = LSTMModule(4, 8, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(8, 2), ["features"], ["logits"])
    actor = ProbabilisticActor(head, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    policy = TensorDictSequential(memory, actor)
    env.set_seed(3)
    torch.manual_seed(1)
    return Collector(env, policy if lowered else Plain(policy), frames_per_batch=ROWS * STEPS, **options)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lowered", [True, False])
def test_batches_are_those_of_single_launches(groups, lowered, recorded):
    expected = batches(make(groups=groups, lowered=lowered), 4)
    collector = make(groups=groups, lowered=lowered, cuda_graph=True)
    found = batches(collector, 4)
    kept = [batch.clone() for batch in found]
    assert_same(found, expected)
    assert len(recorded) == groups
    batches(collector, 1)
    assert_same(found, kept)


def changed(collector):
    """Changes that may happen between two batches."""
    found = batches(collector, 1)
    collector.reset_rows(torch.tensor([True, False, False, True]))
    found += batches(collector, 1)
    with torch.no_grad():
        for parameter in collector.policy.parameters():
            parameter.mul_(1.5)
    found += batches(collector, 1)
    collector.exploration_type = ExplorationType.MODE
    return found + batches(collector, 2)


@pytest.mark.parametrize("groups", [1, 2])  # two groups are lowered until the mode of the distribution is taken
def test_changes_between_batches(groups, recorded):
    expected = changed(make(groups=groups))
    assert_same(changed(make(groups=groups, cuda_graph=True)), expected)
    assert len(recorded) == 2 * groups  # again with the other exploration


@pytest.mark.parametrize("replace", [replace_parameter, replace_module])
def test_replaced_weights_are_captured_again(replace, recorded):
    def collected(**options):
        collector = make(**options)
        found = batches(collector, 2)
        replace(collector.policy[1])
        return found + batches(collector, 2)

    expected = collected()
    assert_same(collected(cuda_graph=True), expected)
    assert len(recorded) == 2


def test_hooks_and_modes_between_batches_count(recorded):
    def collected(**options):
        collector = make(**options)
        head = collector.policy[1][0].module
        found = batches(collector, 2)
        hook = head.register_forward_hook(lambda module, inputs, logits: -logits)
        found += batches(collector, 1)
        hook.remove()
        collector.policy.eval()
        return found + batches(collector, 2)

    expected = collected()
    assert_same(collected(cuda_graph=True), expected)
    assert len(recorded) == 3


class Another(nn.Module):
    """A policy that returns a new TensorDict, without one of the entries."""

    def forward(self, tensordict):
        out = tensordict.exclude("truncated")
        return out.set("action", torch.nn.functional.one_hot((out["observation"][..., 2] > 0).long(), 2))


def test_a_policy_that_returns_something_else(recorded):
    def collected(**options):
        env = GymEnv("CartPole-v1", num_envs=ROWS, device="cpu").append_transform(StepCounter())
        env.set_seed(3)
        return batches(Collector(env, Another(), frames_per_batch=ROWS * STEPS, **options), 2)

    assert_same(collected(cuda_graph=True), collected())
    assert len(recorded) == 1


def test_a_policy_that_waits_is_named(monkeypatch):
    def refuse(steps, device, generator):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr("recurl.execution.capture.record", refuse)
    with pytest.raises(
        UsageError, match=r"The policy can't be captured as a CUDA graph, as .*test_captured_policy\.py"
    ):
        make(cuda_graph=True).collect()


def test_uncapturable_policies(monkeypatch):
    env = GymEnv(gym.spec("CartPole-v1").id, num_envs=2, device="cpu")
    with pytest.raises(UnsupportedError, match=r"GymEnv steps on the host, and there is no policy"):
        Collector(env, frames_per_batch=10, cuda_graph=True)
    with pytest.raises(UnsupportedError, match=r"be compiled: TransformedEnv steps on the host"):
        make(compile_step=True)
    with pytest.raises(UnsupportedError, match=r"be compiled: TransformedEnv steps on the host"):
        make(compile_step=True, cuda_graph=True)
    monkeypatch.setattr(captured, "_DEVICE", "cuda")
    with pytest.raises(UnsupportedError, match=r"the environment is on cpu\. Collect without cuda_graph"):
        make(cuda_graph=True)
