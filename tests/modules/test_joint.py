import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import distributions as d

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded
from recurl.execution.lowering import Entries, Network
from recurl.modules import (
    ActionDistribution,
    ActionPart,
    IndependentNormal,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    action_parts,
)
from recurl.sequences.mode import ExplorationType, set_exploration_type

SPEC = Composite(
    {
        "move": Categorical(3),
        "arm": Composite({"keys": MultiCategorical([2, 3]), "aim": Bounded(-2.0, 1.0, (2,))}),
        "bits": Binary((2,), dtype=torch.int8),
        "force": Unbounded(()),
    }
)
PARTS = action_parts(SPEC)
KEYS = [
    ("action", "move"),
    ("action", "arm", "keys"),
    ("action", "arm", "aim"),
    ("action", "bits"),
    ("action", "force"),
]
SIZES = [3, 5, 4, 2, 2]


def joint(outputs, mask=None):
    return ActionDistribution(outputs, mask, parts=tuple(PARTS.values()))


def test_parts_in_order():
    assert list(PARTS) == KEYS
    assert [part.parameters for part in PARTS.values()] == SIZES
    assert [part.choices for part in PARTS.values()] == [3, 5, 0, 0, 0]


def test_the_joint_is_the_sum_of_its_parts():
    torch.manual_seed(0)
    outputs = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    dist = joint(outputs)
    values = dist.sample()
    move, keys, aim, bits, force = outputs.split(SIZES, -1)
    (loc, scale), (mean, deviation) = NormalParamExtractor()(aim), NormalParamExtractor()(force)
    expected = [
        d.Categorical(logits=move),
        d.Categorical(logits=keys[:, :2]),
        d.Categorical(logits=keys[:, 2:]),
        TanhNormal(loc, scale, low=-2.0, high=1.0),
        d.Independent(d.Bernoulli(logits=bits), 1),
        d.Independent(d.Normal(mean, deviation), 1),
    ]
    parts = [values[0], *values[1].unbind(-1), values[2], values[3].double(), values[4].unsqueeze(-1)]
    log_prob = sum(part.log_prob(value) for part, value in zip(expected, parts, strict=True))
    torch.testing.assert_close(dist.log_prob(*values), log_prob)
    torch.testing.assert_close(dist.entropy(), sum(part.entropy() for part in expected))
    together = dist.log_prob_and_entropy(*values)
    torch.testing.assert_close(torch.stack(together), torch.stack([dist.log_prob(*values), dist.entropy()]))
    for first, second in zip(together, (log_prob, sum(part.entropy() for part in expected)), strict=True):
        ours, theirs = (torch.autograd.grad(x.sum(), outputs, retain_graph=True)[0] for x in (first, second))
        torch.testing.assert_close(ours, theirs)
    for value, part in zip(values, PARTS.values(), strict=True):
        assert all(part.spec.is_in(row) for row in value.to(part.spec.dtype))
    assert dist.mode[0].tolist() == move.argmax(-1).tolist()
    assert torch.equal(dist.mode[3].bool(), bits > 0)
    assert torch.equal(dist.deterministic_sample[4], mean.squeeze(-1))
    assert [len(value) for value in dist.sample((4,))] == [4] * 5


def test_a_mask_covers_the_discrete_parts():
    mask = torch.tensor([[0, 1, 0, 1, 0, 0, 1, 1]], dtype=torch.int8).expand(50, 8)
    move, keys, *_ = joint(torch.randn(50, 16), mask).sample()
    assert (move == 1).all()
    assert (keys[:, 0] == 0).all()
    assert set(keys[:, 1].tolist()) == {1, 2}


def actor():
    torch.manual_seed(0)
    net = TensorDictModule(torch.nn.Linear(4, 16), in_keys=["observation"], out_keys=["outputs"])
    return ProbabilisticActor(
        net,
        in_keys={"outputs": "outputs", "mask": "action_mask"},
        out_keys=list(PARTS),
        distribution_class=ActionDistribution,
        distribution_kwargs={"parts": tuple(PARTS.values())},
        return_log_prob=True,
    )


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_an_actor_writes_every_part_and_one_log_probability(kind):
    policy = actor()
    td = TensorDict({"observation": torch.randn(5, 4), "action_mask": torch.ones(5, 8, dtype=torch.bool)}, [5])
    found = []
    with set_exploration_type(kind):
        assert Network([policy]).obstacle is None
        for run in (policy, Network([policy])):
            torch.manual_seed(1)
            given = td.clone() if run is policy else Entries.of(td.clone())
            found.append(run(given))
    for key in (*KEYS, "action_log_prob"):
        assert torch.equal(found[0][key], found[1][key])
    assert found[0]["action_log_prob"].shape == (5,)
    assert torch.equal(policy.log_prob(found[0]), found[0]["action_log_prob"])
    assert policy.get_dist(found[0]).entropy().shape == (5,)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Bounded(0, 255, (3,), dtype=torch.uint8), "use MultiDiscrete"),
        (Bounded(torch.tensor([0.0, -1.0]), torch.tensor([torch.inf, 1.0])), "two finite bounds"),
        (Bounded(-2e38, 2e38, (1,)), "high - low finite too"),
        (Bounded(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0])), "low < high"),
        (OneHot(3), "categorical_action_encoding=True"),
        (Binary((0,)), "not empty"),
    ],
)
def test_actions_without_a_distribution_are_named(spec, message):
    with pytest.raises(UnsupportedError, match=message):
        ActionPart(spec)
    with pytest.raises(UnsupportedError, match=rf"\('action', 'hand'\).*{message}"):
        action_parts(Composite({"hand": spec}))


def test_invalid_arguments():
    with pytest.raises(ArgumentError, match="need 16 outputs and 8 choices"):
        joint(torch.zeros(2, 15))
    with pytest.raises(ArgumentError, match="need 16 outputs and 8 choices"):
        joint(torch.zeros(2, 16), torch.ones(2, 7))
    with pytest.raises(ArgumentError, match="NormalParamExtractor"):
        IndependentNormal(torch.zeros(2), None)


def test_samples_without_bounds_are_those_of_torch():
    loc, scale = torch.randn(4, 3, requires_grad=True), torch.rand(4, 3) + 0.1
    for shape in ((), (5,)):
        torch.manual_seed(0)
        expected = torch.distributions.Normal(loc, scale).sample(shape)
        torch.manual_seed(0)
        drawn = IndependentNormal(loc, scale).sample(shape)
        assert torch.equal(drawn, expected)
        assert not drawn.requires_grad
