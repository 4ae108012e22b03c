"""Collection on plain tensors is bitwise equal to collection on TensorDicts; reasons are given if it isn't used."""

from __future__ import annotations

import re
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.collectors import collector as collection
from recurl.core.errors import ArgumentError, UsageError
from recurl.core.keys import TRAJ_IDS
from recurl.core.specs import Unbounded
from recurl.envs import EnvBase, GymEnv, GymWrapper, TransformedEnv
from recurl.modules import (
    Categorical,
    EGreedyModule,
    ExplorationType,
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    ObservationNorm,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
)
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.networks.agent import collecting
from recurl.transforms import Compose, RewardSum, StepCounter, TensorDictPrimer, Transform


class TensorDictEnv(TransformedEnv):
    """The same environment, stepped on TensorDicts."""

    def _needs_tensordict(self) -> str | None:
        return "for comparison"


def cartpole(rows: int | None = 3, categorical: bool = True) -> EnvBase:
    return GymEnv("recurl/MaskedCartPole-v1", num_envs=rows, categorical_action_encoding=categorical)


class DictEnv(gym.Env):
    """Observations in a nested Dict, one of them an image."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 2), np.uint8),
            "body": gym.spaces.Dict({"pose": gym.spaces.Box(-1, 1, (3,), np.float64)}),
        }
    )
    action_space = gym.spaces.Box(-2, 2, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(), {}

    def _observe(self) -> dict:
        image = self.np_random.integers(0, 256, (2, 2), dtype=np.uint8)
        return {"image": image, "body": {"pose": self.np_random.uniform(-1, 1, 3)}}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        end = self.np_random.random()
        return self._observe(), float(action.sum()), bool(end < 0.1), bool(end > 0.9), {}


def nested() -> EnvBase:
    mode = gym.vector.AutoresetMode.DISABLED
    return GymWrapper(gym.vector.SyncVectorEnv([DictEnv] * 3, autoreset_mode=mode))


def recurrent(cell: type, actor: bool = True, one_hot: bool = False) -> Callable[[EnvBase], nn.Module]:
    def build(env: EnvBase) -> nn.Module:
        memory = cell(2, 8, num_layers=2, in_key="observation", out_key="features", recurrent_backend="loop")
        head = Mod(nn.Linear(8, 2), ["features"], ["logits" if actor else "action_value"])
        if actor:
            distribution = OneHotCategorical if one_hot else Categorical
            return ProbabilisticActor(
                Seq(memory, head), ["logits"], distribution_class=distribution, return_log_prob=True
            )
        actor_module = QValueActor(Seq(memory, head), spec=env.action_spec_unbatched)
        return Seq(actor_module, EGreedyModule(env.action_spec_unbatched, eps_init=0.5))

    return build


def continuous(env: EnvBase) -> nn.Module:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = ObservationNorm((3,)), nn.Linear(7, 8)

        def forward(self, image: torch.Tensor, pose: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([image.flatten(-2) / 255, self.norm(pose)], -1))

    encode = Mod(Encoder(), ["image", ("body", "pose")], [("encoded", "all")])
    memory = GRUModule(8, 8, in_keys=[("encoded", "all"), "rs"], out_keys=["features", ("next", "rs")])
    head = Mod(nn.Sequential(nn.Linear(8, 4), NormalParamExtractor()), ["features"], ["loc", "scale"])
    return ProbabilisticActor(
        Seq(encode, memory, head),
        ["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )


def separate_trunks(env: EnvBase) -> nn.Module:
    config = PPOConfig(env="recurl/MaskedCartPole-v1", shared_trunk=False, hidden_size=8)
    return collecting(PPO.make_agent(config, env.observation_spec, env.action_spec_unbatched).policy)


CASES: dict[str, tuple[Callable[[], EnvBase], Callable[[EnvBase], nn.Module | None]]] = {
    "lstm": (cartpole, recurrent(LSTMModule)),
    "gru": (cartpole, recurrent(GRUModule)),
    "one environment": (lambda: cartpole(None), recurrent(LSTMModule)),
    "one-hot": (lambda: cartpole(categorical=False), recurrent(LSTMModule, one_hot=True)),
    "values": (cartpole, recurrent(GRUModule, actor=False)),
    "nested and continuous": (nested, continuous),
    "separate trunks": (cartpole, separate_trunks),
    "random actions": (nested, lambda env: None),
    "Pendulum": (lambda: GymEnv("Pendulum-v1", num_envs=2), lambda env: None),
}


def collect(
    case: str, lowered: bool, transforms: list[Transform], compiled: bool = False, **options: object
) -> tuple[list, Collector]:
    make, build = CASES[case]
    torch.manual_seed(1)
    base = make()
    policy = build(base)
    env = (TransformedEnv if lowered else TensorDictEnv)(base, Compose(*transforms))
    env.set_seed(5)
    rows = env.batch_size.numel()
    collector = Collector(env, policy, frames_per_batch=40 * rows, total_frames=120 * rows, **options)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(collection, "CompiledNetwork", lambda network: network)
        batches = list(collector)
    assert (collector.explain()["tensors"] is None) == lowered, collector.explain()["tensors"]
    return batches, collector


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_frames_per_traj": 7}, id="limit", marks=pytest.mark.slow),
        pytest.param({"set_truncated": True}, id="truncated", marks=pytest.mark.slow),
        pytest.param(
            {"reset_at_each_iter": True, "exploration_type": ExplorationType.DETERMINISTIC},
            id="reset",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_tensordict_path(case: str, options: dict) -> None:
    (fast, _), (plain, _) = (collect(case, way, [RewardSum(), StepCounter()], **options) for way in (True, False))
    for ours, theirs in zip(fast, plain, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        assert (ours.names, ours.batch_size) == (theirs.names, theirs.batch_size)
        for key in ours.keys(True, True):
            value, expected = ours[key], theirs[key]
            if key == TRAJ_IDS:  # numbered across the process
                value, expected = value - value.min(), expected - expected.min()
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected), key


@pytest.mark.parametrize("case", ["lstm", "gru", "one environment", "one-hot", "values", "separate trunks"])
def test_compiled_steps_are_those_of_the_tensordict_path(case: str) -> None:
    """Choices are the same, as random numbers are; values that lead to them are equal up to rounding."""
    (fast, _), (plain, _) = (collect(case, way, [StepCounter()], compiled=way) for way in (True, False))
    for ours, theirs in zip(fast, plain, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        assert torch.equal(ours["action"], theirs["action"])
        for key in ours.keys(True, True):
            value, expected = ours[key], theirs[key]
            assert value.dtype == expected.dtype
            if value.is_floating_point():
                assert (value - expected).norm() <= 2e-6 * expected.norm()
            elif key != TRAJ_IDS:
                assert torch.equal(value, expected)


def test_a_collector_says_why_its_policy_is_not_one_call() -> None:
    env = cartpole()
    assert Collector(env, separate_trunks(env), frames_per_batch=3).explain()["cpp"] is None
    values = Collector(env, recurrent(GRUModule, actor=False)(env), frames_per_batch=3)
    assert values.explain()["cpp"] == "EGreedyModule has no C++ implementation"
    assert Collector(env, None, frames_per_batch=3).explain()["cpp"] == "there is no policy"
    function = Collector(env, lambda td: td, frames_per_batch=3)
    assert function.explain()["cpp"] == function.explain()["tensors"] is not None


def test_entries_that_are_not_selected_stay_out_of_the_batch() -> None:
    batches, _ = collect("separate trunks", True, [])
    states = {f"{trunk}_state_{name}" for trunk in ("actor", "critic") for name in ("h", "c")}
    flags = {"done", "terminated", "truncated", "is_init"}
    assert set(batches[0].keys()) == {"observation", "action", "action_log_prob", "collector", "next", *states, *flags}
    assert set(batches[0]["next"].keys()) == {"observation", "reward", *states, *flags}


@pytest.mark.parametrize("edit", [True, False])
def test_a_root_entry_is_that_of_the_step_before_unless_it_was_edited(edit: bool) -> None:
    def see(observation: torch.Tensor) -> torch.Tensor:
        return observation.add_(1.0) if edit else observation + 1.0

    policy = Seq(Mod(see, ["observation"], ["seen"]), actor(head()))
    collector = Collector(cartpole(), policy, frames_per_batch=90)
    batch = collector._collect()
    assert collector.explain()["tensors"] is None
    continues = ~batch["next", "done"][:, :-1, 0]
    assert (~continues).any()
    before, after = batch["next", "observation"][:, :-1][continues], batch["observation"][:, 1:][continues]
    assert torch.equal(after, before + 1.0 if edit else before)
    assert torch.equal(batch["seen"], batch["observation"] + (0.0 if edit else 1.0))


def test_a_lowered_collector_resumes_from_its_state() -> None:
    _, collector = collect("lstm", True, [])
    state = collector.state_dict()
    torch.manual_seed(3)
    expected = collector._collect()
    torch.manual_seed(3)
    collector.load_state_dict(state)
    again = collector._collect()
    assert all(torch.equal(again[key], expected[key]) for key in expected.keys(True, True) if key != TRAJ_IDS)


def test_the_batch_follows_weights_hooks_and_modes_changed_between_batches() -> None:
    _, collector = collect("lstm", True, [])
    policy = collector.policy
    with torch.no_grad():
        policy.module[0].module[1].module.bias.copy_(torch.tensor([100.0, -100.0]))
    assert not collector._collect()["action"].any()
    seen = []
    handle = policy.register_forward_hook(lambda *args: seen.append(args))
    collector._collect()
    assert len(seen) == 40
    assert collector.explain()["tensors"] == "ProbabilisticActor has hooks"
    handle.remove()
    collector._collect()
    assert collector.explain()["tensors"] is None


class Doubling(Transform):
    def _step(self, tensordict: TensorDict, next_tensordict: TensorDict) -> TensorDict:
        return next_tensordict.apply_(lambda x: x)


class OwnStep(GymEnv):
    def _step(self, tensordict: TensorDict) -> TensorDict:
        return super()._step(tensordict).clone()


class OwnModule(Mod):
    def forward(self, tensordict: TensorDict) -> TensorDict:
        return super().forward(tensordict)


def head(module: type[Mod] = Mod, **options: object) -> Mod:
    return module(nn.Linear(2, 1), ["observation"], ["logits"], **options)


def actor(net: Mod, **options: object) -> ProbabilisticActor:
    options = {"distribution_class": Categorical} | options
    return ProbabilisticActor(net, ["logits"], **options)


@pytest.mark.parametrize(
    ("env", "policy", "options", "reason"),
    [
        (lambda: TransformedEnv(cartpole(), Doubling()), None, {}, "Doubling._step needs a TensorDict"),
        (lambda: OwnStep("recurl/MaskedCartPole-v1", num_envs=3), None, {}, "OwnStep._step needs a TensorDict"),
        (cartpole, lambda td: td.set("action", torch.zeros(3, dtype=torch.int64)), {}, "function is no"),
        (cartpole, actor(head(OwnModule)), {}, "OwnModule has its own forward"),
        (cartpole, actor(head(method="forward")), {}, "TensorDictModule has inplace, method"),
        (cartpole, actor(Mod(nn.Linear(2, 1), {"input": "observation"}, ["logits"])), {}, "a dict of in_keys"),
        (cartpole, actor(head()), {"init_random_frames": 1000}, "the first 1000 frames have random actions"),
        (cartpole, actor(head()), {"exploration_type": ExplorationType.MODE}, "Categorical under mode"),
        (cartpole, actor(head(), distribution_class=lambda logits: Categorical(logits)), {}, "the sampler of <lambda>"),
        (cartpole, Seq(head(), actor(head()), partial_tolerant=True), {}, "TensorDictSequential does more"),
    ],
)  # fmt: skip
def test_modules_that_need_a_tensordict_are_named_and_work(
    env: Callable[[], EnvBase], policy: object, options: dict, reason: str
) -> None:
    collector = Collector(env(), policy, frames_per_batch=30, **options)
    collector._collect()
    assert re.search(reason, str(collector.explain()["tensors"])), collector.explain()["tensors"]


def test_a_lowered_actor_without_a_scale_raises() -> None:
    net = Mod(nn.Linear(3, 2), ["observation"], ["loc", "scale"])
    policy = ProbabilisticActor(net, ["loc", "scale"], distribution_class=TanhNormal)
    collector = Collector(GymEnv("Pendulum-v1", num_envs=2), policy, frames_per_batch=4)
    with pytest.raises(UsageError, match="NormalParamExtractor"):
        collector._collect()


def test_a_missing_input_is_named_as_on_the_plain_path() -> None:
    policy = actor(Mod(nn.Linear(2, 1), ["absent"], ["logits"]))
    with pytest.raises(KeyError, match="absent"):
        Collector(cartpole(), policy, frames_per_batch=6)._collect()


def test_an_output_without_the_batch_dimensions_is_refused() -> None:
    policy = Seq(Mod(lambda x: x.sum(0), ["observation"], ["sums"]), actor(head()))
    with pytest.raises(ArgumentError, match=r"begin with the environment's batch size \[3\]; \('sums',\) has shape"):
        Collector(cartpole(), policy, frames_per_batch=6)._collect()


def test_buffers_that_a_policy_writes_again_are_copied_in_time() -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = torch.zeros(3, 1)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.buffer.copy_(observation[:, :1])

    policy = Seq(Mod(Reusing(), ["observation"], ["seen"]), actor(head()))
    collector = Collector(cartpole(), policy, frames_per_batch=30)
    batch = collector._collect()
    assert collector.explain()["tensors"] is None
    assert torch.equal(batch["seen"], batch["observation"][..., :1])


def test_inference_tensors_are_collected_too() -> None:
    class Inferring(nn.Module):
        @torch.inference_mode()
        def forward(self, observation: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return observation + 1.0, count + 1.0

    counting = Mod(Inferring(), ["observation", "count"], ["seen", ("next", "count")])
    primer = TensorDictPrimer(count=Unbounded(1))
    env = TransformedEnv(cartpole(), primer)
    collector = Collector(env, Seq(counting, actor(head())), frames_per_batch=90)
    batch = collector._collect()
    assert collector.explain()["tensors"] is None
    assert torch.equal(batch["next", "count"], batch["count"] + 1.0)
    continues = ~batch["next", "done"][:, :-1, 0]
    assert torch.equal(batch["count"][:, 1:][continues], batch["next", "count"][:, :-1][continues])
    assert not batch["count"][:, 1:][~continues].any()
