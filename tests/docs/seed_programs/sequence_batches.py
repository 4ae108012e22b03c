"""Program of the tutorial on training from sequence batches: collection, slices, modes, isolation, a gradient step."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
from recurl.data.replay_buffers.samplers import SliceSampler
from recurl.envs import GymEnv
from recurl.modules import LSTMModule, set_recurrent_mode

OBS_DIM = 4
N_ACTIONS = 2
HIDDEN = 16
SLICE_LEN = 8
NUM_SLICES = 4


def make_policy() -> Seq:
    lstm = LSTMModule(
        input_size=OBS_DIM,
        hidden_size=HIDDEN,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
        python_based=True,
    )
    head = Mod(nn.Linear(HIDDEN, N_ACTIONS), in_keys=["features"], out_keys=["logits"])
    chooser = Mod(lambda logits: logits.argmax(-1, keepdim=False), in_keys=["logits"], out_keys=["action"])
    return Seq(lstm, head, chooser)


def collect(policy: Seq, device: torch.device) -> tuple[Collector, TensorDictBase]:
    """The collector wires the environment automatically."""
    env = GymEnv("CartPole-v1", device=device)
    env.set_seed(0)
    collector = Collector(
        env,
        policy,
        frames_per_batch=64,
        total_frames=512,
        device=device,
        storing_device=device,
        auto_register_policy_transforms=True,
        reset_at_each_iter=False,
    )
    data = next(iter(collector))
    assert data.shape == (64,)
    assert sorted(data.keys()) == [
        *("action", "collector", "done", "features", "is_init", "logits", "next", "observation"),
        *("rs_c", "rs_h", "terminated", "truncated"),
    ]
    assert data["is_init"].shape == (64, 1)
    assert data["next", "rs_h"].shape == (64, 1, HIDDEN)
    # The flag is set at the first step and right after the end of each episode, and nowhere else.
    ended = data["next", "done"].squeeze(-1)
    assert data["is_init"].squeeze(-1).tolist() == [True, *ended[:-1].tolist()]
    assert 1 < data["is_init"].sum() < 64
    # The recorded integer is the executed action: it pushes the cart in that direction.
    push = (data["next", "observation"] - data["observation"])[:, 1]
    assert torch.equal(push > 0, data["action"] == 1)
    return collector, data


def replay(data: TensorDictBase, device: torch.device) -> TensorDictReplayBuffer:
    """Slices are concatenated into a flat batch; the flag marks the start of each."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(max_size=1024, device=device),
        sampler=SliceSampler(slice_len=SLICE_LEN, strict_length=False),
        batch_size=SLICE_LEN * NUM_SLICES,
    )
    rb.extend(data)
    for _ in range(20):
        sample = rb.sample()
        positions = sample["is_init"].squeeze(-1).nonzero().squeeze(-1).tolist()
        lengths = torch.diff(torch.tensor([*positions, len(sample)]))
        assert positions[0] == 0
        assert len(positions) == NUM_SLICES
        assert lengths.max() <= SLICE_LEN
        assert (sample["collector", "traj_ids"].diff() != 0).sum() <= NUM_SLICES - 1
    whole = next(s for s in iter(rb.sample, None) if len(s) == SLICE_LEN * NUM_SLICES)
    assert whole["is_init"].squeeze(-1).nonzero().squeeze(-1).tolist() == [0, 8, 16, 24]
    return rb


def equivalence(policy: Seq) -> None:
    """Four single steps equal one call on a sequence of four."""
    steps = 4
    demo = TensorDict(
        {
            "observation": torch.randn(steps, OBS_DIM),
            "rs_h": torch.zeros(steps, 1, HIDDEN),
            "rs_c": torch.zeros(steps, 1, HIDDEN),
            "is_init": torch.tensor([True, False, False, False]),
        },
        batch_size=[steps],
    )
    outs_seq = []
    h = torch.zeros(1, 1, HIDDEN)
    c = torch.zeros(1, 1, HIDDEN)
    for t in range(steps):
        step = demo[t : t + 1].clone()
        step["rs_h"] = h
        step["rs_c"] = c
        with set_recurrent_mode(False):
            step_out = policy(step)
        outs_seq.append(step_out["features"])
        h = step_out["next", "rs_h"]
        c = step_out["next", "rs_c"]
    with set_recurrent_mode(True):
        out_rec = policy(demo.clone())
    torch.testing.assert_close(torch.cat(outs_seq, dim=0), out_rec["features"], rtol=1e-4, atol=1e-5)


def replayed(policy: Seq, rb: TensorDictReplayBuffer) -> None:
    """In recurrent mode, a sample reproduces the collected features."""
    sample = rb.sample()
    with set_recurrent_mode(True):
        out = policy(sample.clone())
    assert out["features"].shape == (len(sample), HIDDEN)
    assert out["logits"].shape == (len(sample), N_ACTIONS)
    torch.testing.assert_close(out["features"], sample["features"], rtol=1e-4, atol=1e-5)


def isolation(policy: Seq) -> None:
    """Of two concatenated sequences, the second is independent of the first."""
    t_a = t_b = 4
    is_init_packed = torch.zeros(1, t_a + t_b, dtype=torch.bool)
    is_init_packed[0, 0] = True
    is_init_packed[0, t_a] = True
    obs = torch.randn(1, t_a + t_b, OBS_DIM)
    noisy_h = torch.randn(1, t_a + t_b, 1, HIDDEN)
    noisy_c = torch.randn(1, t_a + t_b, 1, HIDDEN)
    packed = TensorDict(
        {"observation": obs, "rs_h": noisy_h, "rs_c": noisy_c, "is_init": is_init_packed},
        batch_size=[1, t_a + t_b],
    )
    is_init_b = torch.zeros(1, t_b, dtype=torch.bool)
    is_init_b[0, 0] = True
    b_only = TensorDict(
        {
            "observation": obs[:, t_a:].clone(),
            "rs_h": noisy_h[:, t_a:].clone(),
            "rs_c": noisy_c[:, t_a:].clone(),
            "is_init": is_init_b,
        },
        batch_size=[1, t_b],
    )
    with set_recurrent_mode(True):
        packed_out = policy(packed.clone())
        b_out = policy(b_only)
        packed["observation"][:, :t_a] += 1.0  # a different past
        other = policy(packed)
    torch.testing.assert_close(packed_out["features"][:, t_a:], b_out["features"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other["features"][:, t_a:], b_out["features"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(other["features"][:, :t_a], packed_out["features"][:, :t_a])


def gradient_path(rb: TensorDictReplayBuffer, steps: int) -> list[float]:
    """Take supervised updates in recurrent mode; return the loss of a fixed sample before each of them."""
    trainable_policy = make_policy()
    optimizer = torch.optim.Adam(trainable_policy.parameters(), lr=3e-4)
    target_logits = torch.zeros(N_ACTIONS)
    target_logits[0] = 1.0
    fixed = rb.sample()

    def loss_of(sample: TensorDictBase) -> torch.Tensor:
        with set_recurrent_mode(True):
            out = trainable_policy(sample.clone())
        return (out["logits"] - target_logits.expand_as(out["logits"])).pow(2).mean()

    losses = []
    for _ in range(steps):
        losses.append(loss_of(fixed).item())
        loss = loss_of(rb.sample())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in trainable_policy.parameters())
        optimizer.step()
    return losses


def main(updates: int = 4) -> list[float]:
    torch.manual_seed(0)
    device = torch.device("cpu")
    policy = make_policy()
    policy.eval()
    assert policy.in_keys == ["observation", "rs_h", "rs_c", "is_init"]
    assert policy.out_keys == ["features", ("next", "rs_h"), ("next", "rs_c"), "logits", "action"]
    collector, data = collect(policy, device)
    rb = replay(data, device)
    equivalence(policy)
    replayed(policy, rb)
    isolation(policy)
    losses = gradient_path(rb, updates)
    collector.shutdown()
    return losses


if __name__ == "__main__":
    main()
