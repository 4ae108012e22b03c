"""Custom transforms in TorchRL's style: applied at resets and steps, or rejected at their definition."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError
from recurl.core.specs import Composite, Unbounded
from recurl.envs import EnvBase, GymWrapper, InitTracker, ParallelEnv, SerialEnv, TransformedEnv
from recurl.transforms import Compose, RewardSum, Transform


class Count(gym.Env):
    """Observes the step number within the episode, starting at 1; episodes end after ``length`` steps."""

    observation_space = gym.spaces.Box(0, 99, (2,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time = 1
        return np.full(2, self.time, np.uint8), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.time += 1
        return np.full(2, self.time, np.uint8), float(self.time), self.time > self.length, False, {}


def count(lengths: tuple[int, ...] = (3, 5)) -> EnvBase:
    return SerialEnv(len(lengths), [lambda length=length: GymWrapper(Count(length)) for length in lengths])


def tenfold(observation_spec: Composite) -> Composite:
    spec = observation_spec.clone()
    spec.set("observation", Unbounded(*spec.shape, 1, device=spec.device))
    return spec


class Applied(Transform):
    """Transform to another shape and dtype under the same key."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"])

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        assert value.dtype == torch.uint8
        return 10.0 * value[..., :1]

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return tenfold(observation_spec)


class Called(Transform):
    """Equivalent transform in TorchRL's other style."""

    def _call(self, next_tensordict: Any) -> Any:
        value = next_tensordict["observation"]
        assert value.dtype == torch.uint8
        return next_tensordict.set("observation", 10.0 * value[..., :1])

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return tenfold(observation_spec)


class Added(Transform):
    """New entry next to the old one, in memory that is written to again."""

    def __init__(self, out_key: Any = ("more", "observation")) -> None:
        super().__init__(["observation"], [out_key])
        self.memory = torch.zeros(2, 1)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self.memory.copy_(10.0 * value[..., :1])

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        spec = observation_spec.clone()
        spec.set(("more", "observation"), Unbounded(*spec.shape, 1))
        return spec


def expected(steps: int, length: int) -> list[float]:
    return [10.0 * (step % length + 1) for step in range(steps)]


@pytest.mark.parametrize("others", [[], [InitTracker(), RewardSum()]], ids=["alone", "with others"])
@pytest.mark.parametrize("make", [Applied, Called, Added])
@pytest.mark.parametrize("how", ["rollout", "collector", "inside", "twice"])
def test_resets_and_steps(how: str, make: type[Transform], others: list[Transform]) -> None:
    key = ("more", "observation") if make is Added else "observation"
    if how == "inside" and make is not Added:
        lengths = (3, 5)
        env = SerialEnv(
            2, [lambda n=n: TransformedEnv(GymWrapper(Count(n)), Compose(make(), *others)) for n in lengths]
        )
    elif how == "twice":
        env = TransformedEnv(TransformedEnv(count(), make()), Compose(*others))
    else:
        env = TransformedEnv(count(), Compose(make(), *others))
    if how == "collector":
        with Collector(env, frames_per_batch=22) as collector:
            batch = torch.cat([collector.collect(), collector.collect()], 1)
    else:
        batch = env.rollout(22, break_when_any_done=False)
    for row, length in enumerate((3, 5)):
        assert batch[key][row, :, 0].tolist() == expected(22, length)
        assert batch["next", key][row, :, 0].tolist() == [value + 10 for value in expected(22, length)]
    if others:
        assert batch["is_init"][1, :, 0].tolist() == [step % 5 == 0 for step in range(22)]
        assert batch["next", "episode_reward"][0, :3, 0].tolist() == [2.0, 5.0, 9.0]
    assert batch["next", "done"][0, :, 0].tolist() == [step % 3 == 2 for step in range(22)]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_workers() -> None:
    make = [lambda n=n: TransformedEnv(GymWrapper(Count(n)), Called()) for n in (3, 5)]
    for env in (
        ParallelEnv(2, make),
        TransformedEnv(ParallelEnv(2, [lambda n=n: GymWrapper(Count(n)) for n in (3, 5)]), Called()),
    ):
        batch = env.rollout(22, break_when_any_done=False)
        env.close()
        assert [batch["observation"][row, :, 0].tolist() for row in (0, 1)] == [expected(22, 3), expected(22, 5)]


def test_a_reset_of_some_rows_leaves_the_others_alone() -> None:
    env = TransformedEnv(count(), Applied())
    root = env.step_and_maybe_reset(env.rand_action(env.reset()))[1].set("extra", torch.ones(2, 1))
    for rows, after in (([True, False], [10.0, 20.0]), ([False, False], [20.0, 20.0])):
        again = env.reset(root.copy().set("_reset", torch.tensor(rows)))
        assert again["observation"].flatten().tolist() == after
        assert again["extra"].all()
        assert "_reset" not in again


def test_rewards_are_transformed_at_steps() -> None:
    class Scaled(Transform):
        def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
            return value / 2

    env = TransformedEnv(count((9,)), Scaled(in_keys=["reward"]))
    assert env.rollout(3)["next", "reward"].flatten().tolist() == [1.0, 1.5, 2.0]
    assert env.explain()["in place"] == "SerialEnv makes new tensors at every step"
    with Collector(env, frames_per_batch=3) as collector:
        assert collector.collect()["next", "reward"].flatten().tolist() == [1.0, 1.5, 2.0]
    with Collector(TransformedEnv(GymWrapper(Count(9)), Scaled(in_keys=["reward"])), frames_per_batch=3) as collector:
        assert collector.collect()["next", "reward"].flatten().tolist() == [1.0, 1.5, 2.0]
        assert "_apply_transform needs a TensorDict" in (collector.explain()["tensors"] or "")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("_inv_call", "gymnasium.wrappers.TransformAction"),
        ("_inv_apply_transform", "gymnasium.wrappers.TransformAction"),
        ("transform_action_spec", "gymnasium.wrappers.TransformAction"),
        ("transform_output_spec", "override transform_observation_spec"),
        ("transform_obs_spec", "override transform_observation_spec"),
        ("_reset_env_preprocess", "override _reset"),
        ("step", "override _step"),
        ("_call", "define _reset"),
    ],
)
def test_hooks_that_would_not_be_called_are_refused(name: str, advice: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Own.*{name}.*{advice}"):
        type("Own", (Transform,), {name: lambda self, tensordict: tensordict})


def test_attributes_of_torchrls_transforms() -> None:
    transform: Any = Called()
    with pytest.raises(
        AttributeError, match=r"'Called' object has no attribute 'parent': a transform doesn't know its"
    ):
        _ = transform.parent
    with pytest.raises(AttributeError, match=r"no attribute 'register_buffer': a transform isn't a torch\.nn\.Module"):
        transform.register_buffer("loc", torch.zeros(2))
    with pytest.raises(AttributeError, match=r"'Called' object has no attribute 'locc'$"):
        _ = transform.locc
    assert isinstance(copy.deepcopy(transform), Called)
    assert isinstance(pickle.loads(pickle.dumps(transform)), Called)

    class Net(Called, torch.nn.Module):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

    assert [name for name, _ in Net().named_parameters()] == ["linear.weight", "linear.bias"]
    assert copy.deepcopy(Net()).linear.weight.shape == (1, 2)


def test_keys_are_checked() -> None:
    with pytest.raises(UnsupportedError, match="no inverse transforms"):
        Transform(in_keys_inv=["action"])
    with pytest.raises(ArgumentError, match="one out_key for each in_key"):
        Transform(["a", "b"], ["c"])
    with pytest.raises(ArgumentTypeError, match=r"write \['observation'\]"):
        Transform("observation")
    assert Transform([("a", ("b",))]).out_keys == [("a", "b")]

    class Unnamed(Transform):
        def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
            return value

    with pytest.raises(ArgumentError, match="in_keys, which is empty"):
        TransformedEnv(count(), Unnamed())
    with pytest.raises(ArgumentError, match="'observatoin'"):
        TransformedEnv(count(), Unnamed(["observatoin"]))
    with pytest.raises(ArgumentError, match="To add an entry, declare it"):
        TransformedEnv(count(), Added("undeclared"))
    env = TransformedEnv(count(), Unnamed(["reward"]))
    before = list(env.observation_spec.keys(True, True))
    for wrong in (Added("undeclared"), InitTracker("reward")):
        with pytest.raises(ArgumentError):
            env.append_transform(wrong)
        assert list(env.observation_spec.keys(True, True)) == before
    with pytest.raises(MissingKeyError, match="'reward', which the step did not return"):
        env.transform._step(env.reset(), env.reset())


def test_forward_of_ones_own() -> None:
    class Doubled(Transform):
        def forward(self, tensordict: Any) -> Any:
            return 2 * tensordict

    assert Doubled()(2) == 4
