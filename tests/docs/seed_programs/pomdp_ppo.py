"""Program that trains a minimal LSTM policy on Pendulum with PPO."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector
from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
from recurl.data.replay_buffers.samplers import SamplerWithoutReplacement
from recurl.envs import ExplorationType, GymEnv, InitTracker, StepCounter, TransformedEnv
from recurl.envs.utils import check_env_specs
from recurl.modules import (
    MLP,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value.advantages import GAE

OBS_DIM = 3
ACT_DIM = 1
HIDDEN = 64


def make_env() -> TransformedEnv:
    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    env.append_transform(StepCounter(max_steps=200))
    return env


def main(total_frames: int = 50_176, frames_per_batch: int = 512) -> list[float]:
    """Train; return the value losses, one per batch of frames."""
    torch.manual_seed(0)
    lstm = LSTMModule(
        input_size=OBS_DIM,
        hidden_size=HIDDEN,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["lstm_out", ("next", "rs_h"), ("next", "rs_c")],
    )
    head = TensorDictModule(
        nn.Sequential(MLP(HIDDEN, out_features=ACT_DIM * 2, num_cells=[64]), NormalParamExtractor()),
        in_keys=["lstm_out"],
        out_keys=["loc", "scale"],
    )
    policy = TensorDictSequential(lstm, head)
    proof_env = make_env()
    actor = ProbabilisticActor(
        policy,
        in_keys=["loc", "scale"],
        spec=proof_env.full_action_spec_unbatched,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    critic = ValueOperator(
        MLP(OBS_DIM, out_features=1, num_cells=[64, 64]),
        in_keys=["observation"],
    )
    check_env_specs(make_env().append_transform(lstm.make_tensordict_primer()))

    adv = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor_network=actor, critic_network=critic, clip_epsilon=0.2)
    optim = torch.optim.Adam(loss.parameters(), lr=3e-4)
    collector = Collector(
        create_env_fn=lambda: make_env().append_transform(lstm.make_tensordict_primer()),
        policy=actor,
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
    )
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames_per_batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=64,
    )
    value_losses, frames = [], 0
    for data in collector:
        frames += data.numel()
        assert data["action"].abs().max() <= 2.0
        with set_recurrent_mode(True), torch.no_grad():
            data = adv(data)
        rb.extend(data.reshape(-1))
        first = None
        for batch in rb:
            optim.zero_grad(set_to_none=True)
            losses = loss(batch)
            first = losses.detach() if first is None else first
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optim.step()
        assert first is not None
        # Shuffled single steps, each from the state stored with it: before an update nothing has changed.
        assert abs(first["max_ratio"] - 1) < 1e-4
        assert first["clip_fraction"] == 0
        value_losses.append(first["loss_critic"].item())
        collector.update_policy_weights_()
    collector.shutdown()
    assert frames == total_frames
    return value_losses


if __name__ == "__main__":
    main()
