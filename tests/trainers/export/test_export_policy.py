import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential
from torch import nn

import recurl
from recurl.core.errors import ArgumentError, ArgumentTypeError, NonFiniteError, UnsupportedError, WiringError
from recurl.core.specs import Unbounded
from recurl.envs import (
    ExplorationType,
    GymEnv,
    InitTracker,
    PreviousAction,
    PreviousReward,
    SerialEnv,
    TensorDictPrimer,
    TensorEnv,
    Transform,
    TransformedEnv,
    set_exploration_type,
)
from recurl.envs.tasks import TMaze
from recurl.modules import ActorValueOperator, Categorical, GRUModule, LSTMModule, ProbabilisticActor, ValueOperator
from recurl.trainers import export_policy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_verification")]

MEMORY = "recurl/MaskedCartPole-v1"


class Hidden(gym.Env):
    """Environment with an entry for the actor, one for a critic, and one for nobody."""

    observation_space = gym.spaces.Dict(
        {name: gym.spaces.Box(-1, 1, (size,)) for name, size in (("seen", 2), ("hidden", 3), ("unused", 1))}
    )
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, bool(self.np_random.random() < 0.1), False, {}


gym.register("recurl-test/HiddenEntries-v0", entry_point=Hidden)


def linear(read, inputs, write, outputs):
    return Mod(nn.Linear(inputs, outputs), in_keys=[read], out_keys=[write])


def recurrent(kind=LSTMModule, inputs=2, outputs=2, **options):
    memory = kind(inputs, 8, in_key="encoded", out_key="memory", **options)
    return ProbabilisticActor(
        TensorDictSequential(
            linear("observation", inputs, "encoded", inputs), memory, linear("memory", 8, "logits", outputs)
        ),
        ["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


def plain():
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2), nn.Tanh())
    return Mod(net, in_keys=["seen"], out_keys=["action"])


def masked_cartpole(num_envs=2, **options):
    return GymEnv(MEMORY, num_envs, categorical_action_encoding=True, **options)


CASES = {
    "lstm": (recurrent, masked_cartpole),
    "lstm-2": (lambda: recurrent(num_layers=2, recurrent_backend="triton"), lambda: masked_cartpole(None)),
    "gru": (lambda: recurrent(GRUModule), lambda: masked_cartpole(1)),
    "mlp": (plain, lambda: GymEnv("recurl-test/HiddenEntries-v0", num_envs=3)),
}


@pytest.mark.parametrize("suffix", [".pt2", ".recurl", ".onnx"])
@pytest.mark.parametrize("case", CASES)
def test_the_file_acts_as_the_actor(tmp_path, case, suffix):
    torch.manual_seed(0)
    actor, env = (make() for make in CASES[case])
    with env:
        policy = recurl.load(recurl.export_policy(actor, env, tmp_path / f"policy{suffix}"))
    actor.eval()
    assert policy.action_space == env.readers[1].space
    policy.observation_space.seed(0)
    with GymEnv(env.gym_env.spec.id, 3, categorical_action_encoding=True, policy=actor) as other:
        root = other.reset(seed=0)
        state = None
        for step in range(40):
            start = root["is_init"][:, 0] | (torch.arange(3) == step % 7)
            root["is_init"] = start.unsqueeze(-1)
            with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
                td = actor(root)
            observation = {"seen": root["seen"].numpy()} if case == "mlp" else root["observation"].numpy()
            action, state = policy.predict(observation, state, start.numpy())
            np.testing.assert_allclose(action, td["action"].numpy(), rtol=1e-5, atol=1e-6)
            for name, value in state.items():
                np.testing.assert_allclose(value, td["next", name].numpy(), rtol=1e-4, atol=1e-5)
            td, root = other.step_and_maybe_reset(td)


def test_the_actor_and_the_environment_stay_as_they_are(tmp_path):
    env = TransformedEnv(masked_cartpole())
    actor = recurrent()
    actor(GymEnv(MEMORY, 2, policy=actor).reset())["action_log_prob"].sum().backward()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    grads = [parameter.grad.clone() for parameter in actor.parameters()]
    specs = env.observation_spec
    draws = torch.get_rng_state()
    with env:
        export_policy(actor, env, tmp_path / "policy.pt2")
        assert not env.is_closed
        assert env.observation_spec == specs
        assert len(env.transform) == 0
    assert torch.equal(torch.get_rng_state(), draws)
    assert actor.training
    assert all(parameter.requires_grad for parameter in actor.parameters())
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, actor.parameters(), strict=True))
    assert all(torch.equal(before[name], value) for name, value in actor.state_dict().items())


def test_only_what_the_action_depends_on_is_exported(tmp_path):
    trunk = LSTMModule(2, 8, in_key="seen", out_key="memory")
    head = linear("memory", 8, "action", 2)
    model = ActorValueOperator(trunk, head, ValueOperator(nn.Linear(11, 1), in_keys=["memory", "hidden"]))
    with GymEnv("recurl-test/HiddenEntries-v0", num_envs=2) as env:
        path = export_policy(model, env, tmp_path / "policy.pt2")
    about = json.loads(path.with_name("policy.pt2.json").read_text())
    assert [part["name"] for part in about["inputs"]] == ["seen", "is_init", "recurrent_state_h", "recurrent_state_c"]
    assert list(recurl.load(path).observation_space.spaces) == ["seen"]


class Doubled(Transform):
    def _apply_transform(self, value):
        return 2 * value


def test_spaces_are_described_only_where_they_hold_what_the_actor_reads(tmp_path):
    actor = recurrent()

    def exported(env):
        with env:
            return export_policy(actor, env, tmp_path / "policy.pt2")

    for env in (
        TransformedEnv(masked_cartpole(), Doubled(in_keys=["reward"])),
        TransformedEnv(masked_cartpole(), InitTracker()),
        masked_cartpole(policy=actor),
    ):
        recurl.load(exported(env))
    for env in (TransformedEnv(masked_cartpole(), Doubled(in_keys=["observation"])), SerialEnv(2, masked_cartpole)):
        with pytest.raises(ArgumentError, match=r"exported without its spaces.*with transforms that change what"):
            recurl.load(exported(env))


def test_environments_on_a_device_and_previous_steps(tmp_path):
    env = TensorEnv(TMaze(corridor_length=3), 4, categorical_action_encoding=True)
    wired = env.append_transform(PreviousAction(env.action_spec_unbatched)).append_transform(PreviousReward())
    joined = Mod(
        lambda *parts: torch.cat([part.float() for part in parts], -1),
        in_keys=["observation", "previous_action", "previous_reward"],
        out_keys=["joined"],
    )
    actor = TensorDictSequential(
        joined,
        GRUModule(8, 8, in_key="joined", out_key="memory"),
        linear("memory", 8, "logits", 3),
        Mod(lambda logits: logits.argmax(-1), in_keys=["logits"], out_keys=["action"]),
    )
    policy = recurl.load(export_policy(actor, wired, tmp_path / "policy.pt2"))
    action, state = policy.predict(np.zeros(4, np.float32))
    assert sorted(state) == ["previous_action", "recurrent_state"]
    policy.predict(np.zeros(4, np.float32), state, reward=1.0)
    assert policy.action_space.contains(action)


def test_mistakes(tmp_path):
    actor, env = recurrent(), masked_cartpole()

    def refused(error, match, actor, env=env, name="policy.pt2"):
        with pytest.raises(error, match=match):
            export_policy(actor, env, tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    refused(ArgumentError, r"must end with one of \.pt2, \.onnx, \.recurl, got .*policy\.pt", actor, name="policy.pt")
    refused(ArgumentTypeError, "takes a TensorDict module as actor, got Linear", nn.Linear(2, 2))
    refused(ArgumentTypeError, "takes an environment of recurl, got Hidden", actor, Hidden())
    refused(ArgumentError, "must write 'action'.*but it writes .*'logits'", linear("observation", 2, "logits", 2))
    refused(ArgumentError, r"lacks \['seen'\]: it has \['observation', 'is_init'\]", plain())
    shared = TensorDictSequential(
        LSTMModule(2, 8, in_key="observation", out_key="a"),
        LSTMModule(8, 8, in_key="a", out_key="b"),
        linear("b", 8, "action", 2),
    )
    refused(WiringError, "must have its own state keys", shared)
    own = TensorDictSequential(
        Mod(lambda x, h: (x + h, h), in_keys=["observation", "h"], out_keys=["action", ("next", "h")])
    )
    refused(WiringError, r"states \['h'\] of the policy would not be fed back", own)
    primer = TensorDictPrimer({"h": Unbounded(2, 2)}, default_value=0.0)
    refused(UnsupportedError, r"the actor carries \['h'\] itself", own, TransformedEnv(env, primer))
    branching = Mod(
        lambda x: (x > 0).long()[:, 0] if x.sum() > 0 else x[:, 0].long(), in_keys=["observation"], out_keys=["action"]
    )
    refused(UnsupportedError, "can't be exported in format torch", branching)
    with torch.no_grad():
        next(actor.parameters())[0, 0] = torch.nan
    refused(NonFiniteError, "the actor must be finite", actor)
    env.close()
