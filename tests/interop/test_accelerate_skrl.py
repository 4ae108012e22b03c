"""The recurrent models of skrl's documentation learn the same on recurl's backends."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recurl
from recurl.recurrence import record_backends

agents: Any = pytest.importorskip("skrl.agents.torch.ppo")
models: Any = importlib.import_module("tests.interop.skrl_models")
HIDDEN, ROWS, STEPS, Policy, Value = models.HIDDEN, models.ROWS, models.STEPS, models.Policy, models.Value
FLOAT = torch.float64
NOW = "a loop over parts of sequences, now one call with resets"
SPACES = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([Policy, Value]), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99))
def test_parts_are_one_call(kind: Any, rows: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    plain = kind(*SPACES).to(FLOAT)
    model = copy.deepcopy(plain)
    swapped = recurl.accelerate(model).swapped
    assert swapped["lstm" if kind is Policy else "gru"].startswith("torch.nn")
    assert swapped["compute"] in (NOW, "swapped before")
    steps, ended = rows * STEPS, torch.rand(rows * STEPS, 1) < rate
    states = [torch.randn(1, steps, HIDDEN, dtype=FLOAT, requires_grad=True) for _ in range(1 + (kind is Policy))]
    batch = {"observations": torch.randn(steps, 3, dtype=FLOAT), "rnn": states, "terminated": ended}
    found = []
    for net in (model, plain):
        with record_backends() as ran:
            output, extra = net.compute(batch)
        assert len(ran) == (net is model)
        loss = output.square().sum() + sum(state.square().sum() for state in extra["rnn"])
        found.append(
            [output, *extra["rnn"], *torch.autograd.grad(loss, [*states, *net.parameters()], allow_unused=True)]
        )
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def test_other_flags_run_as_written() -> None:
    plain = Value(*SPACES)
    model = copy.deepcopy(plain)
    recurl.accelerate(model)
    states = torch.randn(1, 2 * STEPS, HIDDEN)
    batch = {"observations": torch.randn(2 * STEPS, 3), "rnn": [states], "terminated": torch.rand(2 * STEPS) < 0.3}
    seen: list[int] = []
    model.gru.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model.compute(batch), plain.compute(batch))
    cuts = int(batch["terminated"].view(-1, STEPS)[:, :-1].any(0).sum())
    assert len(seen) == 1 + cuts > 1


def agent(folder: Path, *, swap: bool) -> Any:
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.trainers.torch import SequentialTrainer

    torch.manual_seed(0)
    env: Any = wrap_env(gymnasium.make_vec("CartPole-v1", num_envs=ROWS, vectorization_mode="sync"))
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    networks = {"policy": Policy(*spaces.values()), "value": Value(*spaces.values())}
    config = {"rollouts": 16, "learning_epochs": 2, "mini_batches": 2, "learning_rate": 1e-3}
    config["experiment"] = {"directory": str(folder), "write_interval": 0, "checkpoint_interval": 0}
    made = agents.PPO_RNN(
        models=networks,
        memory=RandomMemory(memory_size=16, num_envs=ROWS, device="cpu"),
        cfg=config,
        device="cpu",
        **spaces,
    )
    if swap:
        swapped = recurl.accelerate(nn.ModuleDict(networks)).swapped
        assert {"policy.lstm", "policy.compute", "value.gru", "value.compute"} == swapped.keys()
    quiet = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    SequentialTrainer(cfg={"timesteps": 64, **quiet}, env=env, agents=made).train()
    env.close()
    return made


@pytest.mark.slow
def test_an_agent_learns_the_same(tmp_path: Path) -> None:
    ours, plain = agent(tmp_path, swap=True), agent(tmp_path, swap=False)
    for name in ("policy", "value"):
        found, wanted = (dict(one.models[name].state_dict()) for one in (ours, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    for one, other in ((ours, plain), (plain, ours)):
        with torch.no_grad():
            one.models["policy"].net.weight += 1
        one.save(str(tmp_path / "agent.pt"))
        other.load(str(tmp_path / "agent.pt"))
        assert torch.equal(other.models["policy"].net.weight, one.models["policy"].net.weight)
