from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import Tensor, nn

from recurl.collectors import Collector
from recurl.collectors.batch import BatchWriter
from recurl.core.errors import UsageError
from recurl.envs import GymEnv, InitTracker, StepCounter, TransformedEnv
from recurl.modules import GRUModule, LSTMModule, set_recurrent_mode
from tests.collectors.random_ends import CELLS, make_policy, random_ends


@pytest.mark.parametrize("backend", ["pad", "loop"])
@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_replayed_features_equal_the_collected_ones(cell: str, rows: int | None, backend: str) -> None:
    """Through environment, collector and module together, over consecutive batches."""
    policy = make_policy(cell, num_layers=2, recurrent_backend=backend)
    env = random_ends(rows)
    env.set_seed(3)
    collector = Collector(env, policy, frames_per_batch=24 * (rows or 1), total_frames=72 * (rows or 1))
    batches = 0
    for batch in collector:
        assert batch.shape == ((24,) if rows is None else (rows, 24))
        assert batch["next", "done"].any()
        for data in (batch, batch.reshape(-1)):
            with set_recurrent_mode(True), torch.no_grad():
                replayed = policy(data.clone())
            scale = data["features"].abs().max()
            assert (replayed["features"] - data["features"]).abs().max() <= 1e-6 * scale
            assert torch.equal(replayed["action"], data["action"])
        batches += 1
    assert batches == 3


@pytest.mark.parametrize("rows", [[2], [2, 1]])  # written by the C++ library, and copied by torch
def test_a_carried_state_that_is_edited_in_place_is_stored_as_edited(rows: list[int]) -> None:
    batch, state = TensorDict({}, [*rows, 4]), torch.zeros(*rows)
    writer = BatchWriter(batch, ..., torch.Size(rows))
    for step in range(4):
        if step != 2:  # where the state of the last step is the same tensor, unchanged
            state.add_(10.0)
        root = TensorDict({"state": state, "next": {"state": state + 1}}, rows)
        writer.write(step, root)
        state = root["next", "state"]
    writer.finish()
    assert batch["state"].reshape(2, 4).tolist() == [[10.0, 21.0, 22.0, 33.0]] * 2
    assert batch["next", "state"].reshape(2, 4).tolist() == [[11.0, 22.0, 23.0, 34.0]] * 2


def test_float64_features_to_machine_precision() -> None:
    policy = Seq(Mod(lambda x: x.double(), ["observation"], ["x"]), *make_policy_on("x", torch.float64))
    batch = next(iter(Collector(random_ends(3), policy, frames_per_batch=60)))
    assert batch["recurrent_state_h"].dtype == torch.float64
    with set_recurrent_mode(True), torch.no_grad():
        replayed = policy(batch.clone())["features"]
    assert (replayed - batch["features"]).norm() <= 1e-12 * batch["features"].norm()


def make_policy_on(key: str, dtype: torch.dtype) -> list[nn.Module]:
    lstm = LSTMModule(4, 8, in_key=key, out_key="features", dtype=dtype, num_layers=2)
    head = Mod(nn.Linear(8, 2, dtype=dtype), ["features"], ["logits"])
    return [lstm, head, Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])]


@pytest.mark.parametrize("rows", [None, 4])
def test_states_are_carried_within_and_across_batches(rows: int | None) -> None:
    collector = Collector(random_ends(rows), make_policy(), frames_per_batch=20 * (rows or 1))
    first, second = collector.collect(), collector.collect()
    for key in ("recurrent_state_h", "recurrent_state_c"):
        joined = torch.cat([first[key], second[key]], -3)
        after = torch.cat([first["next", key], second["next", key]], -3)
        init = torch.cat([first["is_init"], second["is_init"]], -2)[..., 1:, :].unsqueeze(-1)
        expected = torch.where(init, 0, after[..., :-1, :, :])
        assert torch.equal(joined[..., 1:, :, :], expected)
    done = torch.cat([first["next", "done"], second["next", "done"]], -2)[..., :-1, 0]
    init = torch.cat([first["is_init"], second["is_init"]], -2)[..., 1:, 0]
    assert torch.equal(done, init)
    assert first["is_init"][..., 0, :].all()
    ids = torch.cat([first["collector", "traj_ids"], second["collector", "traj_ids"]], -1)
    assert torch.equal(ids[..., 1:] != ids[..., :-1], init)
    if rows:
        assert len({int(i) for i in ids.unique()}) == int(init.sum()) + rows


def test_ids_are_unique_over_collectors() -> None:
    ids = [set(Collector(random_ends(2), frames_per_batch=40).collect()["collector", "traj_ids"].unique().tolist())]
    ids.append(set(Collector(random_ends(2), frames_per_batch=40).collect()["collector", "traj_ids"].unique().tolist()))
    assert not ids[0] & ids[1]


def test_batches_do_not_share_memory() -> None:
    collector = Collector(random_ends(2), make_policy(), frames_per_batch=8)
    first = collector.collect()
    kept = first.clone()
    collector.collect()
    assert (kept == first).all()


@pytest.mark.parametrize("outside", [True, False, None])
def test_collection_is_sequential_whatever_the_mode_outside(outside: bool | None) -> None:
    def collect() -> Tensor:
        env = random_ends(3)
        env.set_seed(0)
        return Collector(env, make_policy(), frames_per_batch=30).collect()["features"]

    expected = collect()
    with set_recurrent_mode(outside):
        assert torch.equal(collect(), expected)


def test_reset_at_each_iter() -> None:
    collector = Collector(random_ends(2), make_policy(), frames_per_batch=6, reset_at_each_iter=True)
    first, second = collector.collect(), collector.collect()
    assert second["is_init"][:, 0].all()
    assert (second["recurrent_state_h"][:, 0] == 0).all()
    assert not set(first["collector", "traj_ids"].unique().tolist()) & set(
        second["collector", "traj_ids"].unique().tolist()
    )


def test_set_truncated() -> None:
    plain, marked = (
        Collector(GymEnv("CartPole-v1", num_envs=2), make_policy(), frames_per_batch=8, set_truncated=flag)
        for flag in (False, True)
    )
    for collector in (plain, marked):
        collector.set_seed(0)
    expected, batch = plain.collect(), marked.collect()
    assert batch["next", "truncated"][:, -1].all()
    assert batch["next", "done"][:, -1].all()
    assert torch.equal(batch["next", "terminated"], expected["next", "terminated"])
    assert torch.equal(batch["next", "done"][:, :-1], expected["next", "done"][:, :-1])
    second = marked.collect()
    assert torch.equal(second["observation"], plain.collect()["observation"])
    assert (second["collector", "traj_ids"][:, 0] != batch["collector", "traj_ids"][:, -1]).all()


def test_a_trajectory_that_ends_with_the_batch_is_not_truncated() -> None:
    collector = Collector(random_ends(3), make_policy(), frames_per_batch=15, set_truncated=True)
    collector.set_seed(1)
    terminated = [collector.collect()["next"][:, -1] for _ in range(20)]
    ended = torch.cat([after["terminated"] for after in terminated])
    assert ended.any()
    assert not ended.all()
    assert torch.equal(torch.cat([after["truncated"] for after in terminated]), ~ended)


def test_entries_that_a_policy_edits_in_place_are_stored_as_it_left_them() -> None:
    def doubled(observation: Tensor) -> Tensor:
        return observation.mul_(2)[..., 0].gt(0).long()

    policy = Mod(doubled, ["observation"], ["action"])
    batch = Collector(random_ends(3), policy, frames_per_batch=30).collect()
    inner = ~batch["is_init"][:, 1:, 0]
    assert inner.any()
    before, after = batch["observation"][:, 1:], batch["next", "observation"][:, :-1]
    assert torch.equal(before[inner], 2 * after[inner])


def test_max_frames_per_traj() -> None:
    batch = Collector(GymEnv("Pendulum-v1"), frames_per_batch=12, max_frames_per_traj=5).collect()
    assert batch["next", "truncated"].squeeze(-1).nonzero().squeeze(-1).tolist() == [4, 9]


def test_frames_are_rounded_up_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="frames_per_batch=10 is not a multiple of the environment's 4 rows: 12 will"):
        collector = Collector(random_ends(4), frames_per_batch=10)
    assert collector.collect().shape == (4, 3)
    with pytest.warns(UserWarning, match="total_frames=20 is not a multiple of batches of 8 frames: 24 will"):
        collector = Collector(random_ends(4), frames_per_batch=8, total_frames=20)
    assert sum(batch.numel() for batch in collector) == 24


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("one_hot", [True, False])
def test_random_frames_use_the_encoding_of_the_policy(one_hot: bool, categorical: bool) -> None:
    lstm, head, choose = make_policy()
    if one_hot:
        choose = Mod(lambda logits: nn.functional.one_hot(logits.argmax(-1), 2), ["logits"], ["action"])
    policy = Seq(lstm, head, choose)
    env = GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=categorical)
    env.set_seed(0)
    batch = Collector(env, policy, frames_per_batch=80, init_random_frames=40).collect()
    chosen = batch["logits"].argmax(-1)
    action = batch["action"].argmax(-1) if one_hot else batch["action"]
    assert torch.equal(action[:, 20:], chosen[:, 20:])
    assert not torch.equal(action[:, :20], chosen[:, :20])
    assert batch["action"].shape == ((2, 40, 2) if one_hot else (2, 40))
    with set_recurrent_mode(True):  # the hidden states are still the policy's
        torch.testing.assert_close(policy(batch.clone())["features"], batch["features"], rtol=1e-5, atol=1e-6)


def test_postproc_and_storing_device() -> None:
    collector = Collector(
        random_ends(2), frames_per_batch=4, total_frames=8, postproc=lambda batch: batch.numel(), storing_device="meta"
    )
    assert list(collector) == [4, 4]
    assert collector.collect().device.type == "meta"


def test_shutdown() -> None:
    collector = Collector(random_ends(2), frames_per_batch=4, total_frames=8)
    collector.shutdown()
    collector.shutdown()
    assert collector.env.is_closed
    with pytest.raises(RuntimeError, match="was shut down"):
        next(iter(collector))
    collector.update_policy_weights_()


def test_update_policy_weights() -> None:
    policy = make_policy()
    collector = Collector(random_ends(2), policy, frames_per_batch=4)
    collector.update_policy_weights_()
    assert collector.policy is policy
    other = make_policy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    for weights in (other, other.state_dict()):
        collector.policy.load_state_dict(make_policy().state_dict())
        collector.update_policy_weights_(weights)
        assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"nn\.Module"):
        Collector(random_ends(2), lambda td: td, frames_per_batch=4).update_policy_weights_(other)


def test_state_dict_continues_exactly() -> None:
    def make() -> Collector:
        env = GymEnv("recurl/RepeatPrevious-v0", num_envs=3)
        env.set_seed(5)
        inputs = env.observation_spec["observation"].shape[-1]
        module = GRUModule(inputs, 8, in_key="observation", out_key="features")
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        choices = env.action_spec.shape[-1]
        return Collector(
            env, Seq(module, Mod(lambda f: f[..., :choices].argmax(-1), ["features"], ["action"])), frames_per_batch=60
        )

    straight = make()
    straight.collect()
    state = straight.state_dict()
    expected = straight.collect()
    resumed = make()
    assert resumed.load_state_dict(state) is True
    assert resumed.frames == 60
    batch = resumed.collect()
    assert (batch.exclude("collector") == expected.exclude("collector")).all()
    assert torch.equal(batch["collector", "traj_ids"][:, 0], expected["collector", "traj_ids"][:, 0])


def test_restored_trajectories_continue_their_step_numbers() -> None:
    straight, resumed = (
        Collector(GymEnv("recurl/RepeatPrevious-v0", num_envs=3), frames_per_batch=60) for _ in range(2)
    )
    straight.collect()
    assert resumed.load_state_dict(straight.state_dict()) is True
    expected, found = (collector.collect()["collector", "traj_steps"] for collector in (straight, resumed))
    assert (expected[:, 0] == 20).all()
    assert torch.equal(found, expected)


def test_state_of_an_environment_that_cannot_be_saved() -> None:
    collector = Collector(random_ends(None), make_policy(), frames_per_batch=4)  # can't be recreated
    collector.collect()
    state = collector.state_dict()
    assert state["env"] is None
    assert collector.load_state_dict(state) is False
    assert collector.collect()["is_init"][0].all()


def test_step_counter_runs_along() -> None:
    env = TransformedEnv(random_ends(2), StepCounter())
    batch = Collector(env, make_policy(), frames_per_batch=40).collect()
    count = batch["step_count"].squeeze(-1)
    init = batch["is_init"].squeeze(-1)
    assert (count[init] == 0).all()
    assert torch.equal(count[:, 1:][~init[:, 1:]], count[:, :-1][~init[:, 1:]] + 1)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_that_was_used_elsewhere_is_noticed(rows: int | None, wrapped: bool) -> None:
    env = random_ends(rows)
    collector = Collector(env, make_policy(), frames_per_batch=8, total_frames=24)
    batches = iter(collector)
    next(batches)
    next(batches)  # its own resets don't count
    (collector.env if wrapped else env).rollout(2)
    with pytest.raises(
        UsageError, match=r"environment was reset elsewhere since the last batch.*reset_at_each_iter=True"
    ):
        next(batches)


@pytest.mark.parametrize("rows", [None, 3])
def test_rows_are_reset_between_batches(rows: int | None) -> None:
    collector = Collector(random_ends(rows), make_policy(), frames_per_batch=8 * (rows or 1))
    collector.reset_rows(torch.zeros(collector.env.batch_size, dtype=torch.bool))  # before the first batch: no effect
    first = collector.collect()
    chosen = torch.ones((), dtype=torch.bool) if rows is None else torch.tensor([False, True, False])
    collector.reset_rows(chosen)
    second = collector.collect()
    time = first.ndim - 1
    end = {key: first.get(("next", key)).select(time, -1) for key in ("done", "observation", "recurrent_state_h")}
    start = {key: second.get(key).select(time, 0) for key in ("is_init", "observation", "recurrent_state_h")}
    begins = chosen | end["done"].squeeze(-1)
    assert torch.equal(start["is_init"].squeeze(-1), begins)
    assert not start["recurrent_state_h"][begins].any()
    for key in ("observation", "recurrent_state_h"):
        assert torch.equal(start[key][~begins], end[key][~begins])
        assert not torch.equal(start[key][begins], end[key][begins])
    ids = [batch["collector", "traj_ids"].select(time, place) for batch, place in ((first, -1), (second, 0))]
    assert torch.equal(ids[0] == ids[1], ~begins)
    steps = second["collector", "traj_steps"]
    assert torch.equal(steps.select(time, 0) == 0, begins)
    assert ((steps.diff(dim=time) == 1) | (steps.narrow(time, 1, steps.shape[time] - 1) == 0)).all()


def test_an_environment_that_was_used_elsewhere_may_be_reset() -> None:
    env = random_ends(None)
    collector = Collector(env, make_policy(), frames_per_batch=8, total_frames=16, reset_at_each_iter=True)
    for batch in collector:
        assert batch["is_init"][0].all()
        env.rollout(2)


class Interrupted(Exception):
    pass


def test_after_an_interrupted_batch_episodes_restart() -> None:
    """The environment has advanced past the root held by the collector."""
    env, calls = random_ends(2), []

    def policy(td):
        calls.append(1)
        if len(calls) == 20:
            raise Interrupted
        return memory(td)

    memory = make_policy()
    collector = Collector(
        TransformedEnv(env, InitTracker()).append_transform(memory[0].make_tensordict_primer()),
        policy,
        frames_per_batch=16,
    )
    first = [collector.collect(), collector.collect()]
    with pytest.raises(Interrupted):
        collector.collect()
    assert collector.frames == 32
    batch = collector.collect()
    assert collector.frames == 48
    assert batch["is_init"][:, 0].all()
    assert batch["collector", "traj_ids"].min() > max(data["collector", "traj_ids"].max() for data in first)
