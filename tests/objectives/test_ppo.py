from __future__ import annotations

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch.nn import functional as F

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.data import LazyTensorStorage, SequenceMinibatches, TensorDictReplayBuffer
from recurl.envs import GymEnv
from recurl.execution.lowering import modules_in_order
from recurl.modules import GRUModule, LSTMModule, ObservationNorm
from recurl.modules.actors import ActorValueOperator, ValueOperator
from recurl.modules.networks import MLP
from recurl.objectives import ClipPPOLoss, LossModule
from recurl.objectives.value import GAE
from recurl.sequences.mode import recurrent_mode, set_recurrent_mode
from tests.objectives.simulate import HIDDEN, OBS, actor_head, collect, make_agent

LOSSES = ["loss_objective", "loss_critic", "loss_entropy"]
METRICS = ["entropy", "kl_approx", "clip_fraction", "ESS", "max_ratio", "mean_ratio", "explained_variance"]


def prepared(agent, rows=4, steps=12, dtype=torch.float32):
    agent.step.to(dtype)
    batch = collect(agent, rows, steps, 2, dtype=dtype)[1]
    return GAE(gamma=0.97, lmbda=0.9, value_network=agent.critic)(batch)


def off_policy(agent, **kwargs):
    """Return a batch whose stored log-probabilities differ from those of the policy."""
    batch = prepared(agent, dtype=torch.float64, **kwargs)
    batch["action_log_prob"] = batch["action_log_prob"] + 0.4 * torch.randn_like(batch["action_log_prob"])
    return batch


@pytest.mark.parametrize("kind", ["categorical", "one_hot", "tanh"])
@pytest.mark.parametrize(
    ("cell", "shared", "backend"), [("lstm", True, "pad"), ("gru", False, "loop"), ("none", True, "pad")]
)
def test_before_any_update_the_ratio_is_one(cell, shared, backend, kind):
    agent = make_agent(cell, shared, backend, kind)
    with torch.no_grad():
        for parameter in agent.step.parameters():
            parameter.mul_(2.0)
    batch = prepared(agent)
    loss = ClipPPOLoss(agent.actor, agent.critic)
    selected = batch.select(*loss.in_keys, strict=False)
    for minibatch in (*SequenceMinibatches(selected, 3), *SequenceMinibatches(selected, 3, slice_len=5)):
        with set_recurrent_mode(True), torch.no_grad():
            log_prob = agent.actor.get_dist(minibatch.clone()).log_prob(minibatch["action"])
        assert (log_prob - minibatch["action_log_prob"]).abs().max() < 1e-5
        out = loss(minibatch)
        assert out["clip_fraction"] == 0
        assert abs(out["max_ratio"].log()) < 1e-5
        torch.testing.assert_close(out["ESS"], torch.tensor(1.0))
        torch.testing.assert_close(out["loss_objective"], -minibatch["advantage"].mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic_type", ["smooth_l1", "l1", "l2"])
@pytest.mark.parametrize("cell", ["lstm", "none"])
def test_equals_the_formula(cell, critic_type):
    agent = make_agent(cell, True)
    batch = off_policy(agent)
    loss = ClipPPOLoss(
        agent.actor, agent.critic, entropy_coeff=0.3, critic_coeff=0.7, clip_epsilon=0.1, loss_critic_type=critic_type
    )
    out = loss(batch)
    with set_recurrent_mode(True):
        dist = agent.actor.get_dist(batch.clone())
        value = agent.critic(batch.clone())["state_value"]
    ratio = (dist.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    distance = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss, "l2": F.mse_loss}[critic_type]
    expected = {
        "loss_objective": -gain.mean(),
        "loss_critic": 0.7 * distance(value, target),
        "loss_entropy": -0.3 * dist.entropy().mean(),
        "entropy": dist.entropy().mean(),
        "kl_approx": (ratio - 1 - ratio.log()).mean(),
        "clip_fraction": ((ratio < 0.9) | (ratio > 1.1)).double().mean(),
        "ESS": ratio.sum() ** 2 / (ratio**2).sum() / ratio.numel(),
        "max_ratio": ratio.max(),
        "mean_ratio": ratio.mean(),
        "explained_variance": 1 - (target - value).var() / target.var(),
    }
    assert set(out.keys()) == set(expected) == set(loss.out_keys) == {*LOSSES, *METRICS}
    for key, number in expected.items():
        torch.testing.assert_close(out[key], number, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")
        assert out[key].shape == ()
        assert out[key].requires_grad == (key in LOSSES)
    assert 0 < out["clip_fraction"] < 1


def test_gradients_equal_those_of_separate_networks():
    agent = make_agent("lstm", True)
    batch = off_policy(agent)
    loss = ClipPPOLoss(agent.actor, agent.critic, entropy_coeff=0.1)
    sum(loss(batch)[key] for key in LOSSES).backward()
    grads = [parameter.grad.clone() for parameter in loss.parameters()]
    loss.zero_grad()
    with set_recurrent_mode(True):
        dist = agent.actor.get_dist(batch.clone())
        value = agent.critic(batch.clone())["state_value"]
    ratio, advantage = (dist.log_prob(batch["action"]) - batch["action_log_prob"]).exp(), batch["advantage"].squeeze(-1)
    (
        -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        - 0.1 * dist.entropy().mean()
        + F.smooth_l1_loss(value, batch["value_target"])
    ).backward()
    for grad, parameter in zip(grads, loss.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("shared", "runs"), [(True, 1), (False, 1)])
def test_every_module_runs_once(shared, runs):
    agent = make_agent("gru", shared)
    batch = prepared(agent)
    calls: dict[object, int] = {}
    for module in {*modules_in_order(agent.actor)[:-1], *modules_in_order(agent.critic)}:
        module.register_forward_hook(lambda module, *_: calls.__setitem__(module, calls.get(module, 0) + 1))
    ClipPPOLoss(agent.actor, agent.critic)(batch)
    assert set(calls.values()) == {runs}
    assert len(calls) == (3 if shared else 4)


def test_heads_that_write_the_same_key_do_not_disturb_each_other():
    """Both branches after the shared trunk use the name "hidden"."""
    trunk = TensorDictModule(MLP(OBS, 4), in_keys=["observation"], out_keys=["features"])
    hidden = [TensorDictModule(MLP(4, 4), in_keys=["features"], out_keys=["hidden"]) for _ in range(2)]
    logits = TensorDictModule(MLP(4, 2), in_keys=["hidden"], out_keys=["logits"])
    value = TensorDictModule(MLP(4, 1), in_keys=["hidden"], out_keys=["state_value"])
    sampler = modules_in_order(make_agent("none", True).actor)[-1]
    actor = type(make_agent("none", True).actor)(trunk, hidden[0], logits, sampler)
    critic = TensorDictSequential(trunk, hidden[1], value)
    batch = prepared(make_agent("none", True))
    out = ClipPPOLoss(actor, critic, loss_critic_type="l1")(batch)
    torch.testing.assert_close(
        out["loss_critic"], (critic(batch.clone())["state_value"] - batch["value_target"]).abs().mean()
    )
    torch.testing.assert_close(out["entropy"], actor.get_dist(batch.clone()).entropy().mean())


@pytest.mark.parametrize("mode", [True, False, None])
def test_runs_recurrently_whatever_the_mode_and_leaves_the_batch_alone(mode):
    agent = make_agent("lstm", False)
    batch = prepared(agent)
    before = batch.clone()
    with set_recurrent_mode(mode):
        out = ClipPPOLoss(agent.actor, agent.critic)(batch.lock_())
        assert recurrent_mode() is mode
    assert out["clip_fraction"] == 0
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


def test_padding_does_not_count():
    agent = make_agent("gru", True)
    batch = off_policy(agent)
    loss = ClipPPOLoss(agent.actor, agent.critic, normalize_advantage=True, clip_value=0.05)
    expected = loss(batch[:, :7].clone())
    batch["collector", "mask"] = torch.zeros(4, 12, dtype=torch.bool)
    batch["collector", "mask"][:, :7] = True
    for key in ("observation", "advantage", "value_target", "action_log_prob", "state_value"):
        batch[key][:, 7:] = 1e4
    out = loss(batch)
    for key in out.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        torch.testing.assert_close(out[key], expected[key], rtol=1e-9, atol=1e-12)
    sum(out[key] for key in LOSSES).backward()
    assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())


def test_flat_and_rows_agree():
    agent = make_agent("lstm", True)
    batch = off_policy(agent)
    loss = ClipPPOLoss(agent.actor, agent.critic)
    rows, flat = loss(batch), loss(batch.reshape(-1))
    for key in (*LOSSES, *METRICS):
        torch.testing.assert_close(rows[key], flat[key], rtol=1e-9, atol=1e-12)


def test_normalized_advantage():
    agent = make_agent("none", True)
    batch = prepared(agent)
    batch["advantage"] = 5 + 3 * batch["advantage"]
    advantage = batch["advantage"]
    out = ClipPPOLoss(agent.actor, agent.critic, normalize_advantage=True)(batch)
    batch["advantage"] = (advantage - advantage.mean()) / advantage.std(correction=0)
    torch.testing.assert_close(out["loss_objective"], ClipPPOLoss(agent.actor, agent.critic)(batch)["loss_objective"])
    assert torch.equal(batch["value_target"], batch["value_target"])


@pytest.mark.parametrize(("clip_value", "bound"), [(True, 0.2), (0.05, 0.05)])
def test_clipped_value(clip_value, bound):
    agent = make_agent("none", True)
    batch = prepared(agent)
    batch["state_value"] = batch["state_value"] + 0.3 * torch.randn(4, 12, 1)
    loss = ClipPPOLoss(agent.actor, agent.critic, clip_value=clip_value, loss_critic_type="l2")
    value, old = agent.critic(batch.clone())["state_value"], batch["state_value"]
    clipped = old + (value - old).clamp(-bound, bound)
    expected = torch.maximum((value - batch["value_target"]) ** 2, (clipped - batch["value_target"]) ** 2).mean()
    torch.testing.assert_close(loss(batch)["loss_critic"], expected)
    assert "state_value" in loss.in_keys
    with pytest.raises(MissingKeyError, match="'state_value'"):
        loss(batch.exclude("state_value"))


def test_without_entropy_bonus():
    agent = make_agent("none", True)
    loss = ClipPPOLoss(agent.actor, agent.critic, entropy_bonus=False)
    out = loss(prepared(agent))
    assert "loss_entropy" not in out
    assert not out["entropy"].requires_grad


def test_entropy_coefficient_can_be_scheduled():
    agent = make_agent("none", True)
    loss, batch = ClipPPOLoss(agent.actor, agent.critic, entropy_coeff=0.5), prepared(agent)
    before = loss(batch)["loss_entropy"]
    loss.entropy_coeff = 0.25
    torch.testing.assert_close(loss(batch)["loss_entropy"], before / 2)


def test_constant_targets_explain_nothing():
    agent = make_agent("none", True)
    batch = prepared(agent)
    batch["value_target"] = torch.ones(4, 12, 1)
    assert ClipPPOLoss(agent.actor, agent.critic)(batch)["explained_variance"] == 0


def test_in_keys_are_enough():
    for cell, shared in (("lstm", True), ("gru", False), ("none", True)):
        agent = make_agent(cell, shared)
        loss, batch = ClipPPOLoss(agent.actor, agent.critic), prepared(agent)
        selected = batch.select(*loss.in_keys, strict=False)
        assert ("collector", "traj_ids") in selected.keys(True)
        assert "next" not in selected
        torch.testing.assert_close(loss(selected)["loss_critic"], loss(batch)["loss_critic"])


def test_distribution_with_a_log_prob_per_component():
    net = TensorDictModule(MLP(OBS, 2), in_keys=["observation"], out_keys=["loc"])
    sampler = ProbabilisticTensorDictModule(
        ["loc"],
        ["action"],
        distribution_class=torch.distributions.Normal,
        distribution_kwargs={"scale": torch.ones(())},
        return_log_prob=True,
    )
    agent = make_agent("none", True)
    actor = type(agent.actor)(net, sampler)
    batch = actor(prepared(agent)).detach()
    assert batch["action_log_prob"].shape == (4, 12, 2)
    out = ClipPPOLoss(actor, agent.critic)(batch)
    torch.testing.assert_close(out["mean_ratio"], torch.tensor(1.0))
    torch.testing.assert_close(out["entropy"], torch.distributions.Normal(0.0, 1.0).entropy() * 2)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("action_log_prob", "return_log_prob=True"),
        ("advantage", "Run the advantage estimator"),
        ("value_target", "Run the advantage estimator"),
        ("action", "writes it during collection"),
    ],
)
def test_missing_entries_say_what_to_do(key, text):
    agent = make_agent("none", True)
    with pytest.raises(MissingKeyError, match=text):
        ClipPPOLoss(agent.actor, agent.critic)(prepared(agent).exclude(key))


def test_stored_log_prob_must_be_data():
    agent = make_agent("none", True)
    batch = prepared(agent)
    batch["action_log_prob"].requires_grad_()
    with pytest.raises(UsageError, match="must not require gradients"):
        ClipPPOLoss(agent.actor, agent.critic)(batch)


def test_wrong_shapes_are_refused():
    agent = make_agent("none", True)
    batch = prepared(agent)
    batch["advantage"] = torch.zeros(4, 12, 2)
    with pytest.raises(ArgumentError, match="'advantage' must have one number per token"):
        ClipPPOLoss(agent.actor, agent.critic)(batch)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"clip_epsilon": 0.0}, "clip_epsilon"),
        ({"clip_epsilon": 1.0}, "clip_epsilon"),
        ({"loss_critic_type": "huber"}, "loss_critic_type must be one of"),
        ({"clip_value": -1.0}, "clip_value"),
    ],
)
def test_options_out_of_range(arguments, text):
    agent = make_agent("none", True)
    with pytest.raises(ArgumentError, match=text):
        ClipPPOLoss(agent.actor, agent.critic, **arguments)


def test_actor_must_sample_one_action():
    agent = make_agent("none", True)
    with pytest.raises(ArgumentError, match=r"must end with a sampler .* its last module is a ValueOperator"):
        ClipPPOLoss(agent.critic, agent.critic)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_sequences_cut_out_of_episodes_need_their_states(cell):
    agent = make_agent(cell, False)
    batch = prepared(agent)
    loss = ClipPPOLoss(agent.actor, agent.critic)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(48), batch_size=8)
    buffer.extend(batch.reshape(-1))
    states = [key for key in agent.step.in_keys if ("next", key) in agent.step.out_keys]
    assert len(states) == (4 if cell == "lstm" else 2)
    for cut in (*SequenceMinibatches(batch, 2, slice_len=4), buffer.sample()):
        loss(cut)
        for state in states:
            with pytest.raises(MissingKeyError, match=f"middle of episodes, but the states .*{state}.* to start"):
                loss(cut.exclude(state))


def test_critic_must_write_its_value():
    agent = make_agent("none", True)
    critic = TensorDictModule(MLP(OBS, 1), in_keys=["observation"], out_keys=["v"])
    with pytest.raises(MissingKeyError, match="The critic must write it"):
        ClipPPOLoss(agent.actor, critic)(prepared(agent).exclude("state_value"))


def test_sequences_that_do_more_stay_whole():
    inner = TensorDictSequential(
        TensorDictModule(MLP(OBS, HIDDEN), in_keys=["observation"], out_keys=["a"]),
        TensorDictModule(MLP(HIDDEN, 1), in_keys=["a"], out_keys=["state_value"]),
        selected_out_keys=["state_value"],
    )

    class Doubling(TensorDictSequential):
        def forward(self, tensordict):
            out = super().forward(tensordict)
            return out.set("state_value", 2 * out["state_value"])

    custom, fresh = Doubling(*inner.module), TensorDictSequential(*inner.module, inplace=False)
    assert modules_in_order(TensorDictSequential(inner, custom, fresh)) == [inner, custom, fresh]
    assert len(modules_in_order(TensorDictSequential(TensorDictSequential(*inner.module)))) == 2
    batch = prepared(make_agent("none", True))
    loss = ClipPPOLoss(make_agent("none", True).actor, custom, loss_critic_type="l1")
    expected = (2 * inner(batch.clone())["state_value"] - batch["value_target"]).abs().mean()
    torch.testing.assert_close(loss(batch)["loss_critic"], expected)


def test_base_class_has_no_losses():
    with pytest.raises(NotImplementedError):
        LossModule()(prepared(make_agent("none", True)))


def test_nothing_is_read_back_from_the_device():
    """A meta tensor has no data to read: anything that would synchronize with a device fails on it."""
    agent = make_agent("none", True)
    batch = prepared(agent).to("meta")
    batch["collector", "mask"] = torch.ones(4, 12, dtype=torch.bool, device="meta")
    agent.step.to("meta")
    loss = ClipPPOLoss(agent.actor, agent.critic, normalize_advantage=True, clip_value=True)
    assert loss(batch)["loss_objective"].device.type == "meta"


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_ratio_is_one_on_environment_data_with_normalization(cell):
    norm = ObservationNorm((4,))
    norm.update(torch.randn(50, 4) * 3 + 1)
    module = {"lstm": LSTMModule, "gru": GRUModule}[cell](4, 16, in_key="normed", out_key="features")
    trunk = TensorDictSequential(TensorDictModule(norm, in_keys=["observation"], out_keys=["normed"]), module)
    both = ActorValueOperator(trunk, actor_head("one_hot", "features", 16), ValueOperator(MLP(16, 1), ["features"]))
    policy, critic = both.get_policy_operator(), both.get_value_operator()
    env = GymEnv("CartPole-v1", num_envs=3, policy=policy)
    env.set_seed(0)
    batch = env.rollout(40, policy, break_when_any_done=False)
    assert batch["next", "done"].any()
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    loss = ClipPPOLoss(policy, critic)
    for minibatch in SequenceMinibatches(batch.select(*loss.in_keys, strict=False), 4, slice_len=16):
        out = loss(minibatch)
        assert out["clip_fraction"] == 0
        assert abs(out["max_ratio"].log()) < 1e-5
        assert out["kl_approx"].abs() < 1e-6


def test_without_metrics_the_losses_alone_are_the_same():
    agent = make_agent("gru", True)
    batch, loss = off_policy(agent), ClipPPOLoss(agent.actor, agent.critic)
    everything = loss(batch)
    loss.metrics = False
    alone = loss(batch)
    assert set(everything.keys()) == {*LOSSES, *METRICS}
    assert set(alone.keys()) == set(LOSSES)
    assert all(torch.equal(alone[key], everything[key]) for key in LOSSES)
