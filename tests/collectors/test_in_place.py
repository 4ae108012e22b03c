"""Steps written in place are bitwise equal to those of a collector that allocates tensors at every step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector, in_place
from recurl.collectors.worker import WorkerCollector
from recurl.core.errors import ArgumentError
from recurl.core.keys import TRAJ_IDS
from recurl.core.specs import Unbounded
from recurl.envs import EnvBase, GroupedEnv, GymEnv, GymWrapper, TransformedEnv
from recurl.envs.workers_env import EnvInfo, Plan, Server, layout
from recurl.envs.workers_memory import SharedTensors
from recurl.execution.compiled import Signal, StepsInMemory, register_translation
from recurl.modules import (
    Categorical,
    ExplorationType,
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)
from recurl.recurrence.cpu import instruction_sets
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.networks.agent import collecting
from recurl.transforms import Compose, InitTracker, RewardSum, TensorDictPrimer, Transform
from recurl.transforms.base import Constant

from .random_ends import random_ends

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


class Apart(TransformedEnv):
    """A subclass, which might do more, so that its steps are not in place."""


class Reused(gym.vector.VectorEnv):
    """Observations, rewards and flags in arrays reused at every step, with unusual dtypes and strides."""

    metadata: ClassVar[dict] = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}

    def __init__(self, start: int = 0) -> None:
        self.num_envs = 3
        self.single_observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2, start=start)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 3)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 3)
        self._seen = np.zeros((4, 3), np.float32).T
        self._ends = np.zeros((2, 3), np.int64)
        self._reward = np.zeros(3, np.int32)
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        rows = np.ones(3, bool) if options is None else options["reset_mask"]
        self._seen[rows] = self._random.normal(size=(int(rows.sum()), 4))
        return self._seen, {}

    def step(self, actions: np.ndarray) -> tuple:
        assert actions.dtype == np.int64
        assert actions.flags.c_contiguous
        self._reward[...] = actions
        self._seen[...] = self._random.normal(size=(3, 4))
        self._ends[...] = self._random.random((2, 3)) < 0.1
        actions[...] = -1  # it may keep and modify its input
        return self._seen, self._reward, self._ends[0], self._ends[1], {}


class Nested(gym.Env):
    """Observations in a nested Dict, one of them an image."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 2), np.uint8),
            "body": gym.spaces.Dict({"pose": gym.spaces.Box(-1, 1, (3,), np.float64)}),
            "place": gym.spaces.Discrete(4),
        }
    )
    action_space = gym.spaces.Box(-2, 2, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(), {}

    def _observe(self) -> dict:
        image = self.np_random.integers(0, 256, (2, 2), dtype=np.uint8)
        pose = self.np_random.uniform(-1, 1, 3)
        return {"image": image, "body": {"pose": pose}, "place": self.np_random.integers(4)}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        end = self.np_random.random()
        return self._observe(), float(action.sum()), bool(end < 0.1), bool(end > 0.9), {}


class Numbers(gym.Env):
    """Observations that are single numbers."""

    observation_space = gym.spaces.Dict({"float": gym.spaces.Box(0, 1, ()), "many": gym.spaces.Discrete(1000)})
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(), {}

    def _observe(self) -> dict:
        return {"float": np.float32(self.np_random.random()), "many": self.np_random.integers(1000)}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        return self._observe(), float(action), bool(self.np_random.random() < 0.1), False, {}


class Seen(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.unsqueeze(-1)


register_translation(Seen, lambda program, module, a: Signal(a.value, (1,), a.dtype))


def numbers(env: EnvBase) -> nn.Module:
    head = Mod(nn.Sequential(nn.Linear(1, 2)), ["seen"], ["logits"])
    return ProbabilisticActor(
        Seq(Mod(Seen(), ["float"], ["seen"]), head), ["logits"], distribution_class=OneHotCategorical
    )


def nested() -> EnvBase:
    mode = gym.vector.AutoresetMode.DISABLED
    return GymWrapper(gym.vector.SyncVectorEnv([Nested] * 3, autoreset_mode=mode))


def cartpole(rows: int | None = 3, **options: object) -> EnvBase:
    return GymEnv("recurl/MaskedCartPole-v1", num_envs=rows, **options)


def choosing(cell: type | None, inputs: int = 2, **options: object) -> Callable[[EnvBase], nn.Module]:
    def build(env: EnvBase) -> nn.Module:
        memory = Mod(nn.Linear(inputs, 8), ["observation"], ["features"])
        if cell is not None:
            memory = cell(inputs, 8, in_key="observation", out_key="features", **options)
        distribution = Categorical if env.action_spec.shape == env.batch_size else OneHotCategorical
        return ProbabilisticActor(
            Seq(memory, Mod(nn.Linear(8, 2), ["features"], ["logits"])),
            ["logits"],
            distribution_class=distribution,
            return_log_prob=True,
        )

    return build


def continuous(key: object, inputs: int, size: int) -> Callable[[EnvBase], nn.Module]:
    def build(env: EnvBase) -> nn.Module:
        memory = LSTMModule(inputs, 8, in_key=key, out_key="features")
        head = Mod(nn.Sequential(nn.Linear(8, 2 * size), NormalParamExtractor()), ["features"], ["loc", "scale"])
        bounds = {"low": -2.0, "high": 2.0}
        return ProbabilisticActor(
            Seq(memory, head), ["loc", "scale"], distribution_class=TanhNormal, distribution_kwargs=bounds
        )

    return build


def trained(env: EnvBase) -> nn.Module:
    config = PPOConfig(env="recurl/MaskedCartPole-v1", shared_trunk=False, hidden_size=8)
    return collecting(PPO.make_agent(config, env.observation_spec, env.action_spec_unbatched).policy)


CASES: dict[str, tuple[Callable[[], EnvBase], Callable[[EnvBase], nn.Module]]] = {
    "lstm": (lambda: cartpole(categorical_action_encoding=True), choosing(LSTMModule)),
    "one-hot": (cartpole, choosing(LSTMModule, num_layers=2)),
    "gru": (lambda: cartpole(9), choosing(GRUModule, num_layers=2)),
    "no memory": (cartpole, choosing(None)),
    "one environment": (lambda: cartpole(None), choosing(LSTMModule)),
    "one integer": (lambda: cartpole(None, categorical_action_encoding=True), choosing(GRUModule)),
    "one row": (lambda: cartpole(1), choosing(LSTMModule)),
    "separate trunks": (lambda: cartpole(categorical_action_encoding=True), trained),
    "random ends": (lambda: random_ends(3), choosing(GRUModule, 4)),
    "random ends of one": (lambda: random_ends(None), choosing(LSTMModule, 4)),
    "reused arrays": (lambda: GymWrapper(Reused()), choosing(LSTMModule, 4)),
    "actions from 5": (lambda: GymWrapper(Reused(5), categorical_action_encoding=True), choosing(LSTMModule, 4)),
    "Pendulum": (lambda: GymEnv("Pendulum-v1", num_envs=2), continuous("observation", 3, 1)),
    "numbers": (lambda: GymWrapper(Numbers()), numbers),
    "nested": (nested, continuous(("body", "pose"), 3, 2)),
}


def collector_of(case: str, cls: type[TransformedEnv], transforms: list[Transform], **options: object) -> Collector:
    make, build = CASES[case]
    torch.manual_seed(1)
    base = make()
    policy = build(base)
    env = cls(base, Compose(*transforms))
    env.set_seed(5)
    return Collector(env, policy, frames_per_batch=40 * env.batch_size.numel(), **options)


def check_equal(ours: TensorDict, theirs: TensorDict) -> None:
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert (ours.names, ours.batch_size, ours.device) == (theirs.names, theirs.batch_size, theirs.device)
    for key in ours.keys(True, True):
        value, expected = ours[key], theirs[key]
        if key == TRAJ_IDS:  # numbered across the process
            value, expected = (ids.unique(return_inverse=True)[1] for ids in (value, expected))
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), key


def check_bits(case: str, transforms: list[Transform], **options: object) -> None:
    found = []
    for cls in (TransformedEnv, Apart):
        collector = collector_of(case, cls, transforms, **options)
        batches = [collector._collect() for _ in range(3)]
        assert (collector.explain()["in place"] is None) == (cls is TransformedEnv), collector.explain()["in place"]
        found.append((batches, collector, torch.get_rng_state()))
    (ours, collector, state), (theirs, other, expected) = found
    assert torch.equal(state, expected)
    assert collector.frames == other.frames
    for batch, wanted in zip(ours, theirs, strict=True):
        assert batch["next", "done"].any() or "Pendulum" in case
        check_equal(batch, wanted)
    roots = [each._groups.joined(each._roots) for each in (collector, other)]
    check_equal(*roots)
    assert len({value.data_ptr() for value in roots[0].values(True, True)}) == len(list(roots[0].keys(True, True)))


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_steps_that_make_tensors(case: str) -> None:
    check_bits(case, [])


@pytest.mark.parametrize(
    "options",
    [
        {"set_truncated": True},
        {"reset_at_each_iter": True, "exploration_type": ExplorationType.DETERMINISTIC},
        {"storing_device": "cpu"},
        {"sequence_length": 8},
        {"sequence_length": 1, "set_truncated": True},
    ],
)
def test_options_change_nothing(options: dict) -> None:
    check_bits("random ends", [InitTracker(), InitTracker()], **options)


def test_one_step_of_a_batch() -> None:
    collectors = [collector_of("random ends", cls, []) for cls in (TransformedEnv, Apart)]
    batches = []
    for collector in collectors:
        torch.manual_seed(0)
        collector.steps_per_batch = 1
        batches.append([collector._collect() for _ in range(12)])
    for ours, theirs in zip(*batches, strict=True):
        check_equal(ours, theirs)
    assert collectors[0].explain()["in place"] is None


def test_only_the_first_batch_begins_with_a_separate_step(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[int] = []
    make_steps = in_place.interact_in_turn

    def noted(*args: Any, **options: Any) -> list[Any]:
        apart.append(args[3])
        return make_steps(*args, **options)

    monkeypatch.setattr(in_place, "interact_in_turn", noted)
    collector = collector_of("lstm", TransformedEnv, [])
    order = [list(collector._collect().keys(True, True)) for _ in range(3)]
    assert apart == [1]
    assert order[0] == order[1] == order[2]


@pytest.mark.parametrize("change", ["names", "doubles", "uncompiled"])
def test_a_policy_changed_between_batches_writes_its_new_outputs(change: str) -> None:
    def other(env: EnvBase) -> nn.Module:
        dtype = torch.float64 if change == "doubles" else torch.float32
        first = nn.Linear(2, 8, dtype=dtype)
        layers = {"names": [first], "doubles": [Double(), first], "uncompiled": [first, nn.Softsign()]}[change]
        memory = Mod(nn.Sequential(*layers), ["observation"], ["seen" if change == "names" else "features"])
        head = Mod(nn.Linear(8, 2, dtype=dtype), memory.out_keys, ["logits"])
        return ProbabilisticActor(Seq(memory, head), ["logits"], distribution_class=OneHotCategorical)

    found = []
    for cls in (TransformedEnv, Apart):
        collector = collector_of("no memory", cls, [])
        batches = [collector._collect()]
        torch.manual_seed(2)
        collector.policy, policy = other(collector.env), collector.policy
        batches += [collector._collect() for _ in range(2)]
        assert (collector.explain()["in place"] is None) == (change == "names" and cls is TransformedEnv)
        collector.policy = policy
        batches += [collector._collect() for _ in range(2)]
        assert (collector.explain()["in place"] is None) == (cls is TransformedEnv)
        found.append(batches)
    for ours, theirs in zip(*found, strict=True):
        check_equal(ours, theirs)


@pytest.mark.parametrize("length", [None, 4, 5])
def test_a_step_that_is_no_call_of_the_library_is_made_by_the_modules(
    length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, expected = (
        collector_of("random ends", cls, [], sequence_length=length) for cls in (TransformedEnv, Apart)
    )
    run = StepsInMemory.__call__

    def refuse(self: StepsInMemory, step: int) -> bool:
        return step % 3 != 1 and run(self, step)

    torch.manual_seed(3)
    wanted = expected._collect()
    monkeypatch.setattr(StepsInMemory, "__call__", refuse)
    torch.manual_seed(3)
    batch = collector._collect()
    assert collector.explain()["in place"] is None
    for key in wanted.keys(True, True):
        if wanted[key].is_floating_point():
            torch.testing.assert_close(batch[key], wanted[key], rtol=1e-5, atol=1e-6)
        elif key != TRAJ_IDS:
            assert torch.equal(batch[key], wanted[key]), key
    assert collector.frames == expected.frames == batch.numel()


class NaNs(Reused):
    def step(self, actions: np.ndarray) -> tuple:
        seen, *others = super().step(actions)
        self.steps = getattr(self, "steps", 0) + 1
        seen[...] = seen if self.steps % 7 else np.nan
        return seen, *others


def test_choices_among_nans_are_refused_as_before() -> None:
    messages = []
    for cls in (TransformedEnv, Apart):
        torch.manual_seed(0)
        env = cls(GymWrapper(NaNs()))
        env.set_seed(0)
        collector = Collector(env, choosing(LSTMModule, 4)(env), frames_per_batch=60)
        with pytest.raises(Exception, match=r"(?s).") as raised:
            collector._collect()
        messages.append((type(raised.value), str(raised.value)))
        assert collector._roots is None
        assert collector.frames == 0
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda seen, *others: (seen[:, :3], *others), r"'observation' must be torch.float32 of shape \[3, 4\]"),
        (lambda seen, reward, *others: (seen, None, *others), "3 numbers as reward"),
        (lambda seen, reward, ends, *others: (seen, reward, ends + 7, *others), "3 bools as terminated"),
        (lambda *result: result[:4], "got 4 values"),
    ],
)
def test_results_that_dont_fit_are_refused_in_the_middle_of_a_batch(result: Callable, match: str) -> None:
    env = GymWrapper(Reused())
    step, made = env.gym_env.step, []

    def later(actions: np.ndarray) -> tuple:
        made.append(1)
        return step(actions) if len(made) < 5 else result(*step(actions))

    env.set_seed(0)
    env.gym_env.step = later
    collector = Collector(env, choosing(LSTMModule, 4)(env), frames_per_batch=60)
    with pytest.raises(Exception, match=match):
        collector._collect()
    assert len(made) == 5
    env.gym_env.step = step
    assert collector._collect()["collector", "traj_steps"][:, 0].tolist() == [0, 0, 0]
    assert collector.explain()["in place"] is None


def test_an_action_out_of_range_is_named_as_a_tensor() -> None:
    env = cartpole(categorical_action_encoding=True)
    _, reader = env.readers
    with pytest.raises(ArgumentError, match=r"got torch.int64 of shape \[3\]: tensor\(\[0, 2, 1\]\)"):
        reader.read(np.array([0, 2, 1]))


def test_a_worker_sends_a_heartbeat_at_every_step() -> None:
    class Channel:
        beats = 0

        def beat(self) -> None:
            self.beats += 1

    channel, env = Channel(), cartpole()
    collector = WorkerCollector(env, choosing(LSTMModule)(env), channel.beat, frames_per_batch=30)
    collector._collect()
    assert collector.explain()["in place"] is None
    assert (channel.beats, collector.frames) == (10, 30)


class Doubled(InitTracker):
    """Transform that does more than set its constants."""

    def _step(self, tensordict: TensorDict, next_tensordict: TensorDict) -> TensorDict:
        return super()._step(tensordict, next_tensordict).set("reward", 2 * next_tensordict["reward"])

    _step._recurl_takes_entries = True


class Rewarding(Transform):
    """Sets a constant reward."""

    def constants(self) -> list[Constant]:
        return [Constant("reward", 1.0, 1.0)]


class OwnEnv(GymEnv):
    pass


def observed(env: EnvBase) -> nn.Module:
    policy = choosing(LSTMModule)(env)
    return Seq(Mod(nn.Linear(2, 2), ["observation"], ["observation"]), *policy.module)


@pytest.mark.parametrize(
    ("make", "transforms", "options", "reason"),
    [
        (cartpole, [RewardSum()], {}, r"RewardSum\(.*\) sets more than constants"),
        (cartpole, [], {"max_frames_per_traj": 7}, "StepCounter.* sets more than constants"),
        (cartpole, [TensorDictPrimer(extra=Unbounded(2))], {}, "'extra'"),
        (cartpole, [TensorDictPrimer(extra=Unbounded(2), random=True)], {}, "sets more than constants"),
        (cartpole, [Rewarding()], {}, r"sets \[\('reward',\)\] of the environment"),
        (cartpole, [Doubled()], {}, "sets more than constants"),
        (lambda: OwnEnv("recurl/MaskedCartPole-v1", num_envs=3), [], {}, "OwnEnv may do more than GymWrapper"),
        (lambda: GroupedEnv([cartpole(2), cartpole(2)]), [], {}, "steps in groups"),
        (cartpole, [], {"init_random_frames": 1000}, "isn't one call of the C"),
    ],
)
def test_why_steps_make_tensors(
    make: Callable[[], EnvBase], transforms: list[Transform], options: dict, reason: str
) -> None:
    torch.manual_seed(0)
    env = TransformedEnv(make(), Compose(*transforms))
    if "init_random_frames" in options:
        memory, _ = choosing(LSTMModule)(env).module
        policy = Seq(*memory, Mod(lambda x: nn.functional.one_hot(x.argmax(-1), 2), ["logits"], ["action"]))
    else:
        policy = choosing(LSTMModule)(env)
    collector = Collector(env, policy, frames_per_batch=40 * env.batch_size.numel(), **options)
    assert collector.explain()["in place"] is not None
    batch = collector._collect()
    assert re.search(reason, str(collector.explain()["in place"])), collector.explain()["in place"]
    assert batch["next", "done"].any()


def test_a_policy_that_overwrites_its_inputs_is_not_run_in_place() -> None:
    env = cartpole()
    collector = Collector(env, observed(env), frames_per_batch=60)
    batch = collector._collect()
    assert collector.explain()["cpp"] is None
    assert "observation" in str(collector.explain()["in place"])
    continues = ~batch["next", "done"][:, :-1, 0]
    assert not torch.equal(batch["next", "observation"][:, :-1][continues], batch["observation"][:, 1:][continues])


def test_a_worker_calls_the_hooks_of_an_instance() -> None:
    env = cartpole()
    step = env._step
    env._step = lambda tensordict: step(tensordict).set("reward", torch.full((3, 1), 7.0))
    given, result, fresh = (
        {key: value[0] for key, value in SharedTensors(entries).tensors.items()}
        for entries in layout(EnvInfo.of(env), 1)
    )
    server = Server(env, given, result, fresh)
    server.run(Plan(0, "reset", (), None))
    given["action"].zero_()
    server.run(Plan(0, "advance", (), (torch.int64, (3,))))
    assert result["reward"].tolist() == [[7.0]] * 3


@pytest.mark.parametrize("case", CASES)
def test_a_worker_writes_the_same_bits_without_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that reset done rows, in memory shared with the parent."""
    found = []
    for apart in (False, True):
        env = CASES[case][0]()
        if apart:
            monkeypatch.setattr(env, "in_place", partial(EnvBase.in_place, env))
        env.set_seed(3)
        parts = [
            {key: value[0] for key, value in SharedTensors(entries).tensors.items()}
            for entries in layout(EnvInfo.of(env), 1)
        ]
        given, result, fresh = parts
        server = Server(env, given, result, fresh)
        assert (server._in_place is None) == apart
        server.run(Plan(0, "reset", (), None))
        torch.manual_seed(4)
        seen = []
        for _ in range(60):
            action = env.action_spec.rand()
            data = action.reshape(-1).view(torch.uint8)
            given["action"][: len(data)] = data
            server.run(Plan(0, "advance", (), (action.dtype, tuple(action.shape))))
            done = result["done"].reshape(env.batch_size or [1])
            seen.append({key: value.clone() for key, value in result.items()})
            roots = {key: value if env.batch_size else value[None] for key, value in fresh.items()}
            seen.append({("root", key): value[done] for key, value in roots.items()})
        found.append(seen)
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
