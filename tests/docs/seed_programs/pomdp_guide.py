"""Program of the guide to recurrent policies in partially observed environments, from modules to backends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.collectors import Collector, MultiSyncCollector
from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
from recurl.data.replay_buffers.samplers import SamplerWithoutReplacement
from recurl.envs import ExplorationType, GymEnv, InitTracker, TransformedEnv
from recurl.envs.utils import check_env_specs, step_mdp
from recurl.modules import (
    MLP,
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    set_recurrent_mode,
)
from recurl.modules.utils import get_primers_from_module
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value.advantages import GAE


class Built(NamedTuple):
    env: TransformedEnv
    lstm_module: LSTMModule
    policy: TensorDictSequential
    obs_dim: int
    hidden_size: int
    action_dim: int


def build() -> Built:
    """Build an environment that marks episode starts, and an LSTM with a head that outputs the action."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    obs_dim = env.observation_spec["observation"].shape[-1]
    hidden_size = 64
    action_dim = env.action_spec.shape[-1]
    assert (obs_dim, action_dim) == (3, 1)
    lstm_module = LSTMModule(
        input_size=obs_dim,
        hidden_size=hidden_size,
        num_layers=1,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["lstm_out", ("next", "rs_h"), ("next", "rs_c")],
    )
    mlp_head = TensorDictModule(
        MLP(in_features=hidden_size, out_features=action_dim, num_cells=[64]),
        in_keys=["lstm_out"],
        out_keys=["action"],
    )
    return Built(env, lstm_module, TensorDictSequential(lstm_module, mlp_head), obs_dim, hidden_size, action_dim)


def prime(built: Built) -> TransformedEnv:
    """Declare the states to the environment, by the primer of one module and by all primers of a policy."""
    env = built.env.append_transform(built.lstm_module.make_tensordict_primer())
    primers = get_primers_from_module(built.policy)
    for p in primers:  # one primer or several: both can be iterated
        env = env.append_transform(p)  # repeating it is harmless
    check_env_specs(env)
    root = env.reset()
    assert root["rs_h"].shape == root["rs_c"].shape == (1, 64)
    assert not root["rs_h"].any()
    assert root["is_init"].all()
    return env


def gru(built: Built) -> None:
    """A GRU has one state instead of two and is otherwise used the same."""
    gru_module = GRUModule(
        input_size=built.obs_dim,
        hidden_size=built.hidden_size,
        num_layers=1,
        in_keys=["observation", "rs"],
        out_keys=["gru_out", ("next", "rs")],
    )
    mlp_head_gru = TensorDictModule(
        MLP(in_features=built.hidden_size, out_features=built.action_dim, num_cells=[64]),
        in_keys=["gru_out"],
        out_keys=["action"],
    )
    gru_policy = TensorDictSequential(gru_module, mlp_head_gru)
    env_gru = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    env_gru = env_gru.append_transform(gru_module.make_tensordict_primer())
    traj = env_gru.rollout(policy=gru_policy, max_steps=5)
    assert traj["next", "rs"].shape == (5, 1, 64)
    assert torch.equal(traj["rs"][1:], traj["next", "rs"][:-1])


def step_mode(env: TransformedEnv, policy: TensorDictSequential) -> None:
    """Step one observation at a time; ``step_mdp`` turns the result of a step into the root of the next one."""
    td = env.reset()
    states = [td["rs_h"]]
    for _ in range(5):
        td = policy(td)
        td = env.step(td)
        assert torch.equal(td["rs_h"], states[-1])
        states.append(td["next", "rs_h"])
        td = step_mdp(td)
    assert all(state.any() for state in states[1:])


def recurrent_mode(env: TransformedEnv, policy: TensorDictSequential, lstm_module: LSTMModule) -> None:
    """A whole trajectory in one pass, which equals the steps it was collected in.

    A rollout steps in sequential mode, also inside a block of recurrent mode.
    """
    with set_recurrent_mode(True):
        traj = env.rollout(policy=policy, max_steps=32)
        stepped = traj["lstm_out"].clone()
        traj = lstm_module(traj)
    assert traj.shape == (32,)
    torch.testing.assert_close(traj["lstm_out"], stepped)


def collect(lstm_module: LSTMModule, policy: TensorDictSequential, frames_per_batch: int) -> None:
    """The collector carries states from step to step and resets them at episode starts."""
    collector = Collector(
        create_env_fn=lambda: TransformedEnv(
            GymEnv("Pendulum-v1"),
            InitTracker(),
        ).append_transform(lstm_module.make_tensordict_primer()),
        policy=policy,
        frames_per_batch=frames_per_batch,
        total_frames=10 * frames_per_batch,
        device="cpu",
    )
    for batch in collector:
        assert batch.shape == (frames_per_batch,)
        assert {"rs_h", "rs_c", "lstm_out", "action", "is_init", "next", "collector"} <= set(batch.keys())
        starts = batch["is_init"].squeeze(-1)
        assert starts.nonzero().flatten().tolist() == list(range(0, frames_per_batch, 200))  # Pendulum's episodes
        assert not batch["rs_h"][starts].any()
        carried = ~starts[1:]
        assert torch.equal(batch["rs_h"][1:][carried], batch["next", "rs_h"][:-1][carried])
        break
    collector.shutdown()


def workers(lstm_module: LSTMModule, policy: TensorDictSequential) -> None:
    """Each worker has its own states."""
    primer = lstm_module.make_tensordict_primer()

    def create_env() -> TransformedEnv:
        return TransformedEnv(GymEnv("Pendulum-v1"), InitTracker()).append_transform(primer)

    collector = MultiSyncCollector([create_env, create_env], policy, frames_per_batch=32, total_frames=32)
    try:
        (batch,) = list(collector)
    finally:
        collector.shutdown()
    assert batch.shape == (2, 16)
    assert torch.equal(batch["rs_h"][:, 1:], batch["next", "rs_h"][:, :-1])
    assert not torch.equal(batch["rs_h"][0], batch["rs_h"][1])


def train(built: Built, frames_per_batch: int, batches: int) -> list[float]:
    """PPO with a recurrent actor and a recurrent critic, on shuffled minibatches of single steps.

    PPO needs a stochastic policy, and the minibatches start in the middle of episodes: the critic's states come from
    collection, as the actor's do.
    """
    lstm_critic = LSTMModule(
        input_size=built.obs_dim,
        hidden_size=built.hidden_size,
        in_keys=["observation", "critic_rs_h", "critic_rs_c"],
        out_keys=["critic_lstm_out", ("next", "critic_rs_h"), ("next", "critic_rs_c")],
    )
    value_head = TensorDictModule(
        MLP(in_features=built.hidden_size, out_features=1, num_cells=[64]),
        in_keys=["critic_lstm_out"],
        out_keys=["state_value"],
    )
    critic = TensorDictSequential(lstm_critic, value_head)
    net = torch.nn.Sequential(
        MLP(in_features=built.hidden_size, out_features=2 * built.action_dim, num_cells=[64]), NormalParamExtractor()
    )
    actor = ProbabilisticActor(
        TensorDictSequential(built.lstm_module, TensorDictModule(net, in_keys=["lstm_out"], out_keys=["loc", "scale"])),
        in_keys=["loc", "scale"],
        spec=built.env.full_action_spec_unbatched,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    adv_module = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(actor_network=actor, critic_network=critic, clip_epsilon=0.2, entropy_coeff=0.01)
    replay_buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames_per_batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=128,
    )
    optim = torch.optim.Adam(loss_module.parameters(), lr=3e-4)
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"),
        TensorDictSequential(actor, critic),
        frames_per_batch=frames_per_batch,
        total_frames=batches * frames_per_batch,
    )
    critic_losses = []
    for batch in collector:
        with set_recurrent_mode(True), torch.no_grad():
            batch = adv_module(batch)
        assert batch["advantage"].shape == (frames_per_batch, 1)
        replay_buffer.extend(batch.reshape(-1))
        for step, minibatch in enumerate(replay_buffer):
            # Nearly all are single steps, each from its stored state.
            assert minibatch["is_init"].float().mean() > 0.9
            optim.zero_grad(set_to_none=True)
            loss = loss_module(minibatch)
            if step == 0:  # before an update the policy is the one that collected
                assert abs(loss["max_ratio"] - 1) < 1e-4
            (loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
            optim.step()
            critic_losses.append(loss["loss_critic"].item())
        collector.update_policy_weights_()
    collector.shutdown()
    return critic_losses


def backends(built: Built) -> None:
    """The backend affects sequences only, not single steps."""
    batch = built.env.rollout(8, built.policy)
    features = []
    for options in ({"recurrent_backend": "pad"}, {"recurrent_backend": "scan"}):
        lstm = LSTMModule(
            input_size=built.obs_dim,
            hidden_size=built.hidden_size,
            in_keys=["observation", "rs_h", "rs_c"],
            out_keys=["lstm_out", ("next", "rs_h"), ("next", "rs_c")],
            **options,
        )
        lstm.load_state_dict(built.lstm_module.state_dict())
        with set_recurrent_mode(True):
            features.append(lstm(batch.clone())["lstm_out"])
    torch.testing.assert_close(features[0], features[1])
    lstm_triton = LSTMModule(
        input_size=built.obs_dim,
        hidden_size=built.hidden_size,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["lstm_out", ("next", "rs_h"), ("next", "rs_c")],
        recurrent_backend="triton",
        recurrent_recompute="full",
        recurrent_matmul_precision="tf32",
    )
    lstm_triton.load_state_dict(built.lstm_module.state_dict())
    torch.testing.assert_close(lstm_triton(batch[0].clone())["lstm_out"], batch[0]["lstm_out"])


def main(frames_per_batch: int = 1024, batches: int = 3) -> None:
    torch.manual_seed(0)
    built = build()
    built = built._replace(env=prime(built))
    gru(built)
    step_mode(built.env, built.policy)
    recurrent_mode(built.env, built.policy, built.lstm_module)
    collect(built.lstm_module, built.policy, frames_per_batch)
    workers(built.lstm_module, built.policy)
    train(built, frames_per_batch, batches)
    backends(built)


if __name__ == "__main__":
    main()
