from __future__ import annotations

import io
import sys

import cloudpickle
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector, OverlappedCollector
from recurl.core.errors import UsageError, WorkerError
from recurl.core.keys import TRAJ_IDS
from recurl.envs import EnvBase, GymEnv
from recurl.modules import Categorical, LSTMModule, ProbabilisticActor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_interpreter")]

# Workers can't import the tests: objects defined here are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def create() -> EnvBase:
    return GymEnv("recurl/MaskedCartPole-v1", num_envs=3, categorical_action_encoding=True)


def make_policy() -> ProbabilisticActor:
    torch.manual_seed(0)
    memory = LSTMModule(2, 8, in_key="observation", out_key="features", recurrent_backend="loop")
    trunk = Seq(memory, Mod(nn.Linear(8, 2), ["features"], ["logits"]))
    return ProbabilisticActor(trunk, ["logits"], distribution_class=Categorical, return_log_prob=True)


def bias(policy: ProbabilisticActor) -> torch.Tensor:
    return policy.module[0].module[1].module.bias


def set_bias(policy: ProbabilisticActor, value: float) -> None:
    with torch.no_grad():
        bias(policy).copy_(torch.tensor([value, -value]))


def push(batch: object) -> float:
    return batch["logits"].diff(dim=-1).mean().item()


def test_every_batch_but_the_first_is_exactly_one_update_old() -> None:
    policy = make_policy()
    with OverlappedCollector(create, policy, frames_per_batch=30) as collector:
        pushes = []
        for update in range(4):
            batch = collector.collect()
            pushes.append(push(batch))
            assert batch.shape == (3, 10)
            set_bias(policy, -1000.0 * (update + 1))  # changes the weights as an update does
        assert abs(pushes[0]) < 10
        assert abs(pushes[1]) < 10  # begun when the first was fetched, before the first update
        assert pushes[2:] == pytest.approx([2000.0, 4000.0], abs=10)


def test_states_continue_from_batch_to_batch_and_replay() -> None:
    policy = make_policy()
    with OverlappedCollector(create, policy, frames_per_batch=90) as collector:
        first, second = collector.collect(), collector.collect()
    continues = ~first["next", "done"][:, -1, 0]
    key = policy.module[0].module[0].state_keys[0]
    torch.testing.assert_close(second[key][continues, 0], first["next", key][continues, -1], rtol=0, atol=0)
    assert torch.equal(second[TRAJ_IDS][continues, 0], first[TRAJ_IDS][continues, -1])


def in_old_format(state: dict) -> dict:
    """Return a state as recurl 0.2 saved it."""
    (worker,), (parts,) = state["workers"], state["parts"]
    return {"frames": state["frames"], "batch": parts[0]["entries"] if parts else None, "worker": worker}


def run(batches: int, stop_at: tuple[int, ...] = (), convert=dict) -> list[torch.Tensor]:
    """Return batches of a run whose weights change after each; stopped, saved and resumed in a new collector."""
    policy = make_policy()
    torch.manual_seed(1)
    seen = list[torch.Tensor]()
    collector = OverlappedCollector(create, policy, frames_per_batch=30)
    collector.set_seed(7)
    for update in range(batches):
        batch = collector.collect()
        seen.append(torch.cat([batch["observation"].flatten(), batch["action_log_prob"].flatten()]))
        set_bias(policy, 0.1 * update)
        if update in stop_at:
            file = io.BytesIO()
            torch.save(convert(collector.state_dict()), file)
            file.seek(0)
            collector.shutdown()
            collector = OverlappedCollector(create, policy, frames_per_batch=30)
            assert collector.load_state_dict(torch.load(file))
    collector.shutdown()
    return seen


def test_the_same_seed_gives_the_same_batches_also_across_a_stop() -> None:
    expected = run(5)
    assert not torch.equal(expected[0], expected[1])
    for again in (run(5, stop_at=(0, 2)), run(5, stop_at=(1,), convert=in_old_format)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, expected, strict=True))


def test_a_seed_determines_actions_too() -> None:
    batches = []
    for torch_seed in range(2):
        policy = make_policy()
        torch.manual_seed(torch_seed)  # determines the seeds of workers that aren't seeded explicitly
        with OverlappedCollector(create, policy, frames_per_batch=90) as collector:
            collector.set_seed(7)
            batches.append(collector.collect())
    assert torch.equal(batches[0]["action"], batches[1]["action"])
    assert torch.equal(batches[0]["observation"], batches[1]["observation"])


def test_a_state_saved_before_the_first_batch_has_none_under_way() -> None:
    with OverlappedCollector(create, make_policy(), frames_per_batch=30) as collector:
        state = collector.state_dict()
        assert state["parts"] == [[]]
        collector.load_state_dict(state)
        collector.collect()
        assert collector.state_dict()["parts"] != [[]]
        assert collector.frames == 30


def test_weights_can_come_from_elsewhere() -> None:
    other = make_policy()
    set_bias(other, -500.0)
    with OverlappedCollector(create, make_policy(), frames_per_batch=30) as collector:
        collector.update_policy_weights_(other)
        assert push(collector.collect()) == pytest.approx(1000.0, abs=10)
        collector.update_policy_weights_()
        collector.collect()
        assert abs(push(collector.collect())) < 10
    with (
        OverlappedCollector(create, frames_per_batch=30) as random,
        pytest.raises(UsageError, match=r"an nn\.Module"),
    ):
        random.update_policy_weights_(other)


def test_it_collects_the_same_as_a_collector_in_this_process() -> None:
    with OverlappedCollector(create, make_policy(), frames_per_batch=30) as overlapped:
        ours = overlapped.collect()
    theirs = Collector(create(), make_policy(), frames_per_batch=30).collect()
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert all(ours[key].dtype == theirs[key].dtype for key in ours.keys(True, True))


class Failing(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")


def test_rows_are_reset_after_the_batch_under_way() -> None:
    with OverlappedCollector(create, make_policy(), frames_per_batch=12) as collector:
        first = collector.collect()
        chosen = torch.tensor([False, True, False])
        collector.reset_rows(chosen)
        second, third = collector.collect(), collector.collect()
        ids = [part[TRAJ_IDS] for part in (first, second, third)]
        done = second["next", "done"][:, -1, 0]
        assert torch.equal(ids[0][:, -1] == ids[1][:, 0], ~first["next", "done"][:, -1, 0])
        assert torch.equal(ids[1][:, -1] == ids[2][:, 0], ~(done | chosen))
        assert torch.equal(third["is_init"][:, 0, 0], done | chosen)
        assert not third["recurrent_state_h"][1, 0].any()


def test_a_failure_in_the_worker_is_raised_here() -> None:
    policy = Seq(Mod(Failing(), ["observation"], ["action"]))
    with (
        OverlappedCollector(create, policy, frames_per_batch=30) as collector,
        pytest.raises(WorkerError, match="no such thing"),
    ):
        collector.collect()
