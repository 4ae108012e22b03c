import pytest
import torch
from tensordict import TensorDict

from recurl.core import specs
from recurl.core.errors import UnsupportedError
from recurl.sequences.mode import ExplorationType, set_exploration_type
from recurl.trainers import DQN, DQNConfig

BOX = specs.Composite({"observation": specs.Unbounded(2, 3)}, shape=(2,))


def make(cell="lstm", action=None, **options):
    return DQN.make_agent(
        DQNConfig(env="none", cell=cell, hidden_size=8, **options), BOX, action or specs.Categorical(3)
    )


@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
def test_acts_and_explores(cell):
    torch.manual_seed(0)
    agent = make(cell)
    td = TensorDict({"observation": torch.randn(200, 3), "is_init": torch.zeros(200, 1, dtype=torch.bool)}, [200])
    greedy = agent.actor(td.clone())["action"]
    with set_exploration_type(ExplorationType.RANDOM):
        assert agent.policy(td.clone())["action"].bincount(minlength=3).min() > 30
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(agent.policy(td.clone())["action"], greedy)


def test_exploration_is_part_of_the_saved_state():
    agent, other = make(total_steps=1000), make(total_steps=1000)
    agent.explore.step(150)
    other.load_state_dict(agent.state_dict())
    assert other.explore.eps.item() == pytest.approx(1 - 0.95 / 2)


def test_other_actions_are_refused():
    for action in (specs.MultiCategorical([2, 3]), specs.Bounded(-1.0, 1.0, (2,)), specs.Categorical(2, (2,))):
        with pytest.raises(UnsupportedError, match="DQN needs Discrete actions"):
            make(action=action)
