"""Collection from groups of environments that are stepped in turn."""

import sys

import cloudpickle
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.collectors import batch as batch_module
from recurl.core.errors import UsageError
from recurl.core.keys import TRAJ_IDS
from recurl.envs import (
    EnvBase,
    ExplorationType,
    GroupedEnv,
    GymEnv,
    ParallelEnv,
    StepCounter,
    TransformedEnv,
    parallel_groups,
)
from recurl.modules import Categorical, LSTMModule, ProbabilisticActor

# Workers can't import the tests: objects defined here are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def create(rows: int = 2) -> EnvBase:
    return GymEnv("recurl/MaskedCartPole-v1", rows, categorical_action_encoding=True)


def grouped() -> EnvBase:
    return GroupedEnv([create(), create()])


def in_workers() -> EnvBase:
    return parallel_groups(2, 1, create)


def make_policy() -> ProbabilisticActor:
    torch.manual_seed(0)
    memory = LSTMModule(2, 8, in_key="observation", out_key="features", recurrent_backend="loop")
    trunk = Seq(memory, Mod(nn.Linear(8, 2), ["features"], ["logits"]))
    return ProbabilisticActor(trunk, ["logits"], distribution_class=Categorical, return_log_prob=True)


def collected(collector: Collector, batches: int = 3) -> list[TensorDictBase]:
    return [collector.collect().exclude(TRAJ_IDS) for _ in range(batches)]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_a_group_collects_the_same_alone_and_with_another() -> None:
    policy, batches = make_policy(), {}
    kinds = {"both": (in_workers, 7), "first": (create, 7), "second": (create, 9)}
    for name, (make, seed) in kinds.items():
        env = make() if name == "both" else ParallelEnv(1, make, concatenate=True)
        env.set_seed(seed)
        frames = 25 * env.batch_size.numel()
        kind = ExplorationType.DETERMINISTIC
        with Collector(env, policy, frames_per_batch=frames, exploration_type=kind) as collector:
            assert collector.explain()["tensors"] is None
            batches[name] = collected(collector)
    for both, first, second in zip(*batches.values(), strict=True):
        assert both.shape == (4, 25)
        assert (both[:2] == first).all()
        assert (both[2:] == second).all()
    assert sum(int(batch["next", "done"].sum()) for batch in batches["both"]) > 4


class Image(Mod):
    """Adds an entry whose rows have too many bytes for staging."""

    def __init__(self) -> None:
        super().__init__(lambda x: x.sum(-1, keepdim=True).expand(-1, 1100).contiguous(), ["observation"], ["image"])


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("make", [create, grouped])
def test_steps_that_are_gathered_first_give_the_same_batch(
    make, length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where noncontiguous rows are copied one by one."""
    batches = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(batch_module, "_STAGED_ON", devices)
        policy = Seq(make_policy(), Image())
        env = TransformedEnv(make(), StepCounter(max_steps=7), policy=policy)
        env.set_seed(3)
        torch.manual_seed(1)
        collector = Collector(env, policy, frames_per_batch=20 * env.batch_size.numel(), sequence_length=length)
        batches.append(collected(collector))
    assert batches[0][0]["next", "done"].any()
    for plain, staged in zip(*batches, strict=True):
        assert set(plain.keys(True, True)) == set(staged.keys(True, True))
        assert (plain == staged).all()
        assert {k: v.stride() for k, v in plain.items(True, True)} == {
            k: v.stride() for k, v in staged.items(True, True)
        }


@pytest.mark.parametrize("lowered", [True, False])
def test_trajectories_of_groups(lowered: bool) -> None:
    policy = make_policy()
    env = GroupedEnv([create(), create()], policy=policy)
    env.set_seed(0)
    collector = Collector(env, policy if lowered else (lambda td: policy(td)), frames_per_batch=160)
    batches = [collector.collect() for _ in range(2)]
    assert collector.frames == 320
    assert collector.frames_per_batch == 160
    both = torch.cat(batches, 1)
    done, ids = both["next", "done"][:, :-1, 0], both[TRAJ_IDS]
    assert done.any()
    assert torch.equal(both["is_init"][:, 1:, 0], done)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done)
    assert (both["recurrent_state_h"][:, 1:][done] == 0).all()
    continues = ~done
    assert torch.equal(
        both["recurrent_state_h"][:, 1:][continues], both["next", "recurrent_state_h"][:, :-1][continues]
    )
    assert torch.equal(both["observation"][:, 1:][continues], both["next", "observation"][:, :-1][continues])


class Drawing:
    """A policy that records the number it draws for every row."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        td.set("draw", torch.rand(td.batch_size))
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


def test_policies_draw_step_by_step_and_group_by_group() -> None:
    collector = Collector(grouped(), Drawing(), frames_per_batch=40)
    torch.manual_seed(3)
    batch = collector.collect()
    torch.manual_seed(3)
    expected = torch.stack([torch.cat([torch.rand(2) for _ in range(2)]) for _ in range(10)], 1)
    assert torch.equal(batch["draw"], expected)


def test_random_actions_at_the_beginning() -> None:
    collector = Collector(grouped(), Drawing(), frames_per_batch=80, init_random_frames=40)
    batch = collector.collect()
    assert batch["action"][:, :10].any()
    assert not batch["action"][:, 10:].any()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_collection_resumes_exactly() -> None:
    policy = make_policy()
    torch.manual_seed(1)
    env = in_workers()
    env.set_seed(3)
    with Collector(env, policy, frames_per_batch=40) as collector:
        collector.collect()
        state, rng = collector.state_dict(), torch.get_rng_state()
        expected = collected(collector)
    with Collector(in_workers(), policy, frames_per_batch=40) as collector:
        torch.set_rng_state(rng)
        assert collector.load_state_dict(state)
        for wanted, found in zip(expected, collected(collector), strict=True):
            assert (wanted == found).all()


def test_new_episodes_in_some_rows() -> None:
    collector = Collector(grouped(), make_policy(), frames_per_batch=4)
    before = collector.collect()
    rows = torch.tensor([False, True, True, False])
    collector.reset_rows(rows)
    after = collector.collect()
    assert torch.equal(after["is_init"][:, 0, 0], rows | before["next", "done"][:, 0, 0])
    assert torch.equal(before[TRAJ_IDS][:, 0] != after[TRAJ_IDS][:, 0], after["is_init"][:, 0, 0])


class Uneven:
    """A policy that writes another entry at every second call."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.calls = 0
        self.dtype = dtype

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        if self.calls % 2:
            td.set("extra", torch.zeros(td.batch_size))
        elif self.dtype is not None:
            td.set("extra", torch.zeros(td.batch_size, dtype=self.dtype))
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_groups_must_write_the_same_entries(dtype: torch.dtype | None) -> None:
    collector = Collector(grouped(), Uneven(dtype), frames_per_batch=8)
    with pytest.raises(UsageError, match=r"All rows must write the same entries .*\('extra',\) differ between the gro"):
        collector.collect()
