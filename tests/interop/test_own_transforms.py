"""A transform that is written for TorchRL does the same under recurl's base class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.envs import GymEnv, TransformedEnv
from recurl.transforms import Transform


class Twice:
    """Methods as they are written for TorchRL: a new entry at resets and steps."""

    def _call(self, next_tensordict: Any) -> Any:
        next_tensordict.set("twice", 2 * next_tensordict.get("observation"))
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        observation_spec["twice"] = observation_spec["observation"].clone()
        return observation_spec


class Counted:
    """Methods that also read the root: the number of steps in the episode."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        return next_tensordict.set("age", tensordict.get("age") + 1)

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset.set("age", torch.zeros_like(tensordict_reset.get("observation")))

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        observation_spec["age"] = observation_spec["observation"].clone()
        return observation_spec


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("body", [Twice, Counted])
def test_the_same_methods(body: type) -> None:
    theirs = pytest.importorskip("torchrl.envs")
    made = []
    for base, env, wrap in (
        (Transform, GymEnv, TransformedEnv),
        (theirs.Transform, theirs.GymEnv, theirs.TransformedEnv),
    ):
        kind = type("Own", (body, base), {})
        made.append(wrap(env("CartPole-v1"), kind()))
    for env in made:
        batch = env.rollout(60, break_when_any_done=False)
        done = batch["next", "done"].squeeze(-1)
        assert done.any()
        if body is Twice:
            for root in (batch, batch["next"]):
                assert torch.equal(root["twice"], 2 * root["observation"])
        else:
            ages, age = [], 0.0
            for end in done.tolist():
                ages.append(age)
                age = 0.0 if end else age + 1
            assert batch["age"][:, 0].tolist() == ages
            assert batch["next", "age"][:, 0].tolist() == [one + 1 for one in ages]


def test_steps_alone_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"define _reset\(self, tensordict, tensordict_reset\) too, returning"):
        type("StepsAlone", (Transform,), {"_call": Twice._call})
