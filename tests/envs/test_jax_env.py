"""Environments written in JAX: the same episodes as in JAX alone, true last observations, seeds, states, errors."""

import dataclasses
import subprocess
import sys
from collections import namedtuple
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UnsupportedError, UsageError
from recurl.envs import JaxEnv, StepCounter, check_env_specs, jax_protocols
from recurl.envs.jax_named import named_jax_env
from recurl.envs.jax_protocols import graph_options

jax = pytest.importorskip("jax")
gymnax = pytest.importorskip("gymnax")
jnp = jax.numpy

ROWS = 6


class Discrete(NamedTuple):
    n: int


class Box(NamedTuple):
    low: Any
    high: Any
    shape: Any
    dtype: Any


Spaces = namedtuple("Spaces", "spaces")  # Dict and Tuple


@dataclasses.dataclass(frozen=True)
class Limit:
    max_timesteps: int = 5
    goal: int = 3


class CountingState(NamedTuple):
    position: Any
    time: Any
    noise: Any  # a typed key
    far: Any  # bool


class Counting:
    """Walk to the goal, in the protocol before gymnax 1.0: ``done`` includes the time limit. Observations nest."""

    default_params = Limit()

    def observation_space(self, params):
        names = {"place": Discrete(8), "far": Box(False, True, (), bool), "time": Box(0, 100, (1,), jnp.uint16)}
        return Spaces({"seen": Spaces(names), "noise": Box(0.0, 1.0, (2, 3), jnp.bfloat16)})

    def action_space(self, params):
        return Discrete(2)

    def observe(self, state):
        noise = jax.random.uniform(state.noise, (2, 3), jnp.bfloat16)
        seen = {"place": state.position, "far": state.far, "time": state.time[None].astype(jnp.uint16)}
        return {"seen": seen, "noise": noise}

    def is_terminal(self, state, params):
        return (state.position >= params.goal) | (state.time >= params.max_timesteps)

    def reset_env(self, key, params):
        position = jax.random.randint(key, (), 0, 2)
        state = CountingState(position, 0, jax.random.key(3), jnp.array(False))
        return self.observe(state._replace(time=jnp.array(0))), state

    def step_env(self, key, state, action, params):
        position = state.position + action
        state = CountingState(position, state.time + 1, jax.random.split(state.noise)[0], position > 1)
        return self.observe(state), state, position, self.is_terminal(state, params), {}


class BraxState(NamedTuple):
    obs: Any
    reward: Any
    done: Any
    info: Any


class Robot:
    """A point pushed along a line, in Brax's protocol; a step reads the last observation."""

    action_size = 2

    def reset(self, key):
        position = jax.random.uniform(key, (1,))
        obs = {"state": position, "privileged_state": jnp.zeros(3)}
        return BraxState(obs, jnp.zeros(()), jnp.zeros(()), {"truncation": jnp.zeros(()), "steps": jnp.zeros(())})

    def step(self, state, action):
        position = state.obs["state"] + action.sum() + 1
        steps = state.info["steps"] + 1
        obs = {"state": position, "privileged_state": jnp.full(3, steps)}
        over = steps >= 4
        done = over | (position[0] > 3)
        info = {"truncation": (over & (position[0] <= 3)).astype(float), "steps": steps}
        return BraxState(obs, position[0], done.astype(float), info)


@dataclasses.dataclass(frozen=True)
class Replaceable:
    """What flax's dataclasses add."""

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NavixTimestep(Replaceable):
    t: Any
    observation: Any
    action: Any
    reward: Any
    step_type: Any  # 0, 1 at the time limit, 2 at a natural end
    state: Any
    info: Any

    def is_termination(self):
        return self.step_type == 2

    def is_truncation(self):
        return self.step_type == 1


class Maze:
    """A corridor in the protocol of navix 0.7.4: one time step is state and observation, and ended ones are reset."""

    observation_space = SimpleNamespace(shape=(2,), dtype=jnp.uint8, minimum=0, maximum=8, n=9)
    action_space = SimpleNamespace(shape=(), dtype=jnp.int32, minimum=0, maximum=1, n=jnp.asarray(2))
    reward_space = SimpleNamespace(shape=(), dtype=jnp.float32, minimum=-1.0, maximum=1.0)
    max_steps = 4

    def timestep(self, place, **entries):
        seen = jnp.stack([place, jnp.asarray(10)]).astype(jnp.uint8)  # more than the space says, as in navix
        return NavixTimestep(observation=seen, state={"place": place, "key": jax.random.PRNGKey(0)}, **entries)

    def reset(self, key):
        place = jax.random.randint(key, (), 0, 2)
        info = {"return": jnp.asarray(0.0)}
        return self.timestep(place, t=jnp.asarray(0), action=-1, reward=0.0, step_type=jnp.asarray(0), info=info)

    def step(self, timestep, action):
        def move(timestep):
            place, t = timestep.state["place"] + action, timestep.t + 1
            step_type = jnp.where(place >= 3, 2, jnp.where(t >= self.max_steps, 1, 0))
            reward = jnp.asarray(place >= 3, jnp.float32)
            info = {"return": timestep.info["return"] + reward}
            return self.timestep(place, t=t, action=action, reward=reward, step_type=step_type, info=info)

        def again(timestep):
            fresh = self.reset(timestep.state["key"])
            return fresh.replace(action=action, reward=jnp.asarray(0.0))

        return jax.lax.cond(timestep.step_type > 0, again, move, timestep)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TimeStep(Replaceable):
    """That of xland-minigrid, with the state, and of Jumanji, without."""

    step_type: Any
    reward: Any
    discount: Any
    observation: Any
    state: Any = None

    def last(self):
        return self.step_type == 2


@dataclasses.dataclass(frozen=True)
class XLandParams:
    max_steps: int = 4


class XLand:
    """The corridor in the protocol of xland-minigrid 0.9.3."""

    def default_params(self, **kwargs):
        return XLandParams(**kwargs)

    def num_actions(self, params):
        return 2

    def observation_shape(self, params):
        return {"img": (2,), "direction": 4}

    def timestep(self, place, steps, params):
        seen = {"img": jnp.stack([place, place]).astype(jnp.uint8), "direction": jax.nn.one_hot(0, 4)}
        last = (place >= 3) | (steps == params.max_steps)
        kind = jnp.where(last, 2, jnp.where(steps == 0, 0, 1)).astype(jnp.uint8)
        reward = jnp.where(place >= 3, 1 - 0.9 * steps / params.max_steps, 0.0)
        return TimeStep(kind, reward, jnp.where(place >= 3, 0.0, 1.0), seen, (place, steps))

    def reset(self, params, key):
        return self.timestep(jax.random.randint(key, (), 0, 2), jnp.asarray(0), params)

    def step(self, params, timestep, action):
        place, steps = timestep.state
        return self.timestep(place + action, steps + 1, params)


class Place(NamedTuple):
    col: Any


class JumanjiObservation(NamedTuple):
    where: Place
    action_mask: Any


class Jumanji:
    """The corridor in Jumanji 1.1.2's protocol, whose actions have parts, and observations are named tuples."""

    observation_spec = None
    action_spec = SimpleNamespace(
        shape=(2,), dtype=jnp.int32, minimum=jnp.zeros(2), maximum=jnp.ones(2), num_values=jnp.asarray([2, 3])
    )
    reward_spec = SimpleNamespace(shape=(), dtype=float)

    def reset(self, key):
        timestep = XLand().reset(XLandParams(), key)
        return timestep.state, self.timestep(timestep)

    def step(self, state, action):
        timestep = XLand().step(XLandParams(), TimeStep(0, 0.0, 1.0, None, state), action[0])
        return timestep.state, self.timestep(timestep)

    def timestep(self, timestep):
        where = Place(timestep.state[0].astype(jnp.int32))
        return timestep.replace(observation=JumanjiObservation(where, jnp.ones(2, bool)), state=None)


def cartpole(rows=ROWS, **options):
    return JaxEnv(*gymnax.make("CartPole-v1"), rows, **options)


def counting(rows=ROWS, params=None, **options):
    return JaxEnv(Counting(), params, rows, **options)


def test_episodes_are_those_of_gymnax():
    """The keys are derived as documented: rewards, ends and observations are those of gymnax's own functions."""
    env, params = gymnax.make("CartPole-v1")
    ours = cartpole()
    root = ours.reset(seed=7)
    key, reset_key = jax.random.split(jax.random.PRNGKey(7))
    begin = jax.jit(jax.vmap(partial(env.reset_env, params=params)))
    step = jax.jit(jax.vmap(partial(env.step_env, params=params)))
    observations, state = begin(jax.random.split(reset_key, ROWS))
    ended = 0
    for index in range(40):
        np.testing.assert_allclose(root["observation"].numpy(), observations, rtol=1e-5)
        action = torch.full((ROWS,), int(index % 5 > 0))
        after = ours.step(root.set("action", action))
        key, step_key, reset_key = jax.random.split(key, 3)
        observations, state, reward, done, _ = step(jax.random.split(step_key, ROWS), state, action.numpy())
        np.testing.assert_allclose(after["next", "observation"].numpy(), observations, rtol=1e-5)
        np.testing.assert_allclose(after["next", "reward"][:, 0].numpy(), reward)
        np.testing.assert_array_equal(after["next", "terminated"][:, 0].numpy(), done)
        ended += int(done.sum())
        fresh, fresh_state = begin(jax.random.split(reset_key, ROWS))

        def merge(new, old, done=done):
            return jnp.where(done.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        observations, state = jax.tree.map(merge, (fresh, fresh_state), (observations, state))
        root = ours.maybe_reset(ours.carry(after))
    assert ended > ROWS


OTHERS = {
    "brax": lambda: JaxEnv(Robot(), num_envs=ROWS),
    "navix": lambda: JaxEnv(Maze(), num_envs=ROWS),
    "xland": lambda: JaxEnv(XLand(), num_envs=ROWS),
    "jumanji": lambda: JaxEnv(Jumanji(), num_envs=ROWS),
}


@pytest.mark.parametrize("make", [cartpole, counting, *OTHERS.values()])
def test_specs(make):
    check_env_specs(make())


@pytest.mark.parametrize("name", ["navix", "xland", "jumanji"])
def test_ends_of_time_steps_are_told_apart(name):
    """Rows that stay are truncated after four steps, those that walk reach place 3, and the last step is seen."""
    env = OTHERS[name]()
    root = env.reset(seed=0)
    walks = torch.arange(ROWS) % 2 == 1
    action = torch.stack([walks, walks], -1).long() if name == "jumanji" else walks.long()

    def places(entries):
        key = {"navix": "observation", "xland": "img", "jumanji": ("where", "col")}[name]
        return entries[key].reshape(ROWS, -1)[:, 0].long()

    start, ended = places(root), torch.zeros(ROWS, dtype=torch.bool)
    for step in range(1, 5):
        after = env.step(root.set("action", action))["next"]
        terminated, truncated = after["terminated"].squeeze(-1), after["truncated"].squeeze(-1)
        first = ~ended  # the first episode of a row
        torch.testing.assert_close(places(after)[first], (start + step * walks)[first])
        torch.testing.assert_close(terminated, places(after) >= 3)
        torch.testing.assert_close(truncated[first], (~walks & (step == 4))[first])
        assert (after["reward"].squeeze(-1) > 0).equal(terminated)
        ended |= terminated | truncated
        root = env.maybe_reset(env.carry(root.set("next", after)))
        assert (places(root)[terminated | truncated] < 2).all()
    assert ended.all()


def test_the_own_autoreset_of_navix_is_not_compiled():
    env = OTHERS["navix"]()
    row = jax.eval_shape(Maze().reset, jax.random.PRNGKey(0))
    rows = jax.tree.map(lambda leaf: jnp.zeros((ROWS, *leaf.shape), leaf.dtype), row)
    advance = jax.vmap(jax_protocols.protocol_of(Maze()).advance)
    traced = jax.make_jaxpr(advance)(jax.random.split(jax.random.PRNGKey(0), ROWS), rows, jnp.zeros(ROWS, int))
    assert "cond" in str(traced)  # batched, a condition would become a selection, which computes both
    assert env.reset().batch_size == (ROWS,)


def test_ends_before_gymnax_1_are_told_apart():
    env = counting()
    root = env.reset(seed=0)
    start = root["seen", "place"].argmax(-1)
    still = torch.arange(ROWS) % 2 == 0
    for _ in range(5):
        after = env.step(root.set("action", (~still).long()))["next"]
        done, place = after["done"].squeeze(-1), after["seen", "place"].argmax(-1)
        torch.testing.assert_close(after["terminated"].squeeze(-1), place >= 3)
        torch.testing.assert_close(after["truncated"].squeeze(-1), done & (place < 3))
        assert (place[still] == start[still]).all()
        root = env.maybe_reset(env.carry(root.set("next", after)))
        assert (root["seen", "time"][done] == 0).all()
    assert done[still].all()
    assert (after["seen", "time"][still] == 5).all()


def test_entries_of_an_observation_have_the_dtypes_of_tensors():
    root = counting().reset()
    found = {key: (tuple(value.shape), value.dtype) for key, value in root["seen"].items()}
    assert found == {
        "place": ((ROWS, 8), torch.float32),
        "far": ((ROWS,), torch.int8),
        "time": ((ROWS, 1), torch.int32),
    }
    assert root["noise"].shape == (ROWS, 2, 3)
    assert root["noise"].dtype == torch.float32


def test_brax_ends_and_privileged_observations():
    env = JaxEnv(Robot(), num_envs=2)
    root = env.reset(seed=1)
    pushes = torch.tensor([[0.0, 0.0], [-0.5, -0.5]])
    ends = []
    for _ in range(4):
        after = env.step(root.set("action", pushes))["next"]
        after["state"].add_(0)  # the environment keeps its own
        ends.append((after["terminated"].squeeze(-1).tolist(), after["truncated"].squeeze(-1).tolist()))
        root = env.maybe_reset(env.carry(root.set("next", after)))
    assert [any(terminated) or any(truncated) for terminated, truncated in ends] == [False, False, True, True]
    assert ends[2] == ([True, False], [False, False])
    assert ends[3] == ([False, False], [False, True])
    assert after["privileged_state"][1].tolist() == [4, 4, 4]
    assert root["privileged_state"][1].tolist() == [0, 0, 0]
    assert list(JaxEnv(Robot(), drop_observations=["privileged_state"]).observation_spec.keys()) == ["state"]


def test_arrays_that_rows_share_are_not_state():
    """As with MuJoCo Warp's contacts, which have no dimension of rows in the state of several."""

    class Data:
        def __init__(self, position, contacts):
            self.position, self.contacts = position, contacts

    jax.tree_util.register_pytree_node(Data, lambda d: ((d.position, d.contacts), None), lambda _, c: Data(*c))
    jax.interpreters.batching.register_vmappable(
        Data,
        int,
        int,
        lambda cont, _, data, axis: Data(cont(data.position, axis), data.contacts),
        lambda cont, size, data, axis: Data(cont(size, data.position, axis), data.contacts),
        None,
    )

    class State(NamedTuple):
        data: Any
        obs: Any
        reward: Any
        done: Any
        info: Any

    class Warp:
        action_size = 1

        def state(self, position):
            contacts = jnp.zeros(7)  # of all rows
            zero = jnp.zeros(())
            return State(Data(position, contacts), position, position[0], (position[0] > 2).astype(float), {"t": zero})

        def reset(self, key):
            return self.state(jax.random.uniform(key, (2,)))

        def step(self, state, action):
            return self.state(state.data.position + action + state.data.contacts[0])

    shapes = jax.eval_shape(jax.vmap(Warp().reset), jax.random.split(jax.random.PRNGKey(0), 3))
    assert shapes.data.contacts.shape == (7,)
    env = JaxEnv(Warp(), num_envs=ROWS, reset_ratio=2)
    _, found = steps(env, env.reset(seed=0), torch.ones(4, ROWS, 1))
    assert found["terminated"].any()
    assert "contacts" not in str(sorted(env.get_state()["tensors"]))
    check_env_specs(JaxEnv(Warp(), num_envs=ROWS))


def test_ends_in_the_information_of_a_step():
    """POPGym Arcade's environments, for gymnax before 1.0, inherit ``is_truncated`` from gymnax 1.0 if it's there."""

    class Arcade(gymnax.environments.environment.Environment):
        default_params = Limit()

        def observation_space(self, params):
            return Box(0, 9, (1,), jnp.float32)

        def action_space(self, params):
            return Discrete(2)

        def reset_env(self, key, params):
            return jnp.zeros(1), {"position": jnp.zeros(()), "steps": jnp.zeros((), int)}

        def step_env(self, key, state, action, params):
            position, steps = state["position"] + action, state["steps"] + 1
            over = steps >= 4
            done = over | (position >= 3)  # "terminated" of CartPoleEasy, too
            state = {"position": position, "steps": steps}
            return position[None], state, 0.0, done, {"terminated": done, "truncated": over}

    env = JaxEnv(Arcade(), num_envs=2)
    _, found = steps(env, env.reset(seed=0), torch.tensor([[0, 1]] * 4))
    assert found["terminated"].squeeze(-1).tolist() == [[False, False], [False, False], [False, True], [False, False]]
    assert found["truncated"].squeeze(-1).tolist() == [[False, False]] * 3 + [[True, False]]


def test_observations_are_not_the_memory_of_the_environment():
    env = JaxEnv(Robot(), num_envs=2)
    root = env.reset(seed=1)
    expected = root["state"].clone() + 1
    root["state"].zero_()
    after = env.step(root.set("action", torch.zeros(2, 2)))["next"]
    torch.testing.assert_close(after["state"], expected)
    after["state"].zero_()
    again = env.step(env.carry(root).set("action", torch.zeros(2, 2)))["next"]
    torch.testing.assert_close(again["state"], expected + 1)


def test_seeds():
    def episodes(seed):
        env = cartpole()
        env.set_seed(seed)
        return torch.cat([env.reset()["observation"], env.reset()["observation"]])

    assert torch.equal(episodes(1), episodes(1))
    drawn = [episodes(seed) for seed in (1, 2, 2**32 + 1)]
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in [(0, 1), (0, 2)])
    assert not torch.equal(drawn[0][:ROWS], drawn[0][ROWS:])  # episodes go on after a second reset
    assert not torch.equal(cartpole().reset()["observation"], cartpole().reset()["observation"])  # unseeded


def steps(env, root, actions):
    found = []
    for action in actions:
        root = env.step(root.set("action", action))
        found.append(root["next"].clone())
        root = env.maybe_reset(env.carry(root))
    return root, torch.stack(found)


@pytest.mark.parametrize("make", [cartpole, counting, partial(cartpole, reset_ratio=4)])
def test_a_state_saved_within_episodes_is_restored_exactly(make, tmp_path):
    actions = torch.randint(2, (30, ROWS), generator=torch.Generator().manual_seed(0))
    env = make()
    root, _ = steps(env, env.reset(seed=3), actions[:10])
    torch.save({"env": env.get_state(), "root": root}, tmp_path / "state")
    _, expected = steps(env, root.clone(), actions[10:])
    other = make()
    state = torch.load(tmp_path / "state", weights_only=False)
    torch.save(env.get_state(), tmp_path / "plain")
    assert torch.load(tmp_path / "plain", weights_only=True).keys() == env.get_state().keys()
    other.set_state(state["env"])
    _, found = steps(other, state["root"], actions[10:])
    assert (expected == found).all()
    assert other.can_save_state
    assert other.state_obstacle is None


def test_a_state_of_another_environment_is_refused():
    env = cartpole()
    env.reset()
    with pytest.raises(ArgumentError, match=r"saved by CartPole-v1, not by Counting"):
        counting().set_state(env.get_state())
    with pytest.raises(ArgumentError, match="same arguments"):
        cartpole(3).set_state(env.get_state())
    with pytest.raises(ArgumentError, match="only states saved by a JaxEnv"):
        env.set_state({"tensors": {}})


def test_a_partial_reset_resets_its_rows_only():
    env = cartpole()
    root, _ = steps(env, env.reset(seed=0), torch.ones(4, ROWS, dtype=torch.int64))
    mask = torch.arange(ROWS) % 3 == 0
    fresh = env.reset(root.clone().set("_reset", mask))
    assert torch.equal(fresh["observation"][~mask], root["observation"][~mask])
    assert (fresh["observation"][mask].abs() <= 0.05).all()
    after = env.step(fresh.set("action", torch.ones(ROWS, dtype=torch.int64)))["next"]
    torch.testing.assert_close(  # the positions continue from the roots
        after["observation"][:, 0], fresh["observation"][:, 0] + 0.02 * fresh["observation"][:, 1]
    )


def test_rows_that_a_transform_ends_are_reset_too():
    env = cartpole().append_transform(StepCounter(max_steps=3))
    root = env.reset(seed=0)
    for _ in range(3):
        root = env.step(root.set("action", torch.ones(ROWS, dtype=torch.int64)))
        last = root["next"]
        root = env.maybe_reset(env.carry(root))
    assert last["truncated"].all()
    assert (last["observation"].abs().amax(-1) > 0.1).all()
    assert (root["observation"].abs() <= 0.05).all()


def test_max_steps_truncates():
    env = counting(params=Limit(max_timesteps=100, goal=100), max_steps=2)
    _, found = steps(env, env.reset(seed=0), torch.zeros(4, ROWS, dtype=torch.int64))
    assert found["truncated"].squeeze(-1).all(-1).tolist() == [False, True, False, True]
    assert not found["terminated"].any()


def test_episodes_prepared_at_once_are_taken_in_turn():
    env = cartpole(8, reset_ratio=4, max_steps=1)
    root, firsts = env.reset(seed=0), []
    for _ in range(8):  # every row finishes at every step: those prepared are taken by all rows, four times
        root, _ = steps(env, root, torch.zeros(1, 8, dtype=torch.int64))
        firsts.append(root["observation"])
    assert len(firsts[0].unique(dim=0)) == 8
    assert all(torch.equal(first, firsts[0]) for first in firsts[1:4])
    assert all(torch.equal(first, firsts[4]) for first in firsts[5:])
    assert not torch.isin(firsts[4][:, 0], firsts[0][:, 0]).any()
    mask = torch.tensor([False, True, False, False, True, False, False, False])
    some = env.reset(root.set("_reset", mask))["observation"]
    assert len(some[mask].unique(dim=0)) == 2
    assert torch.equal(some[~mask], firsts[-1][~mask])


def test_rows_that_finish_share_no_prepared_episode_before_all_are_taken():
    env = cartpole(8, reset_ratio=64)
    root, found = env.reset(seed=0), []
    for action in torch.randint(2, (64, 8), generator=torch.Generator().manual_seed(0)):
        root = env.step(root.set("action", action))
        done = root["next", "done"].squeeze(-1)
        root = env.maybe_reset(env.carry(root))
        found += root["observation"][done].tolist()
    assert len(found) > 12
    assert len({tuple(first) for first in found}) == 8
    assert found[8:16] == found[: len(found[8:16])]
    new, _ = steps(env, root, torch.zeros(12, 8, dtype=torch.int64))  # after 64 steps, other ones
    assert not {tuple(first) for first in found} & {tuple(first) for first in new["observation"].tolist()}


def test_compiler_options_reach_xla():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nonsense"):
        cartpole(compiler_options={"xla_nonsense": 1}).reset()
    env = cartpole(compiler_options={"xla_cpu_enable_fast_math": False})
    assert env.reset(seed=0).batch_size == torch.Size([ROWS])
    assert graph_options(jax.devices("cpu")[0]) == {}


def test_actions_with_parts_and_bounds():
    space = gym.spaces.Dict({"turn": gym.spaces.Discrete(3, start=-1), "go": gym.spaces.Box(-1, 1, (2,))})
    kept = gym.spaces.Box(-np.inf, np.inf, (3,))

    def step(key, state, action, params):
        seen = jnp.concatenate([action["turn"][None].astype(jnp.float32), action["go"]])
        return seen, seen, 1.0, False, {}

    env = SimpleNamespace(
        default_params=None,
        observation_space=lambda _: kept,
        action_space=lambda _: space,
        reset_env=lambda key, params: (jnp.zeros(3), jnp.zeros(3)),
        step_env=step,
    )
    ours = JaxEnv(env, num_envs=2)
    root = ours.rand_action(ours.reset())
    root["action", "go"] = torch.arange(8.0).view(2, 4)[:, ::2]  # not contiguous
    root["action", "turn"] = torch.tensor([0, 2])
    assert ours.step(root)["next", "observation"].tolist() == [[-1, 0, 2], [1, 4, 6]]
    with pytest.raises(ArgumentError, match="floating-point numbers of shape"):
        ours.step(root.set(("action", "go"), torch.zeros(2, 2, dtype=torch.int64)))


def test_errors():
    env = cartpole()
    with pytest.raises(UsageError, match="reset of all rows"):
        env.rand_step(env.fake_tensordict())
    with pytest.raises(ArgumentError, match="one-hot of shape"):
        env.step(env.reset().set("action", torch.zeros(ROWS, 3)))
    with pytest.raises(ArgumentTypeError, match="neither gymnax's protocol"):
        JaxEnv(object())
    with pytest.raises(ArgumentError, match="no params"):
        JaxEnv(Robot(), Limit())
    with pytest.raises(ArgumentError, match="reset_ratio"):
        cartpole(reset_ratio=0)


def test_an_environment_that_violates_its_protocol_is_refused():
    class Wrong(Counting):
        def action_space(self, params):
            return SimpleNamespace(low=0)

    class Changing(Counting):
        def step_env(self, *args):
            observation, state, *rest = super().step_env(*args)
            return observation, state._replace(position=jnp.zeros(2, int)), *rest

    class Other(Counting):
        def observe(self, state):
            return {**super().observe(state), "noise": jnp.zeros(4)}

    class Resets(Robot):
        def reset(self, key):
            state = super().reset(key)
            return state._replace(info={**state.info, "first_obs": state.obs})

    with pytest.raises(UnsupportedError, match="SimpleNamespace in the action space of Wrong has no tensor equivalent"):
        JaxEnv(Wrong())
    with pytest.raises(ArgumentError, match=r"\.position has the shape \(2,\) after a step"):
        JaxEnv(Changing())
    with pytest.raises(ArgumentError, match=r"'noise' must have shape \[2, 3\], got \[4\]"):
        JaxEnv(Other())
    with pytest.raises(ArgumentError, match="auto_reset=False"):
        JaxEnv(Resets())


def test_wrappers_that_would_be_bypassed_are_refused():
    class Wrapper:
        def __init__(self, env):
            self._env = env

        def __getattr__(self, name):
            return getattr(self._env, name)

    class GymAutoResetWrapper(Wrapper):
        pass

    class SymbolicNoAutoReset(Counting):  # as Craftax names what doesn't
        pass

    class Team(Jumanji):
        reward_spec = SimpleNamespace(shape=(2,), dtype=float)

    with pytest.raises(ArgumentError, match=r"Wrapper is a wrapper without a step_env of its own"):
        JaxEnv(Wrapper(Counting()))
    with pytest.raises(ArgumentError, match=r"GymAutoResetWrapper resets itself.* pass the environment inside"):
        JaxEnv(GymAutoResetWrapper(XLand()))
    assert JaxEnv(SymbolicNoAutoReset()).batch_size == torch.Size([1])
    with pytest.raises(UnsupportedError, match=r"Team has rewards of shape \(2,\)"):
        JaxEnv(Team())
    with pytest.raises(ArgumentError, match="no params"):
        JaxEnv(Maze(), Limit())


def test_a_state_that_torch_lacks_is_named():
    class Odd(Counting):
        def reset_env(self, key, params):
            observation, state = super().reset_env(key, params)
            return observation, state._replace(far=jnp.zeros((), jnp.int4))

    env = JaxEnv(Odd(), num_envs=2)
    env.reset()
    assert not env.can_save_state
    assert env.state_obstacle == "['state'].far is int4, which torch lacks"
    with pytest.raises(UnsupportedError, match="int4"):
        env.get_state()


def test_names():
    env = named_jax_env("jax:gymnax/CartPole-v1", 2, max_steps_in_episode=3)
    _, found = steps(env, env.reset(seed=0), torch.zeros(3, 2, dtype=torch.int64))
    assert found["truncated"][-1].all()
    own = named_jax_env(f"jax:{__name__}:Counting", 2) if __name__ in sys.modules else counting(2)
    assert own.batch_size == (2,)
    with pytest.raises(ArgumentError, match=r"gymnax has no environment 'Cartpole-v1'. Did you mean CartPole-v1\?"):
        named_jax_env("jax:gymnax/Cartpole-v1", 2)
    with pytest.raises(ArgumentError, match=r"Did you mean gymnax\?"):
        named_jax_env("jax:gymnx/CartPole-v1", 2)
    with pytest.raises(ArgumentError, match="jax:PACKAGE/NAME"):
        named_jax_env("jax:CartPole-v1", 2)
    with pytest.raises(TypeError, match="max_steps_in_episod"):
        named_jax_env("jax:gymnax/CartPole-v1", 2, max_steps_in_episod=3)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(MissingDependencyError, match="pip install playground"):
        named_jax_env("jax:playground/CartpoleBalance", 2)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'recurl\[jax\]'"):
        jax_protocols.import_jax()


def test_a_device_that_jax_lacks_is_named(monkeypatch):
    def devices(kind):
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UnsupportedError, match=r"JAX finds no device cuda:0 on this machine: pip install 'jax\[cuda"):
        jax_protocols.jax_device(torch.device("cuda:0"))


def test_jax_is_imported_where_it_is_used_only():
    code = "import sys, recurl.envs, recurl.trainers as t; recurl.envs.JaxEnv; t.PPOConfig; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
