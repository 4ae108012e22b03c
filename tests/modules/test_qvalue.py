import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.specs import Bounded, Categorical, Composite, OneHot
from recurl.envs import GymEnv
from recurl.modules import MLP, GRUModule, QValueActor, QValueModule

VALUES = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, -1.0]])


@pytest.mark.parametrize("how", [{"action_space": "one-hot"}, {"action_space": "one_hot"}, {"spec": OneHot(3)}])
def test_one_hot(how):
    td = QValueModule(**how)(TensorDict({"action_value": VALUES}, [2]))
    assert td["action"].tolist() == [[0, 1, 0], [1, 0, 0]]
    assert td["chosen_action_value"].tolist() == [[2.0], [3.0]]


@pytest.mark.parametrize(
    "how", [{"action_space": "categorical"}, {"spec": Categorical(3)}, {"spec": Composite(action=Categorical(3))}]
)
def test_categorical(how):
    td = QValueModule(**how)(TensorDict({"action_value": VALUES}, [2]))
    assert td["action"].tolist() == [1, 0]
    assert td["action"].dtype == torch.int64


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
def test_the_best_of_the_allowed_actions_is_taken(space):
    mask = torch.tensor([[True, False, True], [False, True, False]])
    module = QValueModule(space, action_mask_key="action_mask")
    td = module(TensorDict({"action_value": VALUES, "action_mask": mask}, [2]))
    action = td["action"] if space == "categorical" else td["action"].argmax(-1)
    assert action.tolist() == [2, 1]
    assert td["chosen_action_value"].tolist() == [[2.0], [1.0]]
    assert torch.equal(td["action_value"], VALUES.masked_fill(~mask, -torch.inf))


def test_keys():
    module = QValueModule("categorical", "q", out_keys=["move", "values", ("best", "value")])
    td = module(TensorDict({"q": VALUES}, [2]))
    assert td["move"].tolist() == [1, 0]
    assert torch.equal(td["values"], VALUES)
    assert td["best", "value"].shape == (2, 1)


@pytest.mark.parametrize("categorical", [True, False])
def test_acts_in_an_environment_with_memory(categorical):
    env = GymEnv("recurl/TMaze-v0", num_envs=3, categorical_action_encoding=categorical)
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    head = TensorDictModule(MLP(8, 3), in_keys=["features"], out_keys=["q"])
    actor = QValueActor(TensorDictSequential(gru, head), spec=env.action_spec, action_value_key="q")
    env = GymEnv("recurl/TMaze-v0", num_envs=3, categorical_action_encoding=categorical, policy=actor)
    played = env.rollout(5, actor, break_when_any_done=False)
    chosen = played["q"].argmax(-1)
    assert torch.equal(played["action"] if categorical else played["action"].argmax(-1), chosen)
    assert played["next", "recurrent_state"].abs().sum() > 0


def test_a_part_can_be_selected():
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    head = TensorDictModule(MLP(8, 3), in_keys=["features"], out_keys=["action_value"])
    actor = QValueActor(TensorDictSequential(gru, head), action_space="categorical")
    part = actor.select_subsequence(out_keys=[("next", "recurrent_state")])
    assert [module for module in part.modules() if module is gru or module is head] == [gru]


def test_invalid_arguments():
    with pytest.raises(ArgumentError, match="Give the action_space"):
        QValueModule()
    with pytest.raises(ArgumentError, match="must be one of one_hot, categorical, got 'binary'"):
        QValueModule("binary")
    with pytest.raises(ArgumentError, match="spec's actions are one_hot"):
        QValueModule("categorical", spec=OneHot(3))
    with pytest.raises(ArgumentError, match="must be OneHot or Categorical, got Bounded"):
        QValueModule(spec=Bounded(-1.0, 1.0, (1,)))
    with pytest.raises(ArgumentError, match="got nothing under 'action'"):
        QValueModule(spec=Composite(other=OneHot(3)))
    with pytest.raises(ArgumentError, match="must name action, action values and chosen value"):
        QValueModule("categorical", out_keys=["action"])
    with pytest.raises(MissingKeyError, match="'action_value' with the action values"):
        QValueModule("categorical")(TensorDict({"q": VALUES}, [2]))
    net = TensorDictModule(MLP(2, 2), in_keys=["observation"], out_keys=["q"])
    with pytest.raises(ArgumentError, match="must write 'action_value'"):
        QValueActor(net, action_space="categorical")
    with pytest.raises(ArgumentError, match="leave in_keys out"):
        QValueActor(net, in_keys=["observation"], action_space="categorical", action_value_key="q")
