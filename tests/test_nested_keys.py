"""States and observations under nested keys give the same results everywhere as under flat keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, OverlappedCollector
from recurl.core.errors import ArgumentError, UsageError, WiringError
from recurl.core.keys import NestedKey, next_key, normalize_key, path_of
from recurl.data import (
    BurnIn,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SequenceMinibatches,
    SliceSampler,
    TensorDictReplayBuffer,
    ZeroStart,
    refresh_states,
)
from recurl.data.replay_buffers.device import ByStep, DeviceSliceBuffer
from recurl.diagnostics import check_wiring
from recurl.envs import EnvBase, GroupedEnv, GymWrapper, ParallelEnv, SerialEnv
from recurl.envs.utils import step_mdp
from recurl.envs.wiring import policy_transforms
from recurl.execution.lowering import leaves_by_path
from recurl.modules import (
    MLP,
    Categorical,
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    RecurrentModule,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from recurl.objectives import A2CLoss, ClipPPOLoss, DiscreteSACLoss, DQNLoss, ReinforceLoss, SACLoss, TD3Loss
from recurl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from recurl.trainers import DQN, PPO, DQNConfig, PPOConfig
from recurl.transforms import InitTracker, RewardSum, StepCounter, Transform
from tests.pairs import paired

BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS: dict[NestedKey, gym.Space] = {
    "observation": BOX,
    ("robot", "joint"): gym.spaces.Dict({"robot": gym.spaces.Dict({"joint": BOX})}),
    ("robot", "arm", "joint"): gym.spaces.Dict(
        {
            "robot": gym.spaces.Dict({"arm": gym.spaces.Dict({"joint": BOX}), "base": BOX}),
            "world": gym.spaces.Dict({"map": BOX}),
        }
    ),
}
"""The key read by the policy, and the space."""
STATES: list[NestedKey] = [
    ("robot", "h"),  # next to an observation
    ("memory", "h"),  # under its own root
    ("robot", "arm", "h"),  # in another group, or next to the observation
    ("robot", "memory", "h"),  # in its own group inside that of the observations
]
COMBINATIONS = list(itertools.product(OBSERVATIONS, STATES))


def with_keys(paths: Iterable[str]) -> list[tuple[str, NestedKey, NestedKey]]:
    """Pair each path with every observation and every state, and every observation with every state."""
    observations = list(OBSERVATIONS)
    return [
        (path, observations[(number + index) % len(observations)], state)
        for number, path in enumerate(paths)
        for index, state in enumerate(STATES)
    ]


class Bot(gym.Env):
    """Observations are random; an episode ends after 2 to 6 steps."""

    def __init__(self, space: gym.Space, *, continuous: bool = False) -> None:
        self.observation_space = space
        self.action_space = gym.spaces.Box(-1, 1, (2,)) if continuous else gym.spaces.Discrete(3)

    def _observe(self) -> Any:
        def drawn(space: gym.Space) -> Any:
            if isinstance(space, gym.spaces.Dict):
                return {name: drawn(part) for name, part in sorted(space.items(), reverse=True)}
            return self.np_random.uniform(-1, 1, space.shape).astype(np.float32)

        return drawn(self.observation_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 7))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.left -= 1
        return self._observe(), float(np.sum(action)), self.left == 0, False, {}


class Case:
    """Networks whose states have keys derived from one, and environments with one of the spaces.

    Args:
        observation: key read by the networks.
        state: key of the actor's state.
    """

    def __init__(self, observation: NestedKey, state: NestedKey) -> None:
        self.observation, self.state = observation, state
        self.continuous = False

    def env(self) -> EnvBase:
        return GymWrapper(Bot(OBSERVATIONS[self.observation], continuous=self.continuous))

    def key(self, name: str) -> NestedKey:
        """Return a sibling of the state's key."""
        return normalize_key((*path_of(self.state)[:-1], name))

    def memory(self, kind: type[RecurrentModule], name: str) -> RecurrentModule:
        states = [self.key(f"{name}_{part}") for part in (("h", "c") if kind is LSTMModule else ("h",))]
        keys = {
            "in_keys": [self.observation, *states],
            "out_keys": [f"{name}_features", *map(next_key, states)],
        }
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            return kind(3, 8, **keys, recurrent_backend="loop")

    def actor(self, kind: type[RecurrentModule] = GRUModule, head: str = "discrete") -> TensorDictSequential:
        memory = self.memory(kind, "actor")
        if head == "values":
            net = TensorDictModule(nn.Linear(8, 3), ["actor_features"], ["action_value"])
            return QValueActor(TensorDictSequential(memory, net), spec=self.env().action_spec)
        if head == "deterministic":
            net = TensorDictModule(nn.Sequential(nn.Linear(8, 2), nn.Tanh()), ["actor_features"], ["action"])
            return TensorDictSequential(memory, net)
        outputs, distribution = (["logits"], Categorical) if head == "discrete" else (["loc", "scale"], TanhNormal)
        layers = nn.Linear(8, 3) if head == "discrete" else nn.Sequential(nn.Linear(8, 4), NormalParamExtractor())
        net = TensorDictModule(layers, ["actor_features"], outputs)
        return ProbabilisticActor(
            TensorDictSequential(memory, net), in_keys=outputs, distribution_class=distribution, return_log_prob=True
        )

    def critic(self, actions: int = 0) -> TensorDictSequential:
        memory = self.memory(LSTMModule, "critic")
        if actions:
            net = TensorDictModule(MLP(8 + actions, 1), ["critic_features", "action"], ["state_action_value"])
            return TensorDictSequential(memory, net)
        return TensorDictSequential(memory, ValueOperator(nn.Linear(8, 1), in_keys=["critic_features"]))

    def collected(self, policy: nn.Module, steps: int = 24, **options: Any) -> TensorDict:
        with Collector(SerialEnv(2, self.env), policy, frames_per_batch=2 * steps, **options) as collector:
            collector.env.set_seed(3)
            return next(iter(collector))

    def flat(self, found: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
        """Return the entries under the corresponding flat keys, with renumbered ids."""
        names: dict[tuple[str, ...], torch.Tensor] = {}
        inside = path_of(self.state)[:-1]
        for path, value in leaves_by_path(found).items():
            start = next((at for at in range(len(path)) if path[at : at + len(inside)] == inside), None)
            short = path
            if start is not None and ("_h" in path[-1] or "_c" in path[-1] or path[-1].startswith(("every", "step"))):
                short = (*path[:start], *path[start + len(inside) :])
            if path[-1] == "traj_ids":
                value = value.unique(return_inverse=True)[1]
            names[short] = value
        return names


def rollout(case: Case, kind: type[RecurrentModule]) -> TensorDictBase:
    env, policy = case.env(), case.actor(kind)
    for transform in policy_transforms(policy, env):
        env = env.append_transform(transform)
    env.set_seed(0)
    with torch.no_grad():
        return env.rollout(20, policy, break_when_any_done=False)


def stepped(case: Case, kind: type[RecurrentModule]) -> TensorDictBase:
    """A manual loop over steps with ``step_mdp``."""
    policy = case.actor(kind)
    env = GymWrapper(Bot(OBSERVATIONS[case.observation]), policy=policy)
    td, steps = env.reset(seed=0), []
    with torch.no_grad():
        for _ in range(6):
            steps.append(env.step(policy(td)))
            td = step_mdp(steps[-1])
            if td["done"].any():
                td = env.reset(td.set("_reset", td["done"]))
    return torch.stack([step.exclude("_reset") for step in steps])


def collector(
    case: Case, kind: type[RecurrentModule], env: Callable[[Case], EnvBase], in_place: bool = False, **options: Any
) -> TensorDictBase:
    with Collector(env(case), case.actor(kind), frames_per_batch=24, **options) as collector:
        collector.env.set_seed(3)
        batches = [collector.collect() for _ in range(3)]
        assert (collector.explain()["in place"] is None) is in_place
        return torch.stack(batches)


class NonNegativeInt(TensorDictSequential):
    """A policy that can't be lowered."""

    def forward(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return super().forward(*args, **kwargs)


def unlowered(case: Case, kind: type[RecurrentModule]) -> TensorDictBase:
    with Collector(case.env(), NonNegativeInt(case.actor(kind)), frames_per_batch=24) as collector:
        collector.env.set_seed(3)
        assert "more than run" in (collector.explain()["tensors"] or "")
        return torch.stack([collector.collect() for _ in range(3)])


def inside(case: Case, policy: nn.Module) -> Callable[[], EnvBase]:
    """Return a function that creates an environment with the transforms of a policy."""

    def make() -> EnvBase:
        env = case.env()
        for transform in policy_transforms(policy, env):
            env = env.append_transform(transform)
        return env

    return make


def batched(case: Case, kind: type[RecurrentModule], batch: Callable[..., EnvBase]) -> TensorDictBase:
    policy = case.actor(kind)
    with Collector(batch(2, inside(case, policy)), policy, frames_per_batch=24) as collector:
        collector.env.set_seed(3)
        return torch.stack([collector.collect() for _ in range(2)])


def several(case: Case, kind: type[RecurrentModule], engine: Any, **options: Any) -> TensorDictBase:
    make = case.env if engine is OverlappedCollector else [case.env]
    collector = engine(make, case.actor(kind), frames_per_batch=24, total_frames=72, **options)
    collector.set_seed(3)
    with collector:
        return torch.stack([batch.clone() for batch in collector])


def grouped(case: Case) -> EnvBase:
    return GroupedEnv([SerialEnv(2, case.env), SerialEnv(2, case.env)])


COLLECTIONS: dict[str, Callable[[Case, type[RecurrentModule]], TensorDictBase]] = {
    "rollout": rollout,
    "step_mdp": stepped,
    "in place": lambda case, kind: collector(case, kind, Case.env, in_place=True),
    "lengths": lambda case, kind: collector(case, kind, Case.env, max_frames_per_traj=3, set_truncated=True),
    "sequences": lambda case, kind: collector(case, kind, Case.env, in_place=True, sequence_length=6),
    "unlowered": unlowered,
    "serial": lambda case, kind: collector(case, kind, lambda case: SerialEnv(2, case.env)),
    "primed inside": lambda case, kind: batched(case, kind, SerialEnv),
    "groups": lambda case, kind: collector(case, kind, grouped),
}
PROCESSES: dict[str, Callable[[Case, type[RecurrentModule]], TensorDictBase]] = {
    "parallel": lambda case, kind: collector(case, kind, lambda case: ParallelEnv(2, case.env)),
    "primed in workers": lambda case, kind: batched(case, kind, ParallelEnv),
    "sync": lambda case, kind: several(case, kind, MultiSyncCollector),
    "async": lambda case, kind: several(case, kind, MultiAsyncCollector),
    "overlapped": lambda case, kind: several(case, kind, OverlappedCollector),
}


def check_collection(
    path: Callable[[Case, type[RecurrentModule]], TensorDictBase],
    observation: NestedKey,
    state: NestedKey,
    kind: type[RecurrentModule],
) -> None:
    """Check that a path gives the same numbers with a nested state as with a flat one, and that they are replayed."""
    torch.manual_seed(0)
    case, plain = Case(observation, state), Case(observation, "h")
    found = path(case, kind)
    torch.manual_seed(0)
    expected = path(plain, kind)
    assert_same(case.flat(found), plain.flat(expected))
    assert case.key("actor_h") in found
    memory = case.memory(kind, "actor")
    with set_recurrent_mode(True), torch.no_grad():
        replayed = memory(found.clone().exclude("actor_features"))
    torch.testing.assert_close(replayed["actor_features"], found["actor_features"], rtol=0, atol=1e-6)


def assert_same(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize(("path", "observation", "state"), with_keys(COLLECTIONS), ids=str)
def test_collection(path: str, observation: NestedKey, state: NestedKey) -> None:
    kind = LSTMModule if len(path) % 2 else GRUModule
    check_collection(COLLECTIONS[path], observation, state, kind)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "observation"), paired(PROCESSES, [("robot", "joint"), ("robot", "arm", "joint")]), ids=str
)
@pytest.mark.usefixtures("shared_interpreter")
def test_collection_by_processes(path: str, observation: NestedKey) -> None:
    check_collection(PROCESSES[path], observation, ("robot", "h"), LSTMModule)


def results(loss: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Return the results of a loss and the gradients of its parameters, in order."""
    torch.manual_seed(1)
    found = loss(batch)
    terms = [value for key, value in found.items() if key.startswith("loss")]
    torch.stack(terms).sum().backward()
    gradients = {f"gradient {i}": p.grad for i, p in enumerate(loss.parameters()) if p.grad is not None}
    assert gradients
    return {**{key: value.detach() for key, value in found.items()}, **gradients}


def on_policy(case: Case, make: Callable[[Any, Any], nn.Module], estimator: Callable[[Any, Any], nn.Module]) -> Any:
    """Return advantages, and the results of a loss on minibatches of the batch."""
    actor, critic = case.actor(), case.critic()
    batch = case.collected(TensorDictSequential(actor, critic))
    estimator(actor, critic)(batch)
    loss, found = make(actor, critic), {}
    generator = torch.Generator().manual_seed(0)
    for number, minibatch in enumerate(SequenceMinibatches(batch, 2, slice_len=6, generator=generator)):
        for key, value in results(loss, minibatch).items():
            found[f"{number} {key}"] = value
    for key in ("advantage", "value_target"):
        found[key] = batch[key]
    if isinstance(loss, ClipPPOLoss):
        assert abs(found["0 kl_approx"]) < 1e-6
        assert found["0 clip_fraction"] == 0.0
    return found


def sampled(case: Case, policy: nn.Module, sampler: Any = None, transform: Any = None, **options: Any) -> Any:
    """Return a buffer with a collected batch, and a sample."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=sampler or SliceSampler(slice_len=4), batch_size=24, transform=transform
    )
    buffer.extend(case.collected(policy, **options).reshape(-1))
    torch.manual_seed(5)
    return buffer, buffer.sample()


def replayed(case: Case, loss: nn.Module, *networks: nn.Module, **options: Any) -> Any:
    return results(loss, sampled(case, TensorDictSequential(*networks), **options)[1])


def dqn(case: Case) -> Any:
    actor = case.actor(LSTMModule, "values")
    return replayed(case, DQNLoss(actor, n_steps=2, double_dqn=True), actor)


def continuous(case: Case, kind: str) -> Any:
    loss_of = {"SAC": SACLoss, "TD3": lambda *nets: TD3Loss(*nets, bounds=(-1.0, 1.0))}[kind]
    actor = case.actor(GRUModule, "continuous" if kind == "SAC" else "deterministic")
    critic = case.critic(actions=2)
    loss = loss_of(actor, critic)
    case.continuous = True
    return replayed(case, loss, actor, critic)


def discrete_sac(case: Case) -> Any:
    actor = case.actor(GRUModule)
    net = TensorDictModule(nn.Linear(8, 3), ["actor_features"], ["action_value"])
    loss = DiscreteSACLoss(actor, TensorDictSequential(actor.module[0], net), num_qvalue_nets=1)
    return replayed(case, loss, actor)


def burnt_in(case: Case) -> Any:
    actor = case.actor(LSTMModule)
    _, sample = sampled(case, actor)
    return BurnIn(actor, 2)(sample).update({"zeroed": ZeroStart(actor)(sample)[: len(BurnIn(actor, 2)(sample))]})


def refreshed(case: Case) -> Any:
    actor = case.actor()
    buffer, sample = sampled(case, actor, PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=4))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1.5)
    before = buffer[:].clone()
    refresh_states(buffer, sample, actor)
    assert not torch.equal(buffer[:][next_key(case.key("actor_h"))], before[next_key(case.key("actor_h"))])
    return buffer[:]


def on_device(case: Case) -> Any:
    buffer = DeviceSliceBuffer(100, 3, 4, ByStep())
    buffer.extend(case.collected(case.actor(LSTMModule)))
    torch.manual_seed(5)
    return buffer.sample().to_tensordict()


ESTIMATORS = {
    "GAE": lambda _, critic: GAE(gamma=0.9, lmbda=0.8, value_network=critic),
    "TD0": lambda _, critic: TD0Estimator(gamma=0.9, value_network=critic),
    "TD1": lambda _, critic: TD1Estimator(gamma=0.9, value_network=critic),
    "TDLambda": lambda _, critic: TDLambdaEstimator(gamma=0.9, lmbda=0.8, value_network=critic),
    "V-trace": lambda actor, critic: VTrace(0.9, actor, critic),
}
LEARNING: dict[str, Callable[[Case], Any]] = {
    "PPO": lambda case: on_policy(case, ClipPPOLoss, ESTIMATORS["GAE"]),
    "PPO, TD0": lambda case: on_policy(case, ClipPPOLoss, ESTIMATORS["TD0"]),
    "PPO, TD1": lambda case: on_policy(case, ClipPPOLoss, ESTIMATORS["TD1"]),
    "A2C": lambda case: on_policy(case, A2CLoss, ESTIMATORS["TDLambda"]),
    "Reinforce": lambda case: on_policy(case, ReinforceLoss, ESTIMATORS["V-trace"]),
    "DQN": dqn,
    "SAC": lambda case: continuous(case, "SAC"),
    "TD3": lambda case: continuous(case, "TD3"),
    "discrete SAC": discrete_sac,
    "burn-in": burnt_in,
    "refresh": refreshed,
    "device": on_device,
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "observation", "state"), with_keys(LEARNING), ids=str)
def test_learning(path: str, observation: NestedKey, state: NestedKey) -> None:
    found = []
    for case in (Case(observation, state), Case(observation, "h")):
        torch.manual_seed(0)
        result = LEARNING[path](case)
        found.append(case.flat(result) if isinstance(result, TensorDictBase) else result)
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("observation", "state"), COMBINATIONS, ids=str)
def test_doctor_finds_nothing(observation: NestedKey, state: NestedKey) -> None:
    case = Case(observation, state)
    found = check_wiring(case.actor(LSTMModule), case.env(), auto_register_policy_transforms=True)
    assert {"feedback", "memory", "replay"} <= {result.name for result in found}
    assert [result for result in found if not result.passed] == []


def gru(state: NestedKey, reads: NestedKey = "observation") -> TensorDictSequential:
    memory = GRUModule(3, 3, in_keys=[reads, state], out_keys=["features", next_key(state)])
    head = TensorDictModule(nn.Linear(3, 3), ["features"], ["logits"])
    return ProbabilisticActor(TensorDictSequential(memory, head), in_keys=["logits"], distribution_class=Categorical)


@pytest.mark.parametrize(
    ("observation", "state", "said"),
    [
        (("robot", "joint"), "robot", r"'robot' can't be a tensor because \[\('robot', 'joint'\)\] are nested in it"),
        ("observation", ("observation", "h"), "can't be nested in 'observation', which is a tensor"),
        ("observation", "reward", "'reward' is another entry of a step"),
        ("observation", ("action", "h"), "'action' is another entry of a step"),
        ("observation", ("next", "h"), "'next' is another entry of a step"),
        ("observation", ("collector", "h"), "'collector' is another entry of a step"),
    ],
)
def test_a_state_that_would_overwrite_another_entry(observation: NestedKey, state: NestedKey, said: str) -> None:
    env = GymWrapper(Bot(OBSERVATIONS[observation]))
    with pytest.raises(ArgumentError, match=said):
        Collector(env, gru(state, observation), frames_per_batch=8)


@pytest.mark.parametrize("name", ["action", "reward", "done", "terminated", "next", "_reset", "collector"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_observation_with_the_name_of_another_entry(name: str, nested: bool) -> None:
    space = gym.spaces.Dict({name: gym.spaces.Dict({"x": BOX}) if nested else BOX, "y": BOX})
    with pytest.raises(ArgumentError, match=f"{name!r} is another entry of a step.*drop_observations"):
        GymWrapper(Bot(space))
    assert list(GymWrapper(Bot(space), drop_observations=[name]).observation_spec.keys()) == ["y"]


def test_a_state_with_the_key_of_an_observation() -> None:
    space = gym.spaces.Dict({"observation": BOX, "h": gym.spaces.Box(-1, 1, (1, 3), np.float32)})
    policy = gru("h")
    with pytest.raises(WiringError, match=r"\('next', 'h'\).*overwrites at every step"):
        Collector(GymWrapper(Bot(space)), policy, frames_per_batch=8)
    with pytest.raises(WiringError, match=r"\('next', 'h'\).*overwrites at every step"):
        GymWrapper(Bot(space), policy=policy).rollout(3, policy)


@pytest.mark.parametrize(
    "transform",
    [InitTracker("observation"), StepCounter(step_count_key="observation"), RewardSum(out_keys=["observation"])],
    ids=repr,
)
def test_a_transform_that_would_overwrite_an_observation(transform: Transform) -> None:
    with pytest.raises(ArgumentError, match="already declares it"):
        GymWrapper(Bot(BOX)).append_transform(transform)
    with pytest.raises(ArgumentError, match="can't be a tensor"):
        GymWrapper(Bot(OBSERVATIONS["robot", "joint"])).append_transform(StepCounter(step_count_key="robot"))


def test_a_step_that_was_made_already_names_nested_states() -> None:
    case = Case(("robot", "joint"), ("robot", "h"))
    policy = case.actor()
    env = GymWrapper(Bot(OBSERVATIONS[case.observation]), policy=policy)
    after = env.step(policy(env.reset()))
    with pytest.raises(UsageError, match=r"new states \[\('robot', 'actor_h'\)\]"):
        env.step(after)


def test_names_with_dots_are_other_names() -> None:
    env = GymWrapper(Bot(gym.spaces.Dict({"a": gym.spaces.Dict({"b": BOX}), "a.b": BOX})))
    assert set(env.reset().keys(True, True)) >= {("a", "b"), "a.b"}


@pytest.mark.parametrize(("kind", "config"), [(PPO, PPOConfig), (DQN, DQNConfig)])
@pytest.mark.parametrize("name", ["memory", "embedding", "state_h", "advantage"])
def test_runs_refuse_observations_with_names_of_their_networks(kind: Any, config: Any, name: str) -> None:
    gym.register("Named-v0", lambda: Bot(gym.spaces.Dict({name: BOX, "other": BOX})))
    try:
        with pytest.raises(ArgumentError, match=f"{name!r}.*--drop-observations {name}"):
            kind(config(env="Named-v0", num_envs=2, cell="gru"))
    finally:
        gym.registry.pop("Named-v0")
