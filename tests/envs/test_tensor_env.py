from __future__ import annotations

import io

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.envs import (
    ExplorationType,
    GymEnv,
    GymWrapper,
    InitTracker,
    PreviousAction,
    PreviousReward,
    RewardSum,
    StepCounter,
    TensorEnv,
    check_env_specs,
    interact,
)
from recurl.envs.tasks import (
    TASKS,
    Bandit,
    Dynamics,
    MaskedArm,
    MaskedCartPole,
    MaskedPendulum,
    RepeatPrevious,
    TaskVectorEnv,
    TMaze,
    register_dynamics,
)
from recurl.envs.tensor_env import dynamics_of
from recurl.execution.lowering import Entries
from recurl.execution.readback import refuse_read_back
from recurl.modules import Categorical, GRUModule, ProbabilisticActor
from recurl.trainers import evaluate_policy

MADE = [
    Bandit(3, 6),
    MaskedArm(max_episode_steps=8),
    MaskedCartPole(12),
    MaskedPendulum(9),
    RepeatPrevious(2, 3, 7),
    TMaze(2),
]


@pytest.fixture(params=MADE, ids=lambda made: type(made).__name__)
def dynamics(request) -> Dynamics:
    return request.param


def everything(env):
    """The environment with a transform of every kind."""
    for transform in (
        InitTracker(),
        StepCounter(),
        RewardSum(),
        PreviousAction(env.action_spec_unbatched),
        PreviousReward(),
    ):
        env = env.append_transform(transform)
    return env


def recurrent_policy(env):
    gru = GRUModule(input_size=2, hidden_size=8, in_key="observation", out_key="memory")
    head = TensorDictModule(torch.nn.Linear(8, env.action_spec_unbatched.n), in_keys=["memory"], out_keys=["logits"])
    return TensorDictSequential(gru, ProbabilisticActor(head, ["logits"], distribution_class=Categorical))


@pytest.mark.parametrize("categorical", [True, False])
def test_entries_are_those_of_the_host(dynamics, categorical):
    env = TensorEnv(dynamics, 3, categorical_action_encoding=categorical)
    rows = TaskVectorEnv(dynamics, 3, "Disabled")
    host = GymWrapper(rows, device="cpu", categorical_action_encoding=categorical)
    assert (env.observation_spec, env.action_spec) == (host.observation_spec, host.action_spec)
    check_env_specs(env)
    check_env_specs(everything(TensorEnv(dynamics, 3)))
    left, right = (made.rollout(4, break_when_any_done=False) for made in (env, host))
    kinds = [{key: (value.shape, value.dtype) for key, value in made.items(True, True)} for made in (left, right)]
    assert kinds[0] == kinds[1]


def test_steps_are_those_of_the_host(dynamics):
    env, rows = TensorEnv(dynamics, 4), TaskVectorEnv(dynamics, 4, "Disabled")
    root = env.reset(seed=0)
    rows.reset(seed=0)
    for _ in range(30):
        saved = env.get_state()
        state = {name: value.numpy() for name, value in saved["tensors"].items()}
        rows.steps[...] = saved["steps"]
        for name, value in state.items():
            rows.state[name][...] = value
        td = env.rand_step(root)
        action = (
            td["action"].argmax(-1) if td["action"].dtype == torch.int64 and td["action"].ndim > 1 else td["action"]
        )
        observations, reward, terminated, truncated, _ = rows.step(action.numpy())
        seen = observations if isinstance(observations, dict) else {"observation": observations}
        for name, array in seen.items():
            np.testing.assert_array_max_ulp(array, td["next", name].numpy(), 4)
        np.testing.assert_array_max_ulp(reward.astype(np.float32), td["next", "reward"][:, 0].numpy(), 4)
        for name, flags in (("terminated", terminated), ("truncated", truncated), ("done", terminated | truncated)):
            np.testing.assert_array_equal(flags, td["next", name][:, 0].numpy())
        root = env.maybe_reset(env.carry(td))
        rows.reset(options={"reset_mask": np.ones(4, dtype=bool)})


def test_done_rows_restart_and_keep_their_last_observation():
    env = TensorEnv(RepeatPrevious(k=1, num_symbols=5, episode_length=3), 6).append_transform(StepCounter())
    root, done = env.reset(seed=0), torch.zeros(6, 1, dtype=torch.bool)
    for step in range(1, 10):
        before = env.get_state()["tensors"]["symbols"]
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        count = (step - 1) % 3 + 1
        assert (td["next", "step_count"] == count).all()
        assert (td["next", "observation"].argmax(-1) == before[1 + count]).all()
        done = td["next", "done"]
        assert (done == (count == 3)).all()
        symbols = env.get_state()["tensors"]["symbols"]
        assert (symbols == before).all() == (not done.any())
        assert (root["observation"].argmax(-1) == symbols[1 + count % 3]).all()
        assert not root["done"].any()


def test_masked_rows_restart():
    env = TensorEnv(MaskedCartPole(), 3).append_transform(InitTracker())
    root = env.maybe_reset(env.carry(env.rand_step(env.reset(seed=0))))
    old = env.get_state()
    mask = torch.tensor([[False], [True], [False]])
    fresh = env.reset(root.clone().set("_reset", mask))
    new = env.get_state()
    assert (fresh["observation"] != root["observation"]).any(-1, keepdim=True).equal(mask)
    assert fresh["is_init"].equal(mask)
    assert new["steps"].tolist() == [1, 0, 1]
    assert (new["tensors"]["physical"] != old["tensors"]["physical"]).all(0).equal(mask[:, 0])


@pytest.mark.parametrize("entries", [False, True])
def test_nothing_is_read_back(dynamics, entries):
    env = everything(TensorEnv(dynamics, 5, categorical_action_encoding=True))
    root = env.reset(seed=0)
    root, seen = Entries.of(root) if entries else root, []
    with refuse_read_back():
        interact(env, None, root, 40, write=lambda _, td: seen.append(td["next"]["done"]))
    assert torch.stack(seen).any(0).all()


def test_nothing_is_read_back_with_a_recurrent_policy():
    plain = TensorEnv(MaskedCartPole(), 5, categorical_action_encoding=True)
    policy = recurrent_policy(plain)
    env = TensorEnv(MaskedCartPole(), 5, categorical_action_encoding=True, policy=policy)
    root = env.reset(seed=0)
    with refuse_read_back():
        interact(env, policy, root, 30, write=lambda _, td: None)


def test_the_host_would_read_back():
    env = GymEnv("recurl/TMaze-v0", 2)
    with pytest.raises(Exception, match="read back to the host"), refuse_read_back():
        env.maybe_reset(env.reset())


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_saved_state_resumes_exactly(dynamics):
    env, other = (everything(TensorEnv(dynamics, 4)) for _ in range(2))
    td = env.rollout(5, break_when_any_done=False)[:, -1]
    root = env.maybe_reset(env.carry(td))
    state = saved_and_loaded(env.get_state())
    torch.manual_seed(1)
    expected = env.rollout(20, break_when_any_done=False, auto_reset=False, tensordict=root.clone())
    for made in (other, env):
        made.set_state(state)
        torch.manual_seed(1)
        again = made.rollout(20, break_when_any_done=False, auto_reset=False, tensordict=root.clone())
        assert (again == expected).exclude("collector").all()


def test_a_seed_decides_the_episodes(dynamics):
    one, other = TensorEnv(dynamics, 300), TensorEnv(dynamics, 300)

    def begun(env, seed=None):
        root = env.reset(seed=seed)
        return TensorDict(env.get_state()["tensors"]).update(root.exclude("done", "terminated", "truncated"))

    first, again = begun(one, 3), begun(one)
    other.set_seed(3)
    assert (begun(other) == first).all()
    assert (begun(other) == again).all()
    for unlike in (begun(one, 4), again, begun(TensorEnv(dynamics, 300)), begun(TensorEnv(dynamics, 300))):
        assert not (unlike == first).all()


@pytest.mark.parametrize("action", [torch.tensor([0, 1]), torch.eye(2), torch.eye(2, dtype=torch.bool)], ids=str)
def test_actions_may_be_integers_or_one_hot(action):
    env, expected = TensorEnv(MaskedCartPole(), 2), TensorEnv(MaskedCartPole(), 2)
    roots = [made.reset(seed=0) for made in (env, expected)]
    came = env.step(roots[0].set("action", action))
    assert (came["next"] == expected.step(roots[1].set("action", torch.tensor([0, 1])))["next"]).all()


@pytest.mark.parametrize(
    ("dynamics", "action", "message"),
    [
        (
            TMaze(),
            torch.zeros(2, 4, dtype=torch.int64),
            r"integers of shape \[2\], or one-hot of shape \[2, 3\], got .*int64",
        ),
        (TMaze(), torch.zeros(2), r"integers of shape \[2\], .* got torch\.float32 of shape \[2\]"),
        (TMaze(), torch.zeros(2, dtype=torch.bool), r"integers of shape \[2\], .* got torch\.bool"),
        (
            MaskedPendulum(),
            torch.zeros(2),
            r"floating-point numbers of shape \[2, 1\], got torch\.float32 of shape \[2\]",
        ),
        (MaskedPendulum(), torch.zeros(2, 1, dtype=torch.int64), r"floating-point numbers .* got torch\.int64"),
    ],
)
def test_actions_of_another_shape_or_dtype_are_refused(dynamics, action, message):
    env = TensorEnv(dynamics, 2)
    with pytest.raises(ArgumentError, match=message):
        env.step(env.reset().set("action", action))


def test_invalid_arguments_are_refused():
    with pytest.raises(ArgumentTypeError, match="steps the Dynamics of a task, got str"):
        TensorEnv("recurl/TMaze-v0", 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_envs must be an integer of at least 1"):
        TensorEnv(TMaze(), 0)


def test_use_before_the_first_reset_is_refused():
    env = TensorEnv(TMaze(), 2)
    for use in (
        env.get_state,
        lambda: env.step(TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2])),
        lambda: env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])),
    ):
        with pytest.raises(UsageError, match="no state before the first reset of all rows"):
            use()


def test_a_saved_state_that_does_not_fit_is_refused():
    env = TensorEnv(TMaze(), 2)
    env.reset()
    state = env.get_state()
    with pytest.raises(ArgumentError, match="built with the same arguments"):
        TensorEnv(TMaze(), 3).set_state(state)
    with pytest.raises(ArgumentError, match="built with the same arguments"):
        TensorEnv(MaskedCartPole(), 2).set_state(state)
    with pytest.raises(ArgumentError, match="a different device type than cpu"):
        env.set_state(state | {"generator": torch.zeros(16, dtype=torch.uint8)})
    host = GymEnv("recurl/TMaze-v0", 2)
    host.reset()
    with pytest.raises(ArgumentError, match=r"restores only states saved by a TensorEnv, got .*'gym'"):
        env.set_state(host.get_state())
    with pytest.raises(ArgumentError, match=r"restores only states saved by an equal environment, got .*'tensors'"):
        host.set_state(state)


def test_a_collector_resumes_exactly_from_a_saved_state():
    def collector():
        torch.manual_seed(0)
        env = TensorEnv(MaskedCartPole(20), 4, categorical_action_encoding=True)
        return Collector(env, recurrent_policy(env), frames_per_batch=100)

    one, other = collector(), collector()
    assert one.explain()["tensors"] is None
    one.set_seed(0)
    next(iter(one))
    other.load_state_dict(saved_and_loaded(one.state_dict()))
    batches = []
    for made in (one, other):
        torch.manual_seed(7)
        batches.append(next(iter(made)).exclude(("collector", "traj_ids")))
    assert (batches[0] == batches[1]).all()
    after, root = batches[0]["next", "observation"][:, :-1], batches[0]["observation"][:, 1:]
    done = batches[0]["next", "done"][:, :-1]
    assert (after != root).all(-1, keepdim=True).equal(done)
    assert done.any()
    assert batches[0]["is_init"][:, 1:].equal(done)


def test_a_collector_reads_nothing_back():
    plain = TensorEnv(MaskedCartPole(20), 4, categorical_action_encoding=True)
    policies = [None, recurrent_policy(plain), TensorDictSequential(*recurrent_policy(plain))]
    policies[2].register_forward_hook(lambda *_: None)
    for policy, lowered in zip(policies, (True, True, False), strict=True):
        env = TensorEnv(MaskedCartPole(20), 4, categorical_action_encoding=True)
        # Samples are checked for NaN on the CPU only.
        collector = Collector(env, policy, frames_per_batch=200, exploration_type=ExplorationType.DETERMINISTIC)
        assert (collector.explain()["tensors"] is None) == lowered
        with refuse_read_back():
            batches = [next(iter(collector)) for _ in range(2)]
        ids, steps = (
            torch.cat([batch["collector", key] for batch in batches], 1) for key in ("traj_ids", "traj_steps")
        )
        done = torch.cat([batch["next", "done"] for batch in batches], 1)[:, :-1, 0]
        assert done.any()
        assert (ids[:, 1:] != ids[:, :-1]).equal(done)
        assert (steps[:, 1:] == 0).equal(done)
        assert len(set(ids.flatten().tolist())) == 4 + int(done.sum())


def test_evaluation():
    env = TensorEnv(RepeatPrevious(k=1, num_symbols=2, episode_length=5), 3, categorical_action_encoding=True)
    policy = TensorDictModule(lambda seen: seen.argmax(-1), ["observation"], ["action"])
    env.set_seed(0)
    evaluation = evaluate_policy(policy, env, episodes=7)
    assert evaluation.lengths == [5] * 7
    assert 0 < evaluation.mean_return < 1


def test_dynamics_of_registered_tasks():
    for name, task in TASKS.items():
        assert type(dynamics_of(name)) is type(task.vector_env(1).dynamics)
    assert dynamics_of("Pendulum-v1") is None
    with pytest.raises(ArgumentError, match="can't create 'Nothing-v0'"):
        dynamics_of("Nothing-v0")


def test_a_task_of_ones_own_is_registered():
    register_dynamics("Short-v0", TMaze)
    try:
        assert dynamics_of("Short-v0", corridor_length=2).step_limit == 12
        env = GymEnv("Short-v0", 3, corridor_length=2)
        check_env_specs(env)
        assert isinstance(env.gym_env.unwrapped, TaskVectorEnv)
        assert env.can_save_state
        single = gymnasium.make("Short-v0", corridor_length=2)
        assert single.reset(seed=0)[0].shape == (4,)
    finally:
        del gymnasium.registry["Short-v0"]
