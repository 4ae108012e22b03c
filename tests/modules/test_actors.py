from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.core.specs import Composite, OneHot
from recurl.modules.actors import ActorValueOperator, ProbabilisticActor, ValueOperator
from recurl.modules.distributions import Categorical, NormalParamExtractor, OneHotCategorical, TanhNormal
from recurl.modules.networks import MLP
from recurl.objectives import ClipPPOLoss
from recurl.sequences.mode import ExplorationType, set_exploration_type


def discrete_actor(**kwargs):
    net = TensorDictModule(MLP(3, 4), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], **{"distribution_class": Categorical, **kwargs})


def observations(*shape):
    return TensorDict({"observation": torch.randn(*shape, 3)}, shape)


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
@pytest.mark.parametrize(("kind", "event"), [(Categorical, ()), (OneHotCategorical, (4,))])
def test_discrete_actor(shape, kind, event):
    td = discrete_actor(distribution_class=kind, return_log_prob=True)(observations(*shape))
    assert td["action"].shape == (*shape, *event)
    assert td["action_log_prob"].shape == shape
    torch.testing.assert_close(td["action_log_prob"], kind(logits=td["logits"]).log_prob(td["action"]))


def test_continuous_actor_as_in_the_readme_of_the_field():
    net = nn.Sequential(MLP(3, 4, num_cells=[8]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    td = actor(observations(7))
    assert td["action"].shape == (7, 2)
    assert td["action_log_prob"].shape == (7,)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        torch.testing.assert_close(actor(td)["action"], 2 * td["loc"].tanh())


def test_exploration_type_decides():
    actor, td = discrete_actor(), observations(500)
    greedy = actor(td.clone())["action"]
    assert torch.equal(greedy, actor(td.clone())["logits"].argmax(-1))
    with set_exploration_type(ExplorationType.RANDOM):
        assert not torch.equal(actor(td.clone())["action"], greedy)
    with set_exploration_type(ExplorationType.MODE):
        assert torch.equal(actor(td.clone())["action"], greedy)


def test_mask_is_read_from_the_batch():
    actor = discrete_actor()
    masked = ProbabilisticActor(
        actor.module[0], in_keys={"logits": "logits", "mask": "action_mask"}, distribution_class=Categorical
    )
    td = observations(20)
    td["action_mask"] = torch.zeros(20, 4, dtype=torch.bool)
    td["action_mask"][:, 2] = True
    assert (masked(td)["action"] == 2).all()
    assert "action_mask" in masked.in_keys


def test_spec_names_the_action():
    spec = Composite({"move": OneHot(4)})
    actor = discrete_actor(distribution_class=OneHotCategorical, spec=spec)
    assert "move" in actor(observations())
    assert actor.spec is spec
    assert "action" in discrete_actor(spec=OneHot(4))(observations())
    with pytest.raises(ArgumentError, match="must be in its spec"):
        discrete_actor(spec=spec, out_keys=["action"])


def test_nested_keys():
    net = TensorDictModule(MLP(3, 4), in_keys=[("agent", "obs")], out_keys=[("agent", "logits")])
    actor = ProbabilisticActor(
        net,
        in_keys=[("agent", "logits")],
        out_keys=("agent", "action"),
        distribution_class=Categorical,
        return_log_prob=True,
    )
    td = actor(TensorDict({("agent", "obs"): torch.zeros(2, 3)}, [2]))
    assert td["agent", "action"].shape == td["agent", "action_log_prob"].shape == (2,)


@pytest.mark.parametrize("key", ["sample_log_prob", ("agents", "sample_log_prob")])
def test_key_of_the_log_probability(key):
    net = TensorDictModule(nn.Linear(3, 2), [("agents", "observation")], [("agents", "logits")])
    actor = ProbabilisticActor(
        net,
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=key,
    )
    batch = TensorDict({("agents", "observation"): torch.randn(2, 5, 3)}, [2, 5])
    wanted = net(batch.copy())["agents", "logits"].log_softmax(-1)
    with set_exploration_type(ExplorationType.RANDOM):
        out = copy.deepcopy(actor)(batch)
    taken = wanted.gather(-1, out["agents", "action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out[key], taken)
    assert key in actor.out_keys
    critic = ValueOperator(nn.Linear(3, 1), [("agents", "observation")])
    assert ClipPPOLoss(actor, critic).tensor_keys.sample_log_prob == key


def test_network_without_a_scale_names_the_extractor():
    net = TensorDictModule(MLP(3, 4), in_keys=["observation"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(net, in_keys=["loc", "scale"], distribution_class=TanhNormal)
    for call in (actor, actor.get_dist):
        with pytest.raises(UsageError, match="NormalParamExtractor"):
            call(observations(2))


def test_missing_parameter_names_the_extractor():
    net = TensorDictModule(MLP(3, 2), in_keys=["observation"], out_keys=["loc"])
    actor = ProbabilisticActor(net, in_keys=["loc", "scale"], distribution_class=TanhNormal)
    with pytest.raises(MissingKeyError, match=r"\['scale'\] are neither written.*NormalParamExtractor"):
        actor(observations(2))


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        discrete_actor()(TensorDict({"observation": torch.zeros(2, 5)}, [2]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        discrete_actor().get_dist(TensorDict({"observation": torch.zeros(2, 5)}, [2]))


def test_a_plain_network_is_refused():
    with pytest.raises(ArgumentTypeError, match="TensorDictModule"):
        ProbabilisticActor(MLP(3, 4), in_keys=["logits"], distribution_class=Categorical)


def test_value_operator_keys():
    assert ValueOperator(MLP(3, 1)).in_keys == ["observation"]
    assert ValueOperator(MLP(3, 1), in_keys=["features"]).out_keys == ["state_value"]
    assert ValueOperator(MLP(3, 1), in_keys=["observation", "action"]).out_keys == ["state_action_value"]
    assert ValueOperator(MLP(3, 1), out_keys=["v"]).out_keys == ["v"]
    td = ValueOperator(MLP(5, 1), in_keys=["observation", "action"])(
        TensorDict({"observation": torch.zeros(2, 3), "action": torch.zeros(2, 2)}, [2])
    )
    assert td["state_action_value"].shape == (2, 1)


@pytest.mark.parametrize("probabilistic", [True, False])
def test_actor_value_operator_shares_its_trunk(probabilistic):
    trunk = TensorDictModule(MLP(3, 3), in_keys=["observation"], out_keys=["features"])
    head = TensorDictModule(MLP(3, 4), in_keys=["features"], out_keys=["logits" if probabilistic else "action"])
    if probabilistic:
        head = ProbabilisticActor(head, in_keys=["logits"], distribution_class=Categorical)
    both = ActorValueOperator(trunk, head, ValueOperator(MLP(3, 1), in_keys=["features"]))
    policy, critic = both.get_policy_operator(), both.get_value_operator()
    assert policy.module[0] is critic.module[0] is trunk
    assert isinstance(policy, ProbabilisticTensorDictSequential) is probabilistic
    assert isinstance(critic, TensorDictSequential)
    td = both(observations(6))
    torch.testing.assert_close(policy(observations(6).update(td.select("observation")))["action"], td["action"])
    torch.testing.assert_close(critic(td.select("observation"))["state_value"], td["state_value"])
    if probabilistic:
        torch.testing.assert_close(policy.get_dist(td.select("observation")).logits, td["logits"].log_softmax(-1))
