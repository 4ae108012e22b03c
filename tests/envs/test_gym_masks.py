import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.specs import Binary, Categorical, Composite, Unbounded
from recurl.envs import EnvBase, GymEnv, GymWrapper, InitTracker, StepCounter
from recurl.envs.utils import check_env_specs
from tests.envs.masked import MaskedEnv, MaskedRows, counting_mask
from tests.envs.small import CountEnv, spaces

MASKED = "RecurlTest/Masked-v0"


def expected(times, n=4):
    return torch.from_numpy(np.stack([counting_mask(int(time), n) for time in times]))


def check(played, time, length=5, empty=True):
    """Every root and every ``next`` has the mask of its own time step; after a termination the mask is empty."""
    for data, key in ((played, time), (played["next"], time)):
        times, found = data[key].flatten(), data["action_mask"].reshape(-1, 4)
        last = (times == length) & empty
        assert torch.equal(found[~last], expected(times[~last]))
        assert not found[last].any()
    assert played["next", "done"].any()


@pytest.mark.parametrize("dtype", [np.int8, np.bool_])
@pytest.mark.parametrize("where", ["observation", "info", "both"])
@pytest.mark.parametrize("rows", [None, "sync", "same_step"])
def test_masks_are_found_and_kept_to(where, dtype, rows):
    """The environment rejects forbidden choices, so a random rollout shows that none are drawn."""
    time = "observation" if where == "info" else "time"
    if rows is None:
        env = GymWrapper(MaskedEnv(where, dtype=dtype))
    else:
        mode = AutoresetMode.DISABLED if rows == "sync" else AutoresetMode.SAME_STEP
        env = GymWrapper(SyncVectorEnv([lambda: MaskedEnv(where, dtype=dtype)] * 3, autoreset_mode=mode))
    check_env_specs(env)
    assert env.observation_spec["action_mask"] == Binary((*env.batch_size, 4))
    check(env.rollout(12, break_when_any_done=False), time)
    assert env.explain()["tensors"] is None


@pytest.mark.usefixtures("forked_environments")
def test_asynchronous_rows():
    with GymEnv(f"tests.envs.masked:{MASKED}", num_envs=2, vectorization_mode="async", where="info") as env:
        check(env.rollout(12, break_when_any_done=False), "observation")


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
def test_native_rows(mode):
    env = GymWrapper(MaskedRows(3, mode))
    check_env_specs(env)
    check(env.rollout(12, break_when_any_done=False), "observation", empty=False)


def test_same_step_rows_without_a_final_mask():
    env = GymWrapper(MaskedRows(3, final=False))
    with pytest.raises(ArgumentError, match=r"missing in the info of environment \[0\]"):
        env.rollout(4, break_when_any_done=False)


def test_gymnasium_s_own():
    env = GymEnv("Taxi-v4", num_envs=2, vectorization_mode="sync")
    check_env_specs(env)
    assert env.observation_spec["action_mask"].shape == (2, 6)


def test_any_name():
    env = GymWrapper(MaskedEnv(entry="legal"), action_mask="legal")
    assert sorted(env.observation_spec.keys()) == ["action_mask", "time"]
    check_env_specs(env)
    assert "legal" in GymWrapper(MaskedEnv(entry="legal")).observation_spec  # an ordinary observation
    nested = spaces.Dict({"game": spaces.Dict({"legal": spaces.MultiBinary(3), "x": spaces.Discrete(2)})})
    for name in ("game.legal", ("game", "legal")):
        env = GymWrapper(CountEnv(observation_space=nested), action_mask=name)
        assert sorted(map(str, env.observation_spec.keys(True, True))) == ["('game', 'x')", "action_mask"]


def test_none_leaves_an_observation():
    env = GymWrapper(MaskedEnv(), action_mask=None)
    assert env.observation_spec["action_mask"].dtype is torch.int8
    check = env.rand_action()  # needs no root
    assert check["action"].shape == (4,)
    assert "action_mask" not in GymWrapper(MaskedEnv("info"), action_mask=None).observation_spec


def test_looking_into_info_costs_no_reset():
    env = GymWrapper(MaskedEnv("info"))
    env.reset()
    assert env.gym_env.resets == 1
    env.reset()
    assert env.gym_env.resets == 2
    env.reset(seed=3)
    assert env.gym_env.resets == 3


class Forms(CountEnv):
    """Returns the same mask in ``info`` in one of the supported formats."""

    def __init__(self, form, space):
        super().__init__(action_space=space)
        self.form = form

    def reset(self, **options):
        return super().reset(**options)[0], {"action_mask": self.form}

    def step(self, action):
        return *super().step(action)[:4], {"action_mask": self.form}


PAIR = spaces.MultiDiscrete([2, 3])
HYBRID = spaces.Dict({"aim": spaces.Box(-1, 1, (2,)), "keys": PAIR, "move": spaces.Discrete(2)})
LEFT, RIGHT = np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8)


@pytest.mark.parametrize(
    ("space", "form", "flat"),
    [
        (PAIR, (LEFT, RIGHT), [0, 1, 1, 0, 1]),
        (PAIR, [LEFT, RIGHT], [0, 1, 1, 0, 1]),
        (PAIR, np.array([0, 1, 1, 0, 1]), [0, 1, 1, 0, 1]),
        (PAIR, [0, 1, 1, 0, 1], [0, 1, 1, 0, 1]),
        (spaces.MultiDiscrete([2, 2]), np.array([[1, 0], [0, 1]]), [1, 0, 0, 1]),
        (HYBRID, {"keys": (LEFT, RIGHT), "move": LEFT}, [0, 1, 1, 0, 1, 0, 1]),
        (spaces.Tuple([PAIR, spaces.Discrete(2)]), ((LEFT, RIGHT), LEFT), [0, 1, 1, 0, 1, 0, 1]),
        (HYBRID, np.array([0, 1, 1, 0, 1, 0, 1], bool), [0, 1, 1, 0, 1, 0, 1]),
    ],
)
@pytest.mark.parametrize("rows", [None, 2])
def test_forms(space, form, flat, rows):
    if rows is None:
        env = GymWrapper(Forms(form, space))
    else:
        env = GymWrapper(SyncVectorEnv([lambda: Forms(form, space)] * rows, autoreset_mode="Disabled"))
    check_env_specs(env)
    found = env.rollout(9, break_when_any_done=False)["action_mask"]
    assert torch.equal(found, torch.tensor(flat).bool().expand(found.shape))


@pytest.mark.parametrize(
    "form", [np.ones(4), np.array([0, 1, 2, 0, 1]), (LEFT, LEFT), "yes", np.full(5, 0.5), {"keys": LEFT}]
)
def test_other_forms_are_refused(form):
    with pytest.raises(ArgumentError, match="'action_mask' in the info must hold 5 zeros and ones"):
        GymWrapper(Forms(form, PAIR)).reset()


def test_names_and_actions_that_do_not_fit_are_refused():
    with pytest.raises(
        ArgumentError, match=r"The mask 'legal' must be in the observation or in the info .*'action_mask'"
    ):
        GymWrapper(MaskedEnv("info"), action_mask="legal")
    for where in ("info", "observation"):
        with pytest.raises(ArgumentError, match=r"did you mean 'legal_moves'\?"):
            GymWrapper(MaskedEnv(where, entry="legal_moves"), action_mask="legal_move")
    nested = GymWrapper(Forms({"legal": np.ones(5)}, PAIR), action_mask="action_mask.legal")
    assert nested.reset()["action_mask"].all()
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2)})
    box = CountEnv(observation_space=space, action_space=spaces.Box(-1, 1, (2,)))
    with pytest.raises(ArgumentError, match="Masks are for Discrete and MultiDiscrete actions"):
        GymWrapper(box)
    assert "action_mask" in GymWrapper(box, action_mask=None).observation_spec


def test_a_mask_may_be_missing_after_the_end_only():
    class Forgetful(MaskedEnv):
        def step(self, action):
            *result, info = super().step(action)
            return *result, {} if self.time >= self.forgets else info

    env = GymWrapper(Forgetful("info"))
    env.gym_env.forgets = 5
    assert not env.rollout(5)["next", "action_mask"][-1].any()
    env = GymWrapper(Forgetful("info"))
    env.gym_env.forgets = 4
    with pytest.raises(ArgumentError, match="must be in every info, except after the last step"):
        env.rollout(5)


@pytest.mark.parametrize("limit", [None, 3])
def test_an_empty_mask_is_refused_where_an_action_is_taken(limit):
    env = GymWrapper(SyncVectorEnv([MaskedEnv, lambda: MaskedEnv(empty_at=3)], autoreset_mode="Disabled"))
    if limit is None:
        with pytest.raises(UsageError, match=r"the mask of environments \[1\] allows none"):
            env.rollout(5)
    else:  # truncated there, so no action is taken
        env = env.append_transform(StepCounter(max_steps=limit)).append_transform(InitTracker())
        assert not env.rollout(7, break_when_any_done=False)["next", "action_mask"][1, 2].any()
    with pytest.raises(UsageError, match="the mask of the environment allows none"):
        GymWrapper(MaskedEnv(empty_at=0)).reset()


def test_random_actions_need_the_root():
    env = GymWrapper(MaskedEnv())
    with pytest.raises(MissingKeyError, match=r"env.rand_action\(env.reset\(\)\)"):
        env.rand_action()


class OwnEnv(EnvBase):
    """Custom environment with masks."""

    def __init__(self, mask):
        super().__init__(
            observation_spec=Composite({"observation": Unbounded(1), "action_mask": mask}), action_spec=Categorical(3)
        )

    def _reset(self, tensordict):
        return TensorDict({"observation": torch.zeros(1), "action_mask": torch.tensor([False, True, False])})

    def _step(self, tensordict):
        assert tensordict["action"] == 1
        ends = {"terminated": torch.tensor([False]), "truncated": torch.tensor([False])}
        return self._reset(None).update({"reward": torch.ones(1), **ends})

    def _set_seed(self, seed):
        pass


def test_environments_of_ones_own():
    check_env_specs(OwnEnv(Binary((3,))))
    with pytest.raises(ArgumentError, match=r"'action_mask' must be bool \[3\]"):
        OwnEnv(Binary((4,)))


def test_env_kwargs_may_be_called_name():
    gym.register("RecurlTest/Named-v0", lambda name: CountEnv(length=len(name)))
    assert GymEnv("RecurlTest/Named-v0", num_envs=2, name="abc").rollout(9).shape == (2, 3)
    gym.registry.pop("RecurlTest/Named-v0")
