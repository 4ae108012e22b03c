"""Collection in a thread, exactly one update behind."""

import io

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.collectors.threaded import ThreadedCollector
from recurl.core.errors import ArgumentError
from recurl.core.keys import TRAJ_IDS
from recurl.envs import EnvBase, GroupedEnv, GymEnv
from recurl.modules import Categorical, LSTMModule, ProbabilisticActor


def create() -> EnvBase:
    return GroupedEnv(
        [GymEnv("recurl/MaskedCartPole-v1", num_envs=2, categorical_action_encoding=True) for _ in range(2)]
    )


def make_policy() -> ProbabilisticActor:
    torch.manual_seed(0)
    memory = LSTMModule(2, 8, in_key="observation", out_key="features", recurrent_backend="loop")
    trunk = Seq(memory, Mod(nn.Linear(8, 2), ["features"], ["logits"]))
    return ProbabilisticActor(trunk, ["logits"], distribution_class=Categorical, return_log_prob=True)


def change(policy: nn.Module, update: int) -> None:
    """Change the weights as an update does."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.sin(torch.arange(parameter.numel()) * 0.7 + update).view_as(parameter) * 0.3)


def seeded() -> EnvBase:
    env = create()
    env.set_seed(7)
    return env


def in_old_format(state: dict) -> dict:
    """Return a state as recurl 0.2 saved it."""
    (part,), shape = state["parts"][0], [4, 10]
    return {"batch": TensorDict(part["entries"], shape).to_dict(), "collector": state["workers"][0]["collector"]}


def run(batches: int, stop_at: int | None = None, convert=dict) -> list[object]:
    policy = make_policy()
    torch.manual_seed(1)
    collector = ThreadedCollector(seeded(), policy, frames_per_batch=40)
    seen = []
    for update in range(batches):
        seen.append(collector.collect().exclude(TRAJ_IDS))
        change(policy, update)
        if update == stop_at:
            file = io.BytesIO()
            torch.save(convert(collector.state_dict()), file)
            collector.shutdown()
            file.seek(0)
            collector = ThreadedCollector(create(), policy, frames_per_batch=40)
            assert collector.load_state_dict(torch.load(file))
    collector.shutdown()
    return seen


def test_every_batch_but_the_first_is_exactly_one_update_old() -> None:
    policy = make_policy()
    torch.manual_seed(1)
    plain = Collector(seeded(), policy, frames_per_batch=40)
    expected = [plain.collect(), plain.collect()]
    for update in range(3):
        change(policy, update)
        expected.append(plain.collect())
    for wanted, found in zip(expected, run(5), strict=True):
        assert found.names == [None, "time"]
        assert (wanted.exclude(TRAJ_IDS) == found).all()
    assert not torch.equal(expected[1]["logits"], expected[2]["logits"])


@pytest.mark.parametrize(
    ("stop_at", "convert"), [(0, lambda state: state), (2, lambda state: state), (1, in_old_format)]
)
def test_collection_resumes_exactly(stop_at: int, convert) -> None:
    for wanted, found in zip(run(5), run(5, stop_at, convert), strict=True):
        assert (wanted == found).all()


def test_new_episodes_begin_after_the_batch_that_is_under_way() -> None:
    collector = ThreadedCollector(seeded(), make_policy(), frames_per_batch=4)
    first = collector.collect()
    collector.reset_rows(torch.tensor([True, False, False, False]))
    collector.wait()
    collector.wait()
    second, third = collector.collect(), collector.collect()
    collector.shutdown()
    ended = [batch["next", "done"][:, -1, 0] for batch in (first, second)]
    assert torch.equal(second["is_init"][:, 0, 0], ended[0])
    assert torch.equal(third["is_init"][:, 0, 0], ended[1] | torch.tensor([True, False, False, False]))


class Failing(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")


def test_errors_of_the_thread_are_raised() -> None:
    collector = ThreadedCollector(create(), Mod(Failing(), ["observation"], ["action"]), frames_per_batch=4)
    with pytest.raises(ValueError, match="no such thing"):
        collector.collect()
    collector.shutdown()
    collector.shutdown()


def test_weights_of_another_policy_are_refused_at_the_call() -> None:
    collector = ThreadedCollector(seeded(), make_policy(), frames_per_batch=40)
    wrong = {name: torch.zeros(9) for name in make_policy().state_dict()}
    for weights in (wrong, {"weight": torch.zeros(1)}):
        with pytest.raises(ArgumentError, match="names and shapes"):
            collector.update_policy_weights_(weights)
    assert [collector.collect().shape for _ in range(2)] == [(4, 10), (4, 10)]
    collector.shutdown()


def test_a_saved_state_does_not_change_with_the_batches_delivered_since() -> None:
    collector = ThreadedCollector(seeded(), make_policy(), frames_per_batch=40)
    collector.wait()
    state, saved = collector.state_dict(), []
    for _ in range(2):
        saved.append({key: value.clone() for key, value in state["parts"][0][0]["entries"].items()})
        batch = collector.collect()
        assert all(torch.equal(batch[key], value) for key, value in saved[0].items())
        batch["logits"].add_(1)
        collector.load_state_dict(state)
    assert all(torch.equal(saved[1][key], value) for key, value in saved[0].items())
    collector.shutdown()
