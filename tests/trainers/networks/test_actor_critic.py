import pytest
import torch
from tensordict import TensorDict

from recurl.core import specs
from recurl.core.errors import UnsupportedError
from recurl.modules import Categorical
from recurl.sequences.mode import set_recurrent_mode
from recurl.trainers import PPO, Impala, ImpalaConfig, PPOConfig
from recurl.trainers.networks.action_head import NaNSafeCategorical

BOX = specs.Composite({"observation": specs.Unbounded(2, 3)}, shape=(2,))
DISCRETE = specs.Categorical(3)
CONTINUOUS = specs.Bounded(torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 1.0]))


def make(cell="lstm", action=DISCRETE, spec=BOX, **options):
    torch.manual_seed(0)
    return PPO.make_agent(PPOConfig(env="none", cell=cell, hidden_size=8, **options), spec, action)


def batch(agent, *shape):
    td = TensorDict({"observation": torch.randn(*shape, 3)}, shape)
    td["is_init"] = torch.zeros(*shape, 1, dtype=torch.bool)
    for key in agent.policy.in_keys:
        if "state_" in str(key):
            td[key] = torch.zeros(*shape, 1, 8)
    return td


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
def test_writes_actions_values_and_states(cell, shared):
    agent = make(cell, shared_trunk=shared)
    td = agent.policy(batch(agent, 2))
    assert td["action"].shape == td["action_log_prob"].shape == (2,)
    trunks = 1 if shared else 2
    states = {"lstm": 2, "gru": 1, "none": 0}[cell] * trunks
    assert len([key for key in agent.policy.out_keys if key[0] == "next"]) == states
    with set_recurrent_mode(True):
        assert agent.critic(batch(agent, 2, 5))["state_value"].shape == (2, 5, 1)


def test_trunks_are_shared_or_not():
    sizes = {shared: sum(p.numel() for p in make(shared_trunk=shared).parameters()) for shared in (True, False)}
    assert sizes[True] < sizes[False]


def test_control_has_as_many_weights_as_the_lstm():
    def matrices(cell):
        return sum(p.numel() for p in make(cell).parameters() if p.ndim == 2)

    assert matrices("none") == matrices("lstm")


def test_continuous_actions_stay_in_their_bounds():
    agent = make(action=CONTINUOUS)
    with torch.no_grad():
        actions = agent.actor(batch(agent, 1000))["action"]
    assert actions.shape == (1000, 2)
    assert (actions.abs() <= torch.tensor([2.0, 1.0])).all()
    assert actions[:, 0].abs().max() > 1


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (specs.Bounded(-torch.inf, 1.0, (2,)), "PPO can't choose the action 'action': A Box of actions must have two"),
        (specs.Bounded(0, 9, (2,), dtype=torch.int64), "use MultiDiscrete"),
        (specs.Composite({"arm": specs.OneHot(3)}), r"PPO can't choose the action \('action', 'arm'\)"),
    ],
)
def test_other_actions_are_refused(action, message):
    with pytest.raises(UnsupportedError, match=message):
        make(action=action)


def test_the_algorithm_that_refuses_is_named():
    with pytest.raises(UnsupportedError, match="IMPALA can't choose the action 'action'"):
        Impala.make_agent(ImpalaConfig(env="none", hidden_size=8), BOX, specs.Bounded(-torch.inf, 1.0, (2,)))


def test_choices_are_those_of_a_categorical_and_survive_nan():
    logits = torch.randn(5, 7, 3)
    drawn = []
    for kind in (NaNSafeCategorical, Categorical):
        torch.manual_seed(1)
        drawn.append(kind(logits=logits).sample())
    assert torch.equal(*drawn)
    assert NaNSafeCategorical(logits=logits).sample((4,)).shape == (4, 5, 7)
    frequencies = torch.bincount(NaNSafeCategorical(logits=logits[0, 0]).sample((20_000,)), minlength=3) / 20_000
    torch.testing.assert_close(frequencies, logits[0, 0].softmax(-1), atol=0.02, rtol=0)
    logits[2, 3, 1] = torch.nan
    assert 0 <= NaNSafeCategorical(logits=logits).sample().min() <= NaNSafeCategorical(logits=logits).sample().max() < 3
