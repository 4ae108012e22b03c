"""Parameters of environments that are changed between steps."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict.nn import TensorDictModule

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, TensorEnv, VecTensorEnv
from recurl.envs.tasks import MaskedArm, MaskedArmVectorEnv
from recurl.envs.trials import TrialDynamics
from recurl.transforms import RewardSum
from tests.envs.test_batched import Liar
from tests.envs.test_vec_tensor_env import Simulator


class Rod(gym.Env):
    """Observes its mass, which an episode draws from a range."""

    observation_space, action_space = Box(0, 9, (1,)), Box(-1, 1, (1,))

    def __init__(self):
        self.masses = (1.0, 1.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.mass = self.np_random.uniform(*self.masses)
        return np.full(1, self.mass, np.float32), {}

    def step(self, action):
        return np.full(1, self.mass, np.float32), 0.0, False, True, {}


class Setter(Rod):
    """Takes its parameters by a method."""

    def set_parameters(self, values):
        if "size" not in values:
            raise ArgumentError(f"there is only a size, got {values}")
        self.masses = (values["size"], values["size"])


gym.register("tests/Rod-v0", lambda: gym.wrappers.TimeLimit(Rod(), 3))
gym.register("tests/Setter-v0", Setter)


@pytest.mark.parametrize(
    "make",
    [
        partial(GymEnv, "tests/Rod-v0"),
        partial(GymEnv, "tests/Rod-v0", 3),
        pytest.param(partial(GymEnv, "tests/Rod-v0", 2, vectorization_mode="async"), marks=pytest.mark.slow),
        lambda: GymEnv("tests/Rod-v0", 2).append_transform(RewardSum()),
        lambda: SerialEnv(2, partial(GymEnv, "tests/Rod-v0")),
        lambda: ParallelEnv(2, partial(GymEnv, "tests/Rod-v0", 2)),
    ],
)
def test_attributes_of_gymnasium_environments_are_set(make):
    with make() as env:
        assert (env.reset(seed=0)["observation"] == 1).all()
        env.set_parameters({"masses": (5, 5.0)})
        assert (env.reset()["observation"] == 5).all()
        with pytest.raises(ArgumentError, match=r"masse can't be set, as .* has neither such an attribute nor"):
            env.set_parameters({"masses": (2.0, 2.0), "masse": 1})
        assert (env.reset()["observation"] == 5).all()


def test_an_environment_may_take_parameters_by_a_method():
    env = GymEnv("tests/Setter-v0", 2)
    env.set_parameters({"size": np.float32(4)})
    assert (env.reset()["observation"] == 4).all()
    with pytest.raises(ArgumentError, match="there is only a size"):
        env.set_parameters({"length": 3})


def test_what_is_no_parameter_is_refused():
    env = GymEnv("tests/Rod-v0", 2)
    for values, message in (
        ({"reset": 1}, "reset can't be set, as it is a method"),
        ({"_np_random": 1}, "must be a public attribute"),
        ({"action_space": 1}, "must be a public attribute"),
        ({"masses": "1"}, "masses must be a finite number, or a list or tuple of them, got '1'"),
        ({"masses": (1.0, float("nan"))}, "masses must be a finite number"),
        ({"masses": None}, "masses must be a finite number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            env.set_parameters(values)
    with pytest.raises(ArgumentError, match=r"MaskedCartPole has no parameter size: it has none\."):
        GymEnv("recurl/MaskedCartPole-v1", 2).set_parameters({"size": 1})
    with pytest.raises(ArgumentError, match="randomization must be a number from 0 to 1; got 2"):
        GymEnv("recurl/MaskedArm-v0", 2).set_parameters({"randomization": 2})


@pytest.mark.parametrize(
    "make",
    [
        partial(GymEnv, "recurl/MaskedArm-v0"),
        partial(GymEnv, "recurl/MaskedArm-v0", 3),
        partial(GymEnv, "recurl/MaskedArm-v0", 3, vectorization_mode="sync"),
        lambda: GymWrapper(MaskedArmVectorEnv(2, autoreset_mode="Disabled")),
        lambda: TensorEnv(MaskedArm(), 4),
    ],
)
def test_parameters_of_tasks_count_from_the_next_episode(make):
    env = make()
    assert (env.reset(seed=0)["privileged"][..., 2:] != 1).any()
    root = env.rand_action(env.reset())
    env.set_parameters({"randomization": 0})
    assert (env.step(root)["next", "privileged"][..., 2:] != 1).any()
    assert (env.reset()["privileged"][..., 2:] == 1).all()
    env.set_parameters({"randomization": 0.5})
    factors = env.reset()["privileged"][..., 2:]
    assert (factors != 1).all()
    assert ((factors - 1).abs() <= 0.5 * torch.tensor([0.5, 0.5, 0.75, 0.3]) + 1e-6).all()


def test_a_trial_has_the_parameters_of_its_task():
    class Vector(MaskedArm):
        def __init__(self):
            super().__init__(max_episode_steps=2)
            self.observation_space = Box(-20, 20, (6,))

        def observe(self, xp, state, steps):
            return super().observe(xp, state, steps)["privileged"]

    env = TensorEnv(TrialDynamics(Vector(), 2), 3)
    env.set_parameters({"randomization": 0.0})
    assert (env.reset()["observation"][:, 2:6] == 1).all()


def test_the_dynamics_of_the_caller_stay_as_they_are():
    task = MaskedArm(randomization=0.25)
    TensorEnv(task, 2).set_parameters({"randomization": 0.5})
    assert task.randomization == 0.25


def test_a_simulator_has_parameters():
    simulator = Simulator()
    env = VecTensorEnv(simulator)
    simulator.friction = 1.0
    env.set_parameters({"friction": [0.5, 1.5]})
    assert simulator.friction == [0.5, 1.5]
    with pytest.raises(ArgumentError, match="neither such an attribute"):
        env.set_parameters({"frictions": 1})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_read_the_present_values(compiled):
    env = TensorEnv(MaskedArm(max_episode_steps=2), 4, device="cpu")
    env.set_seed(0)
    collector = Collector(env, None if not compiled else Still(), frames_per_batch=32, compile_step=compiled)
    factors = []
    for scale in (1.0, 0.0, 0.5, 0.5, 0.0):
        env.set_parameters({"randomization": scale})
        batch = collector.collect()
        factors.append(batch["privileged"][:, -2:, 2:])
    one = [bool((found == 1).all()) for found in factors]
    assert one == [False, True, False, False, True]


class Still(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = TensorDictModule(lambda x: x[..., :2] * 0, in_keys=["observation"], out_keys=["action"])
        self.in_keys, self.out_keys = self.part.in_keys, self.part.out_keys

    def forward(self, tensordict):
        return self.part(tensordict)


def test_other_environments_have_none():
    with pytest.raises(UnsupportedError, match="has no parameters that can be set"):
        Liar("nothing").set_parameters({"gravity": 1})
