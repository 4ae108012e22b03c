"""The models of rsl_rl learn the same on recurl's backends, without padding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

import recurl
from recurl.recurrence import record_backends

pytest.importorskip("git", reason="rsl_rl's logger needs GitPython")
VecEnv: Any = pytest.importorskip("rsl_rl.env").VecEnv
RNN: Any = pytest.importorskip("rsl_rl.modules").RNN
OnPolicyRunner: Any = pytest.importorskip("rsl_rl.runners").OnPolicyRunner
split_and_pad_trajectories: Any = pytest.importorskip("rsl_rl.utils").split_and_pad_trajectories

FLOAT = torch.float64
NOW = "padded trajectories, now one call without padding"
ROWS, LIMIT = 8, 9


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["lstm", "gru"]), st.integers(1, 7), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99))
def test_trajectories_without_padding(kind: str, time: int, rows: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    plain = RNN(3, 8, 2, kind).to(FLOAT)
    model = copy.deepcopy(plain)
    swapped = recurl.accelerate(model).swapped
    assert swapped["rnn"] == f"torch.nn.{kind.upper()}"
    assert swapped["forward"] in (NOW, "swapped before")
    x = torch.randn(time, rows, 3, dtype=FLOAT)
    padded, masks = split_and_pad_trajectories(x, torch.rand(time, rows, 1) < rate)
    padded.requires_grad_()
    states = [torch.randn(2, padded.shape[1], 8, dtype=FLOAT, requires_grad=True) for _ in range(1 + (kind == "lstm"))]
    found = []
    for net in (model, plain):
        with record_backends() as ran:
            output = net(padded, masks, tuple(states) if kind == "lstm" else states[0])
        assert len(ran) == (2 if net is model else 0)
        found.append([output, *torch.autograd.grad(output.square().sum(), [padded, *states, *net.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
    for _ in range(3):
        torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-12, atol=1e-13)
        dones = torch.rand(rows) < 0.5
        model.reset(dones)
        plain.reset(dones)


def test_what_isnt_padded_as_usual_runs_as_written() -> None:
    plain = RNN(3, 8, 1, "lstm")
    model = copy.deepcopy(plain)
    recurl.accelerate(model)
    x, states = torch.randn(4, 4, 3), (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    gaps = torch.tensor([True, False, True, True])[:, None].expand(4, 4)
    torch.testing.assert_close(model(x, gaps, states), plain(x, gaps, states))
    seen: list[int] = []
    model.rnn.register_forward_hook(lambda *_: seen.append(1))
    masks = torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(model(x, masks, states), plain(x, masks, states))
    assert seen == [1]
    with pytest.raises(ValueError, match="Hidden states not passed"):
        model(x, masks)


class Env(VecEnv):
    """Points that drift, with random ends and a time limit."""

    num_envs, num_actions, max_episode_length, device, cfg = ROWS, 2, LIMIT, "cpu", {}

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.episode_length_buf, self.at = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, 3)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.at.clone()}, [ROWS])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        self.at = self.at / 2 + torch.randn(ROWS, 3, generator=self.random)
        self.at[:, :2] += actions / 10
        reward = self.at.sum(-1)
        self.episode_length_buf += 1
        late = self.episode_length_buf >= LIMIT
        done = late | (torch.rand(ROWS, generator=self.random) < 0.1)
        self.at[done], self.episode_length_buf[done] = 0.0, 0
        return self.get_observations(), reward, done.long(), {"time_outs": late}


def runner(kind: str) -> Any:
    torch.manual_seed(0)
    model = {"class_name": "RNNModel", "hidden_dims": [16], "rnn_type": kind, "rnn_hidden_dim": 8, "rnn_num_layers": 2}
    ppo = {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2, "schedule": "adaptive"}
    config = {
        "num_steps_per_env": 12,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "obs_normalization": True, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": model,
        "algorithm": ppo,
    }
    return OnPolicyRunner(Env(), config)


@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights:UserWarning")  # as of torch.nn's
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_runner_learns_the_same(kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    plain, ours = runner(kind), runner(kind)
    assert {"0.rnn.rnn", "0.rnn.forward", "1.rnn.rnn"} <= recurl.accelerate(
        nn.ModuleList([ours.alg.actor, ours.alg.critic])
    ).swapped.keys()
    for one in (plain, ours):
        torch.manual_seed(0)
        one.learn(3)
        one.save(str(tmp_path / f"{one is ours}.pt"))
    for model in ("actor", "critic"):
        found, expected = (dict(getattr(one.alg, model).state_dict()) for one in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    x = torch.randn(3, 1, 3)
    wanted = []
    for one in (ours, plain):
        one.load(str(tmp_path / "True.pt"))
        policy = one.get_inference_policy()
        policy.reset()
        wanted.append(torch.stack([policy(TensorDict({"policy": row}, [1])) for row in x]))
        one.load(str(tmp_path / "False.pt"))
    torch.testing.assert_close(*wanted)
    ours.load(str(tmp_path / "True.pt"))
    ours.export_policy_to_jit(str(tmp_path))
    scripted = torch.jit.load(str(tmp_path / "policy.pt"))
    torch.testing.assert_close(torch.stack([scripted(row) for row in x]), wanted[0])
    ours.export_policy_to_onnx(str(tmp_path))
    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    names = [one.name for one in session.get_inputs()]
    state = [torch.zeros(2, 1, 8).numpy() for _ in names[1:]]
    for row, expected in zip(x, wanted[0], strict=True):
        output, *state = session.run(None, dict(zip(names, [row.numpy(), *state], strict=True)))
        torch.testing.assert_close(torch.from_numpy(output), expected.detach(), rtol=1e-5, atol=1e-5)
