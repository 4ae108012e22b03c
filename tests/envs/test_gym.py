from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UnsupportedError, UsageError
from recurl.envs import GymEnv, GymWrapper, check_env_specs
from tests.envs.small import CountEnv, NativeSameStep, RowsEnv, SavingEnv

spaces = gym.spaces
MODES = {"single": {}, "sync": {"num_envs": 3, "vectorization_mode": "sync"}} | {
    mode: {"num_envs": 3, "vectorization_mode": mode} for mode in ("async", "vector_entry_point")
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def cartpole(request):
    env = GymEnv("CartPole-v1", **request.param)
    env.set_seed(0)
    torch.manual_seed(0)
    yield env
    env.close()


def check_transitions(batch, limit=2.4, angle=0.2095):
    """Every frame is a real step; every episode starts from a reset and ends with its true final observation."""
    observation, after = batch["observation"], batch["next", "observation"]
    done = batch["next", "done"].squeeze(-1)
    assert torch.equal(batch["next", "done"], batch["next", "terminated"] | batch["next", "truncated"])
    assert (batch["next", "reward"] == 1).all()
    assert torch.equal(after[..., :-1, :][~done[..., :-1]], observation[..., 1:, :][~done[..., :-1]])
    assert (observation[..., 1:, :][done[..., :-1]].abs() <= 0.05).all()
    fallen = (after[..., 0].abs() > limit) | (after[..., 2].abs() > angle)
    assert torch.equal(fallen, batch["next", "terminated"].squeeze(-1))
    assert not batch["done"].any()


@pytest.mark.usefixtures("forked_environments")
def test_cartpole_has_no_dead_step(cartpole):
    check_env_specs(cartpole)
    batch = cartpole.rollout(60, break_when_any_done=False)
    assert batch.shape == (*cartpole.batch_size, 60)
    assert batch["next", "done"].sum() >= 2
    assert batch["next", "reward"].dtype == torch.float32
    check_transitions(batch)


def test_counted_frames_equal_executed_actions(monkeypatch):
    executed = []

    def step(self, action, real=CartPoleEnv.step):
        assert self.steps_beyond_terminated is None
        executed.append(action)
        return real(self, action)

    def vector_step(self, actions, real=CartPoleVectorEnv.step):
        assert not self.prev_done.any()
        executed.extend(actions)
        return real(self, actions)

    monkeypatch.setattr(CartPoleEnv, "step", step)
    monkeypatch.setattr(CartPoleVectorEnv, "step", vector_step)
    for mode in ("single", "sync", "vector_entry_point"):
        with GymEnv("CartPole-v1", categorical_action_encoding=True, **MODES[mode]) as env:
            executed.clear()
            batch = env.rollout(50, break_when_any_done=False)
            assert len(executed) == batch.numel()
            rows = batch["action"].T if env.batch_size else batch["action"]
            assert executed == rows.flatten().tolist()


@pytest.mark.full
@pytest.mark.slow
def test_async_frames_equal_executed_actions():
    """With real spawned processes."""
    with GymEnv("CartPole-v1", num_envs=2, vectorization_mode="async") as env:
        batch = env.rollout(40, break_when_any_done=False)
        check_transitions(batch)
        done = batch["next", "done"].squeeze(-1)
        running = [40 - (int(row.nonzero()[-1]) + 1 if row.any() else 0) for row in done]
        finished = done[:, -1]
        elapsed = env.gym_env.get_attr("_elapsed_steps")
        assert [n for n, over in zip(elapsed, finished, strict=True) if not over] == [
            n for n, over in zip(running, finished, strict=True) if not over
        ]


@pytest.mark.parametrize("mode", ["single", "sync", "vector_entry_point"])
def test_truncated_and_terminated_are_separate(mode):
    with GymEnv("CartPole-v1", max_episode_steps=7, **MODES[mode]) as env:
        after = env.rollout(21, break_when_any_done=False)["next"]
        assert not after["terminated"].any()
        assert after["truncated"].squeeze(-1).nonzero()[:, -1].unique().tolist() == [6, 13, 20]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("forked_environments")
def test_the_same_seed_gives_the_same_run(mode):
    runs = []
    for seed in (5, 5, 6):
        with GymEnv("CartPole-v1", **MODES[mode]) as env:
            torch.manual_seed(0)
            env.set_seed(seed)
            runs.append(env.rollout(30, break_when_any_done=False).exclude("collector"))
            torch.manual_seed(0)
            env.reset(seed=seed)
            again = env.reset(seed=seed)["observation"]
            assert torch.equal(again, runs[-1]["observation"][..., 0, :])
    assert (runs[0] == runs[1]).all()
    assert not (runs[0]["observation"] == runs[2]["observation"]).all()


def test_rows_of_a_batch_differ_and_match_single_seeds():
    batch = GymEnv("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point").reset(seed=4)["observation"]
    assert batch.unique(dim=0).shape[0] == 3
    sync = GymEnv("CartPole-v1", num_envs=3).reset(seed=4)["observation"]
    assert torch.equal(sync[1], GymEnv("CartPole-v1").reset(seed=5)["observation"])


@pytest.mark.parametrize("num_envs", [None, 2])
def test_continuous_actions(num_envs):
    env = GymEnv("Pendulum-v1", num_envs=num_envs, max_episode_steps=5)
    check_env_specs(env)
    assert env.action_spec.shape == (*env.batch_size, 1)
    assert float(env.action_spec_unbatched.high) == 2.0
    batch = env.rollout(12, break_when_any_done=False)
    assert batch["observation"].dtype == torch.float32
    assert batch["next", "truncated"].sum() == 2 * env.batch_size.numel()
    root = env.reset()
    with pytest.raises(ArgumentError, match=r"must be torch\.float32 of shape"):
        env.step(root.set("action", torch.zeros(*env.batch_size, 2)))
    with pytest.raises(ArgumentError, match=r"got torch\.int64"):
        env.step(root.set("action", torch.zeros(*env.batch_size, 1, dtype=torch.int64)))


def test_tensors_are_on_the_device_and_owned_by_the_caller():
    env = GymEnv("CartPole-v1", num_envs=2, device="cpu")
    check_env_specs(env)
    td = env.rand_step()
    assert td.device == td["next"].device == torch.device("cpu")
    assert env.action_spec.device == env.observation_spec["observation"].device == torch.device("cpu")
    td["next", "done"].fill_(True)
    env.rand_step(env.carry(td))


def wrap(num_envs=None, **kwargs):
    if num_envs is None:
        return GymWrapper(CountEnv(**kwargs))
    mode = AutoresetMode.DISABLED
    return GymWrapper(SyncVectorEnv([lambda: CountEnv(**kwargs)] * num_envs, autoreset_mode=mode))


@pytest.mark.parametrize("num_envs", [None, 2])
def test_dict_and_image_observations(num_envs):
    space = spaces.Dict(
        {
            "pixels": spaces.Box(0, 255, (4, 5, 3), np.uint8),
            "body": spaces.Dict({"joints": spaces.Box(-1, 1, (2,), np.float64), "contact": spaces.MultiBinary(3)}),
            "room": spaces.Discrete(4, start=2),
            "levels": spaces.MultiDiscrete([2, 3]),
            "scalar": spaces.Box(-np.inf, np.inf, (), np.float32),
        }
    )
    env = wrap(num_envs, observation_space=space)
    check_env_specs(env)
    batch = env.rollout(6, break_when_any_done=False)
    assert batch["pixels"].dtype == torch.uint8
    assert batch["pixels"].shape[-3:] == (4, 5, 3)
    assert batch["body", "joints"].dtype == torch.float32
    assert batch["next", "body", "contact"].dtype == torch.int8
    assert (batch["room"].sum(-1) == 1).all()
    assert batch["levels"].dtype == torch.int64
    assert batch["scalar"].shape == batch.shape
    carried = batch["next"][..., :3]
    assert torch.equal(carried["body", "joints"], batch["body", "joints"][..., 1:4, :])
    assert batch["next", "done"].sum() == env.batch_size.numel()


def test_observations_share_no_memory_with_the_environment():
    env = wrap(2)
    first = env.reset()["observation"]
    env.rand_step(env.reset())
    assert first.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("space", [spaces.Tuple([spaces.Discrete(2)]), spaces.Text(3)])
def test_action_spaces_without_tensor_form_are_refused(space):
    with pytest.raises(UnsupportedError, match="The action space must be"):
        wrap(action_space=spaces.Dict({"text": spaces.Text(3)}))


class TestDiscreteActions:
    @pytest.mark.parametrize("categorical", [True, False])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_integers_and_one_hot_are_distinguished_by_shape(self, categorical, dtype):
        inner = CountEnv()
        env = GymWrapper(inner, categorical_action_encoding=categorical)
        assert env.action_spec.shape == (() if categorical else (3,))
        for action in (torch.tensor(2, dtype=dtype), torch.tensor([0, 0, 1], dtype=dtype)):
            env.step(env.reset().set("action", action))
        for kind in (torch.bool, torch.float32):
            env.step(env.reset().set("action", torch.tensor([0, 1, 0], dtype=kind)))
        assert inner.actions == [2, 2, 1, 1]

    def test_batches(self):
        env = wrap(2)
        children = env.gym_env.envs
        env.step(env.reset().set("action", torch.tensor([2, 0])))
        env.step(env.reset().set("action", torch.eye(3)[[1, 2]]))
        assert [child.actions for child in children] == [[2, 1], [0, 2]]

    def test_start(self):
        inner = CountEnv(action_space=spaces.Discrete(3, start=-1))
        env = GymWrapper(inner)
        env.step(env.reset().set("action", torch.tensor(0)))
        assert inner.actions == [-1]

    @pytest.mark.parametrize(
        "action",
        [
            torch.tensor([3, 0]),
            torch.tensor([-1, 0]),
            torch.tensor([0.0, 1.0]),
            torch.tensor([[0], [1]]),
            torch.zeros(2, 3),
            torch.ones(2, 3),
            torch.full((2, 3), 1 / 3),
            torch.tensor([[2, -1, 0], [1, 0, 0]]),
            torch.zeros(2, 4, dtype=torch.int64),
            torch.tensor([True, False]),
        ],
        ids=str,
    )
    def test_invalid_actions_are_refused(self, action):
        env = wrap(2)
        with pytest.raises(ArgumentError, match="or one-hot of shape"):
            env.step(env.reset().set("action", action))
        assert all(not child.actions for child in env.gym_env.envs)


def test_multi_discrete_and_binary_actions():
    inner = CountEnv(action_space=spaces.MultiDiscrete([2, 3], start=[1, 0]))
    env = GymWrapper(inner)
    check_env_specs(env)
    env.step(env.reset().set("action", torch.tensor([1, 2])))
    assert inner.actions[-1].tolist() == [2, 2]
    for wrong in (torch.tensor([2, 0]), torch.tensor([0.0, 1.0]), torch.tensor([1])):
        with pytest.raises(ArgumentError, match="The action must hold integers"):
            env.step(env.reset().set("action", wrong))
    inner = CountEnv(action_space=spaces.MultiBinary(2))
    env = GymWrapper(inner)
    check_env_specs(env)
    env.step(env.reset().set("action", torch.tensor([True, False])))
    assert inner.actions[-1].tolist() == [1, 0]


def test_a_done_row_must_be_reset_first():
    env = wrap(2, length=1)
    td = env.rand_step()
    with pytest.raises(UsageError, match=r"Rows \[0 1\] are done"):
        env.rand_step(env.carry(td))
    root = env.carry(td)
    root = env.reset(root.set("_reset", torch.tensor([[True], [False]])))
    with pytest.raises(UsageError, match=r"Rows \[1\] are done"):
        env.rand_step(root)


class TestAutoresetModes:
    def test_next_step_instances_are_refused(self):
        with pytest.raises(ArgumentError, match=r"autoreset_mode=AutoresetMode\.DISABLED"):
            GymWrapper(gym.make_vec("CartPole-v1", 2, "vector_entry_point"))
        with pytest.raises(ArgumentError, match="autoreset_mode"):
            GymWrapper(SyncVectorEnv([CountEnv]))

    @pytest.mark.parametrize("as_dict", [False, True])
    def test_same_step_shows_the_true_final_observation(self, as_dict):
        env = GymWrapper(RowsEnv(2, AutoresetMode.SAME_STEP, as_dict))
        key = "a" if as_dict else "observation"
        batch = env.rollout(6, break_when_any_done=False)
        steps, after = batch[key][..., 0], batch["next", key][..., 0]
        assert steps.tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]
        assert after.tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
        assert batch[key][..., 1].tolist() == [[1, 1, 2, 2, 3, 3], [1, 1, 1, 2, 2, 2]]
        assert batch["next", "terminated"].sum() == 5

    def test_same_step_of_gymnasium(self):
        vector = SyncVectorEnv([lambda n=n: CountEnv(length=n) for n in (2, 3)], autoreset_mode=AutoresetMode.SAME_STEP)
        batch = GymWrapper(vector).rollout(6, break_when_any_done=False)
        assert batch["next", "observation"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
        assert [len(child.actions) for child in vector.envs] == [6, 6]

    def test_same_step_resets_done_rows_only(self):
        env = GymWrapper(RowsEnv(3, AutoresetMode.SAME_STEP))
        root = env.carry(env.rand_step(env.carry(env.rand_step())))
        assert root["done"].flatten().tolist() == [True, False, False]
        with pytest.raises(UsageError, match=r"rows \[1 2\] to reset are not done"):
            env.reset(root.copy().set("_reset", torch.tensor([True, True, True]).logical_xor(root["done"].flatten())))
        everything = env.reset(root.copy().set("_reset", torch.ones(3, 1, dtype=torch.bool)))
        assert everything["observation"].tolist() == [[0, 3], [0, 2], [0, 2]]

    def test_same_step_resets_done_rows_one_by_one(self):
        vector = SyncVectorEnv([lambda: CountEnv(length=1)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        env = GymWrapper(vector)
        root = env.carry(env.rand_step())
        for row in range(2):
            root = env.reset(root.set("_reset", torch.arange(2).eq(row).unsqueeze(-1)))
            assert root["done"].flatten().tolist() == [False, row == 0]
        assert root["observation"].flatten().tolist() == [0, 0]

    def test_native_environments_by_what_they_offer(self):
        gym.register("recurl-test/SameStep-v0", vector_entry_point=NativeSameStep)
        try:
            env = GymEnv("recurl-test/SameStep-v0", num_envs=2, vectorization_mode="vector_entry_point")
            batch = env.rollout(4, break_when_any_done=False)
            assert batch["next", "observation"][0, :, 0].tolist() == [1, 2, 1, 2]
            assert batch["observation"][0, :, 0].tolist() == [0, 1, 0, 1]
        finally:
            del gym.registry["recurl-test/SameStep-v0"]
        native = GymEnv("recurl/TMaze-v0", num_envs=2)
        assert native.gym_env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        assert type(native.gym_env).__name__ == "TMazeVectorEnv"
        assert isinstance(GymEnv("recurl/TMaze-v0", num_envs=2, vectorization_mode="sync").gym_env, SyncVectorEnv)
        assert isinstance(GymEnv("CartPole-v1", num_envs=2).gym_env, SyncVectorEnv)


class TestRefusals:
    def test_names_and_modes(self):
        with pytest.raises(ArgumentError, match="can't create 'NoSuchEnv-v0'"):
            GymEnv("NoSuchEnv-v0")
        with pytest.raises(ArgumentError, match="can't create 'no_such_module:Env-v0'"):
            GymEnv("no_such_module:Env-v0", num_envs=2)
        with pytest.raises(ArgumentError, match="needs num_envs"):
            GymEnv("CartPole-v1", vectorization_mode="sync")
        with pytest.raises(ArgumentError, match="num_envs must be at least 1"):
            GymEnv("CartPole-v1", num_envs=0)
        with pytest.raises(ArgumentError, match="vectorization_mode must be one of"):
            GymEnv("CartPole-v1", num_envs=2, vectorization_mode="threads")
        with pytest.raises(ArgumentError, match="can't create 'Pendulum-v1'"):
            GymEnv("Pendulum-v1", num_envs=2, vectorization_mode="vector_entry_point")
        with pytest.raises(ArgumentTypeError, match=r"A gymnasium\.Env"):
            GymWrapper("CartPole-v1")

    def test_missing_packages(self):
        def needy():
            raise gym.error.DependencyNotInstalled("pip install needy")

        gym.register("recurl-test/Needy-v0", entry_point=needy)
        try:
            with pytest.raises(MissingDependencyError, match="pip install needy"):
                GymEnv("recurl-test/Needy-v0")
        finally:
            del gym.registry["recurl-test/Needy-v0"]


def saving(kind):
    if kind == "single":
        return GymWrapper(gym.wrappers.TimeLimit(SavingEnv(length=50), 4))
    if kind == "sync":
        make = [lambda: gym.wrappers.TimeLimit(SavingEnv(length=50), 4)] * 2
        return GymWrapper(SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED))
    return GymEnv("recurl/MaskedCartPole-v1", num_envs=2)


class TestSavedState:
    @pytest.mark.parametrize("kind", ["single", "sync", "native"])
    def test_a_restored_environment_continues_as_the_saved_one(self, kind, tmp_path):
        env = saving(kind)
        assert env.can_save_state
        root = env.reset(seed=3)
        for _ in range(5):
            _, root = env.step_and_maybe_reset(env.rand_action(root))
        torch.save(env.get_state(), tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        torch.manual_seed(1)
        expected = env.rollout(11, break_when_any_done=False, auto_reset=False, tensordict=root).exclude("collector")
        other = saving(kind)
        other.set_state(saved)
        torch.manual_seed(1)
        found = other.rollout(11, break_when_any_done=False, auto_reset=False, tensordict=root).exclude("collector")
        assert (expected == found).all()

    def test_pending_seeds_and_done_rows_are_saved(self):
        env = saving("sync")
        env.set_seed(9)
        other = saving("sync")
        other.set_state(env.get_state())
        assert torch.equal(env.reset()["observation"], other.reset()["observation"])
        root = env.reset()
        for _ in range(4):
            root = env.carry(env.rand_step(root))
        other.set_state(env.get_state())
        with pytest.raises(UsageError, match="are done"):
            other.rand_step(root)

    @pytest.mark.parametrize("mode", [None, "sync", "vector_entry_point"])
    def test_so_do_environments_without_methods_for_it(self, mode):
        def make():
            return GymEnv("CartPole-v1", num_envs=2, vectorization_mode=mode)

        env = make()
        assert env.can_save_state
        root = env.reset(seed=1)
        for _ in range(9):
            _, root = env.step_and_maybe_reset(env.rand_action(root))
        other = make()
        other.set_state(env.get_state())
        for _ in range(60):
            root = env.rand_action(root)
            after, fresh = env.step_and_maybe_reset(root.clone())
            expected, other_fresh = other.step_and_maybe_reset(root.clone())
            assert (after["next"] == expected["next"]).all()
            assert torch.equal(fresh["observation"], other_fresh["observation"])
            root = fresh

    def test_states_of_earlier_versions_are_restored(self):
        env, old = saving("sync"), {"time": 2, "rng": np.random.default_rng(5).bit_generator.state}
        old |= {"array": torch.arange(2), "pair": (1, 2.5)}
        state = {"envs": [{"env": old, "elapsed": [2]}] * 2}
        root = env.rand_action(env.reset())
        env.set_state({"gym": state, "done": torch.zeros(2, 1, dtype=torch.bool), "seed": None})
        after = env.step(root)["next"]
        assert after["observation"].tolist() == [[pytest.approx(np.random.default_rng(5).random())]] * 2
        assert after["reward"].tolist() == [[3.0]] * 2

    def test_environments_of_unknown_state_say_so(self):
        env = GymWrapper(gym.wrappers.FrameStackObservation(SavingEnv(), 2))
        assert not env.can_save_state
        with pytest.raises(UnsupportedError, match="can't save its state: it was passed as an object, and the trial"):
            env.get_state()
