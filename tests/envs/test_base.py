from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError, UsageError
from recurl.core.specs import Bounded, Categorical, Composite, OneHot, Unbounded
from recurl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    check_env_specs,
    step_mdp,
)
from recurl.execution.lowering import Entries
from tests.envs.masked import MaskedEnv
from tests.envs.small import CountEnv


class Walk(EnvBase):
    """Walk on the integers that returns the minimal set of done flags, with a nested observation."""

    def __init__(self, batch_size=(), flags=("done",), nested=False):
        self.key = ("agent", "place") if nested else "place"
        super().__init__(
            observation_spec=Composite({self.key: Unbounded(1)}),
            action_spec=Bounded(-1.0, 1.0, (1,)),
            batch_size=batch_size,
        )
        self.flags = flags
        self.seed = None
        self.closed = 0

    def _reset(self, tensordict):
        return TensorDict({self.key: torch.zeros(*self.batch_size, 1)}, self.batch_size)

    def _step(self, tensordict):
        place = tensordict[self.key] + 1
        entries = {self.key: place, "reward": place}
        return TensorDict({**entries, **dict.fromkeys(self.flags, place >= 3)}, self.batch_size)

    def _set_seed(self, seed):
        self.seed = seed

    def _close(self):
        self.closed += 1


@pytest.mark.parametrize("flags", [("done",), ("terminated",), ("truncated",), ("done", "truncated")], ids=str)
def test_missing_done_flags_are_completed(flags):
    env = Walk((2,), flags)
    check_env_specs(env)
    after = env.rollout(5)["next"]
    assert after.shape == (2, 3)
    truncated = "truncated" in flags
    assert after["terminated"][:, -1].all() != truncated
    assert after["truncated"][:, -1].all() == truncated
    assert after["done"].squeeze(-1).tolist() == [[False, False, True]] * 2


def test_a_step_without_done_flags_is_refused():
    with pytest.raises(MissingKeyError, match="but returned none of them"):
        Walk(flags=()).rand_step()


def test_specs_have_batch_dimensions():
    env = Walk((4,))
    assert env.observation_spec["place"].shape == (4, 1)
    assert env.action_spec.shape == (4, 1)
    assert env.full_action_spec["action"] == env.action_spec
    assert env.action_spec_unbatched.shape == (1,)
    assert env.full_action_spec_unbatched["action"] == env.action_spec_unbatched
    assert env.reward_spec.shape == (4, 1)
    assert set(env.done_spec) == {"done", "terminated", "truncated"}
    assert env.fake_tensordict()["next", "reward"].shape == (4, 1)


def test_seed_and_close():
    with Walk() as env:
        env.reset(seed=3)
        assert env.seed == 3
    env.close()
    assert env.closed == 1
    assert env.is_closed
    assert not env.can_save_state
    with pytest.raises(UnsupportedError, match="can't save its state"):
        env.get_state()
    with pytest.raises(UnsupportedError, match="can't restore a state"):
        env.set_state({})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_partial_reset_keeps_the_other_rows(shape, nested):
    env = Walk((3,), nested=nested)
    root = env.carry(env.rand_step())
    before = root.clone()
    asked = root.copy().set("_reset", torch.tensor([True, False, False]).view(shape))
    out = env.reset(asked)
    assert out[env.key].flatten().tolist() == [0.0, 1.0, 1.0]
    assert "_reset" not in out
    assert (root == before).all()
    same = env.reset(root.copy().set("_reset", torch.zeros(3, dtype=torch.bool)))
    assert (same == before).all()
    alone = env.reset(TensorDict({"_reset": torch.ones(3, 1, dtype=torch.bool)}, [3]))
    assert not alone[env.key].any()
    assert not alone["done"].any()


def test_masks_are_checked():
    env = Walk((3,))
    for mask in (torch.zeros(2, dtype=torch.bool), torch.zeros(3)):
        with pytest.raises(ArgumentError, match=r"'_reset' must be bool of shape \[3, 1\]"):
            env.reset(TensorDict({"_reset": mask}))
    with pytest.raises(ArgumentError, match="A seed applies to all rows"):
        env.reset(TensorDict({"_reset": torch.ones(3, dtype=torch.bool)}, [3]), seed=1)


def test_done_rows_that_are_not_reset_stay_done():
    env = Walk((2,))
    root = env.reset()
    root["done"] = torch.ones(2, 1, dtype=torch.bool)
    out = env.reset(root.set("_reset", torch.tensor([True, False])))
    assert out["done"].flatten().tolist() == [False, True]


def test_step_needs_an_action_and_the_batch_size():
    env = Walk((2,))
    with pytest.raises(MissingKeyError, match="needs an 'action'"):
        env.step(env.reset())
    with pytest.raises(ArgumentError, match=r"batch size \[2\], the TensorDict to step has \[3\]"):
        env.step(TensorDict({"action": torch.zeros(3, 1)}, [3]))


def test_step_keeps_the_entries_of_the_policy_under_next():
    env = Walk()
    td = env.rand_action(env.reset()).set(("next", "memory"), torch.ones(2))
    out = env.step(td)
    assert out is td
    assert out["next", "memory"].tolist() == [1.0, 1.0]
    assert out["next", "place"].item() == 1
    assert "memory" not in env.carry(out)


def test_stepping_a_stale_root_is_refused():
    primed = TransformedEnv(Walk(), TensorDictPrimer(memory=Unbounded(2)))
    td = primed.rand_step()
    with pytest.raises(UsageError, match=r"step_mdp\(tensordict\)"):
        primed.step(td)
    primed.step(primed.rand_action(step_mdp(td)))
    unprimed = Walk()
    td = unprimed.rand_step()
    unprimed.step(td)
    with pytest.raises(UsageError, match=r"holds new states \['memory'\]"):
        unprimed.step(td.set(("next", "memory"), torch.ones(2)))


def test_step_and_maybe_reset_shares_memory_except_where_reset():
    env = Walk((2,))
    td, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert root["place"].data_ptr() == td["next", "place"].data_ptr()
    for _ in range(2):
        td, root = env.step_and_maybe_reset(env.rand_action(root))
    assert td["next", "place"].flatten().tolist() == [3.0, 3.0]
    assert not root["place"].any()


def test_random_actions_and_steps():
    env = GymEnv("CartPole-v1", num_envs=2)
    assert env.action_spec == OneHot(2).expand(2, 2)
    assert env.action_spec.is_in(env.rand_action()["action"])
    assert isinstance(GymEnv("CartPole-v1", categorical_action_encoding=True).action_spec, Categorical)
    assert env.rand_step()["next", "reward"].tolist() == [[1.0], [1.0]]


class TestTransformedEnv:
    def test_hooks_in_order(self):
        env = TransformedEnv(GymWrapper(CountEnv()), Compose(InitTracker(), StepCounter(3), RewardSum()))
        check_env_specs(env)
        batch = env.rollout(10, break_when_any_done=False)
        assert batch["is_init"].flatten().nonzero().flatten().tolist() == [0, 3, 6, 9]
        assert batch["step_count"].flatten().tolist() == [0, 1, 2] * 3 + [0]
        assert batch["next", "episode_reward"].flatten().tolist() == [1, 3, 6] * 3 + [1]
        assert not batch["next", "is_init"].any()
        assert batch["next", "truncated"].sum() == 3
        assert not batch["next", "terminated"].any()

    def test_append(self):
        base = GymWrapper(CountEnv())
        env = base.append_transform(InitTracker())
        assert isinstance(env, TransformedEnv)
        assert env.base_env is base
        assert env.append_transform(TensorDictPrimer(h=Unbounded(2))) is env
        assert len(env.transform) == 2
        with pytest.raises(ArgumentError, match="already declares it"):
            env.append_transform(TensorDictPrimer(h=Unbounded(3)))
        assert len(env.transform) == 2
        check_env_specs(env)
        assert repr(env).startswith("TransformedEnv(GymWrapper(")

    def test_twice_does_no_harm(self):
        transforms = [InitTracker(), TensorDictPrimer(h=Unbounded(2)), StepCounter(5)]
        env = TransformedEnv(GymWrapper(CountEnv(length=9)), Compose(*transforms, *transforms))
        check_env_specs(env)
        batch = env.rollout(7, break_when_any_done=False)
        assert batch["step_count"].flatten().tolist() == [0, 1, 2, 3, 4, 0, 1]
        assert batch["is_init"].sum() == 2

    def test_nested_environments(self):
        env = TransformedEnv(TransformedEnv(Walk((2,), nested=True), InitTracker()), StepCounter(2))
        check_env_specs(env)
        batch = env.rollout(4, break_when_any_done=False)
        assert batch["agent", "place"][0].flatten().tolist() == [0, 1, 0, 1]
        env.set_seed(2)
        assert env.base_env.base_env.seed == 2
        env.close()
        assert env.base_env.base_env.is_closed

    def test_reset_masks_reach_the_transforms(self):
        env = TransformedEnv(GymEnv("CartPole-v1", num_envs=3), Compose(InitTracker(), StepCounter()))
        root = env.carry(env.rand_step())
        out = env.reset(root.copy().set("_reset", torch.tensor([False, True, False])))
        assert out["is_init"].flatten().tolist() == [False, True, False]
        assert out["step_count"].flatten().tolist() == [1, 0, 1]
        assert torch.equal(out["observation"][[0, 2]], root["observation"][[0, 2]])
        assert not torch.equal(out["observation"][1], root["observation"][1])

    def test_saved_state_is_the_base_environments(self):
        env = TransformedEnv(GymEnv("recurl/TMaze-v0"), InitTracker())
        assert env.can_save_state
        env.reset(seed=0)
        env.set_state(env.get_state())

    def test_base_must_be_an_environment(self):
        with pytest.raises(ArgumentTypeError, match="wraps an environment of recurl, got CountEnv"):
            TransformedEnv(CountEnv())


@pytest.mark.parametrize("seed", [-1, 1.5, "1", None, float("nan")])
def test_seeds_that_are_none(seed):
    for use in (Walk().set_seed, lambda seed: SerialEnv(2, Walk).set_seed(seed)):
        with pytest.raises(ArgumentError, match="A seed must be a non-negative integer, got"):
            use(seed)
    if seed is not None:
        with pytest.raises(ArgumentError, match="A seed must be a non-negative integer"):
            Walk().reset(seed=seed)


def test_seeds():
    for seed in (0, np.int64(3), 2**80, torch.tensor(4)):
        env = Walk()
        env.set_seed(seed)
        assert env.seed == int(seed)
        assert type(env.seed) is int


def gym_rows():
    return GymEnv("CartPole-v1", num_envs=3, vectorization_mode="sync", categorical_action_encoding=True)


def masked_rows():
    create = [lambda: MaskedEnv(where="info", length=4), lambda: MaskedEnv(where="info", length=7)]
    return GymWrapper(SyncVectorEnv(create, autoreset_mode="Disabled"))


def with_memory():
    return gym_rows().append_transform(InitTracker()).append_transform(TensorDictPrimer(memory=Unbounded(3)))


class Twice(Walk):
    """Rows start at 2 after a partial reset."""

    def _root(self, tensordict):
        root = super()._root(tensordict)
        return root if tensordict is None else root.set(self.key, root[self.key] + 2 * (root[self.key] == 0))


MAKERS = [
    gym_rows,
    lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    masked_rows,
    with_memory,
    lambda: gym_rows().append_transform(StepCounter(max_steps=5)),
    lambda: Walk((2,)),
    lambda: Walk((2,), nested=True),
    lambda: Twice((2,)),
    lambda: SerialEnv(2, gym_rows),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("lowered", [True, False])
def test_a_step_with_the_reset_after_it(make, lowered):
    """A worker's single call is equivalent to the calls of an interaction."""
    plain, other = make(), make()
    lowered = lowered and plain.explain()["tensors"] is None
    root = plain.reset(seed=2)
    other.reset(seed=2)
    torch.manual_seed(0)
    ended = 0
    for _ in range(40):
        root = plain.rand_action(root)
        given = root.clone()
        after, fresh = other.advance(Entries.of(given) if lowered else given)
        root = plain.step(root)
        for key, value in root["next"].items(True, True):
            assert torch.equal(after.get(key), value), key
        rows = root["next", "done"].squeeze(-1)
        root = plain.maybe_reset(plain.carry(root))
        assert (fresh is not None) == rows.any().item()
        if fresh is not None:
            ended += int(rows.sum())
            keys = [*plain.observation_spec.keys(True, True), *plain.state_spec.keys(True, True)]
            for key in keys:
                assert torch.equal(fresh.get(key)[rows], root[key][rows]), key
    assert ended > 1
