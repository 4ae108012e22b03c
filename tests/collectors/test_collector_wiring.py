"""Policies and arguments that a collector wires or rejects."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.envs import GymEnv, InitTracker, TransformedEnv
from recurl.modules import GRUModule
from recurl.transforms import TensorDictPrimer
from tests.collectors.random_ends import RandomEnds, make_policy, random_ends


def test_auto_registration_wires_once() -> None:
    policy = make_policy()
    collector = Collector(random_ends(2), policy, frames_per_batch=4)
    kinds = [type(transform).__name__ for transform in collector.env.transform]
    assert kinds == ["InitTracker", "TensorDictPrimer"]
    again = Collector(collector.env, policy, frames_per_batch=4)
    assert len(list(again.env.transform)) == 2
    assert "is_init" in Collector(random_ends(2), lambda td: td, frames_per_batch=4).env.observation_spec


def test_unwired_policies_are_refused() -> None:
    def collector(env: object, policy: object) -> Collector:
        return Collector(env, policy, frames_per_batch=4, auto_register_policy_transforms=False)

    policy = make_policy()
    with pytest.raises(KeyError, match="InitTracker"):
        collector(random_ends(2), policy)
    with pytest.raises(RuntimeError, match=r"would not be fed back.*primer"):
        collector(TransformedEnv(random_ends(2), InitTracker()), policy)
    lost = GRUModule(4, 8, in_keys=["observation", "rs"], out_keys=["features", "rs_out"])
    with pytest.raises(RuntimeError, match="rs"):
        Collector(random_ends(2), Seq(lost), frames_per_batch=4)
    with pytest.raises(RuntimeError, match="bidirectional module can't step"):
        Collector(random_ends(2), make_policy("gru", bidirectional=True), frames_per_batch=4)


def test_a_primer_that_is_not_zero_is_refused() -> None:
    policy = make_policy("gru")
    primer = policy[0].make_tensordict_primer()
    for wrong in (
        TensorDictPrimer(primer.primers, default_value=1.0),
        TensorDictPrimer(primer.primers, random=True),
    ):
        env = TransformedEnv(random_ends(2), InitTracker()).append_transform(wrong)
        with pytest.raises(RuntimeError, match="primer of recurrent_state must give zeros"):
            Collector(env, policy, frames_per_batch=4)


def test_log_probabilities_and_random_frames_exclude_each_other() -> None:
    policy = Seq(*make_policy(), Mod(lambda logits: logits.logsumexp(-1), ["logits"], ["action_log_prob"]))
    with pytest.raises(ValueError, match="random actions with the policy's 'action_log_prob'"):
        Collector(random_ends(2), policy, frames_per_batch=4, init_random_frames=4)


def test_bad_arguments() -> None:
    for frames in (0, -3):
        with pytest.raises(ValueError, match=f"frames_per_batch must be at least 1, got {frames}"):
            Collector(random_ends(2), frames_per_batch=frames)
    with pytest.raises(ValueError, match="total_frames must be at least 1, got 0"):
        Collector(random_ends(2), frames_per_batch=4, total_frames=0)
    with pytest.raises(ValueError, match="init_random_frames must not be negative"):
        Collector(random_ends(2), make_policy(), frames_per_batch=4, init_random_frames=-1)
    with pytest.raises(TypeError, match="create_env_fn must be an environment of recurl, or a function"):
        Collector(RandomEnds, frames_per_batch=4)


def test_a_sequence_of_torch_may_be_a_policy_but_no_plain_network() -> None:
    policy = nn.Sequential(Mod(lambda observation: (observation.sum(-1) > 0).long(), ["observation"], ["action"]))
    collector = Collector(GymEnv("CartPole-v1"), policy, frames_per_batch=4, total_frames=4)
    assert [batch.shape for batch in collector] == [(4,)]
    with pytest.raises(TypeError, match="a Linear takes tensors: wrap it"):
        Collector(GymEnv("CartPole-v1"), nn.Linear(4, 2), frames_per_batch=4)


def test_a_policy_that_changes_its_entries_is_refused() -> None:
    calls = []

    def policy(td: object) -> object:
        calls.append(td)
        if len(calls) == 3:
            td["extra"] = torch.zeros(2)
        return td.set("action", torch.zeros(2, dtype=torch.int64))

    with pytest.raises(RuntimeError, match=r"step 2 differs from the first in \('extra',\)"):
        Collector(random_ends(2), policy, frames_per_batch=8).collect()


def test_a_head_without_a_scale_is_explained() -> None:
    env = GymEnv("Pendulum-v1", num_envs=2)
    policy = Seq(Mod(nn.Linear(3, 2), ["observation"], ["loc", "scale"]), Mod(lambda loc: loc, ["loc"], ["action"]))
    with pytest.raises(RuntimeError, match="NormalParamExtractor"):
        Collector(env, policy, frames_per_batch=4).collect()
