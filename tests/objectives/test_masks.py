"""Action masks in losses: replay equals collection, and the maxima of Q-learning are over the allowed actions."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.specs import Categorical, OneHot
from recurl.data import LazyTensorStorage, SequenceMinibatches, SliceSampler, TensorDictReplayBuffer
from recurl.envs import GymWrapper
from recurl.modules import EGreedyModule, GRUModule, MaskedCategorical, ProbabilisticActor, QValueActor
from recurl.objectives import ClipPPOLoss, DQNLoss
from recurl.objectives.value import GAE
from recurl.sequences.mode import ExplorationType, set_exploration_type
from tests.envs.masked import MaskedEnv, MaskedRows

MASK = {"logits": "logits", "mask": "action_mask"}


def trunk(out, width):
    gru = GRUModule(1, 6, in_key="observation", out_key="features")
    head = TensorDictModule(torch.nn.Linear(6, width), in_keys=["features"], out_keys=[out])
    return TensorDictSequential(gru, head)


def test_user_written_ppo_replays_masked_choices():
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        trunk("logits", 4), in_keys=MASK, distribution_class=MaskedCategorical, return_log_prob=True
    )
    value = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["observation"], out_keys=["state_value"])
    env = GymWrapper(MaskedRows(3), categorical_action_encoding=True)
    collector = Collector(env, actor, frames_per_batch=60)
    assert collector.explain()["tensors"] is None
    loss = ClipPPOLoss(actor, value)
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=value)(next(iter(collector)))
    assert "action_mask" in loss.in_keys
    shuffled = batch.reshape(-1)[torch.randperm(60)]
    for data in (batch, batch.reshape(-1), shuffled, *SequenceMinibatches(batch, 2, 5), *SequenceMinibatches(batch, 3)):
        losses = loss(data)
        assert (losses["max_ratio"] - 1).abs() < 1e-5
        assert losses["entropy"] == pytest.approx(0.69, abs=0.02)  # two choices of four
    sum(losses[key] for key in ("loss_objective", "loss_critic", "loss_entropy")).backward()
    assert all(parameter.grad.isfinite().all() for parameter in actor.parameters())
    collector.shutdown()


def q_actor(**options):
    torch.manual_seed(0)
    return QValueActor(trunk("action_value", 4), action_space="categorical", action_mask_key="action_mask", **options)


def collected(env, policy, frames):
    explore = EGreedyModule(Categorical(4), eps_init=0.7, action_mask_key="action_mask")
    collector = Collector(env, TensorDictSequential(policy, explore), frames_per_batch=frames)
    assert collector.explain()["tensors"] is None
    batch = next(iter(collector))
    collector.shutdown()
    return batch


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
def test_the_maxima_are_over_the_allowed_actions(double, replayed):
    actor = q_actor()
    env = GymWrapper(MaskedRows(3), categorical_action_encoding=True)
    batch = collected(env, actor, 60)  # the environment refuses forbidden actions
    loss = DQNLoss(actor, gamma=0.5, double_dqn=double, loss_function="l2")
    for parameter in loss.target_value_network.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if replayed:
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(60, ndim=2), sampler=SliceSampler(slice_len=3, strict_length=False), batch_size=30
        )
        buffer.extend(batch.select(*loss.in_keys, strict=False))
        batch = buffer.sample()
    found = loss(batch)
    after, before = batch["next"].reshape(-1), batch.reshape(-1)
    root = TensorDict({key: after[key] for key in ("observation", "action_mask")}, after.batch_size)

    def values_of(network):
        """Return all values by one step from each token, from states that the network itself computes."""
        features = network(before.copy())  # step by step: each token from its stored state
        root.update(
            {"recurrent_state": features["next", "recurrent_state"], "is_init": torch.zeros(len(root), 1).bool()}
        )
        return network(root.copy())["action_value"]

    online = values_of(actor)
    assert torch.equal(online == -torch.inf, ~after["action_mask"])
    chosen = actor(before.copy())["action_value"].gather(-1, before["action"].unsqueeze(-1)).squeeze(-1)
    error = found["td_error"].reshape(-1)
    assert error.isfinite().all()
    start = batch["is_init"].reshape(-1)
    target = values_of(loss.target_value_network)
    best = target.gather(-1, online.argmax(-1, keepdim=True)).squeeze(-1) if double else target.amax(-1)
    expected = (1.0 + 0.5 * best - chosen).abs()
    # The target network has separate states, which agree with one step from the stored state at starts only.
    torch.testing.assert_close(error[start], expected[start], rtol=1e-4, atol=1e-5)
    assert start.any()
    found["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in actor.parameters())


@pytest.mark.parametrize("terminated", [True, False])
def test_nothing_is_expected_where_nothing_is_allowed(terminated):
    actor = q_actor()
    batch = TensorDict({"observation": torch.zeros(2, 1), "action": torch.zeros(2, dtype=torch.int64)}, [2])
    batch["recurrent_state"], batch["is_init"] = torch.zeros(2, 1, 6), torch.tensor([[True], [True]])
    batch["action_mask"] = torch.ones(2, 4, dtype=torch.bool)
    ends = {"done": torch.ones(2, 1).bool(), "terminated": torch.full((2, 1), terminated)}
    batch["next"] = {"observation": torch.zeros(2, 1), "reward": torch.ones(2, 1), **ends}
    batch["next", "action_mask"] = torch.zeros(2, 4, dtype=torch.bool)
    for double in (True, False):
        losses = DQNLoss(actor, double_dqn=double)(batch)
        assert losses["q_target"] == 1.0
        losses["loss"].backward()


def test_padding_without_masks_has_no_gradient():
    batch = collected(GymWrapper(MaskedRows(3), categorical_action_encoding=True), q_actor(), 30)
    batch["collector", "mask"] = torch.ones(3, 10, dtype=torch.bool)
    expected = DQNLoss(q_actor())(batch[:, :6])
    batch["collector", "mask"][:, 6:] = False
    batch["action_mask"][:, 6:] = batch["next", "action_mask"][:, 6:] = False
    actor = q_actor()
    losses = DQNLoss(actor)(batch)
    losses["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in actor.parameters())
    torch.testing.assert_close(losses["loss"], expected["loss"])


@pytest.mark.parametrize("spec", [Categorical(4), OneHot(4)])
def test_random_actions_are_uniform_over_the_allowed_ones(spec):
    torch.manual_seed(0)
    mask = torch.tensor([True, False, True, True])
    action = torch.full((20_000,), 2)
    td = TensorDict(
        {"action": torch.nn.functional.one_hot(action, 4) if isinstance(spec, OneHot) else action}, [20_000]
    )
    td["action_mask"] = mask.to(torch.int8).expand(20_000, 4)
    with set_exploration_type(ExplorationType.RANDOM):
        out = EGreedyModule(spec, eps_init=1.0, action_mask_key="action_mask")(td)["action"]
    share = (out.argmax(-1) if isinstance(spec, OneHot) else out).bincount(minlength=4) / 20_000
    torch.testing.assert_close(share, mask / 3, rtol=0, atol=0.015)


def test_values_of_forbidden_actions():
    td = TensorDict({"observation": torch.zeros(2, 1), "recurrent_state": torch.zeros(2, 1, 6)}, [2])
    td["is_init"], td["action_mask"] = torch.ones(2, 1).bool(), torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0]])
    out = q_actor()(td)
    assert out["action"].tolist() == [3, 0]
    assert torch.equal(out["action_value"].isfinite(), td["action_mask"].bool())
    assert out["chosen_action_value"].isfinite().all()


def test_missing_and_other_masks_are_refused():
    td = TensorDict({"observation": torch.zeros(2, 1), "recurrent_state": torch.zeros(2, 1, 6)}, [2])
    td["is_init"] = torch.ones(2, 1).bool()
    with pytest.raises(MissingKeyError, match="The action mask 'action_mask' is missing"):
        q_actor()(td.clone())
    with pytest.raises(ArgumentError, match=r"must have the shape \[2, 4\], got \[2, 3\]"):
        q_actor()(td.clone().set("action_mask", torch.ones(2, 3)))
    explore = EGreedyModule(Categorical(4), action_mask_key="action_mask")
    with pytest.raises(MissingKeyError, match="'action_mask' is missing"):
        explore(TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2]))


def test_random_frames_are_allowed():
    actor = q_actor()
    env = GymWrapper(MaskedEnv("info"), categorical_action_encoding=True)  # refuses forbidden actions
    collector = Collector(env, actor, frames_per_batch=40, init_random_frames=40)
    assert next(iter(collector))["action"].unique().numel() == 4
    collector.shutdown()
