"""PufferLib: ``PuffeRL`` with its ``LSTMWrapper`` and gymnasium emulation, after its ``examples/pufferl.py``."""

# PufferLib has an interpreter of its own; there, this file isn't taken for it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import io
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pufferlib
import pufferlib.emulation
import pufferlib.models
import pufferlib.pytorch
import pufferlib.vector
import torch
from pufferlib import pufferl

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.script import Script, ScriptedEnv

SIZE = 16
"""Units of the LSTM, and of the encoder before it."""


class PufferLib:
    """PufferLib, with the settings of its ``config/default.ini`` except discounts, optimizer (Adam) and device."""

    gamma, lmbda, no_agents = 0.99, 0.95, ""
    documented: Mapping[str, str] = {
        "every-step-once": "minibatches are drawn by priority: prio_alpha in config/default.ini",
        "replay-any-ends": "minibatches are drawn by priority: some rows weren't drawn",
        "agents-count": '"we are not yet handling masks in this version": PuffeRL.evaluate in pufferl.py',
    }

    def __init__(self) -> None:
        # An nvcc on the PATH makes PufferLib take its CPU build for one with the CUDA kernel.
        pufferl.ADVANTAGE_CUDA = False
        torch.set_num_threads(1)
        self.versions = {
            "pufferlib": "3.0.0",
            "torch": torch.__version__,
            "numpy": np.__version__,
        }

    def make(self, setup: Setup) -> PufferLibAgent:
        """Create an agent."""
        return PufferLibAgent(setup, self.gamma, self.lmbda)


class PufferLibAgent:
    """An encoder and an LSTM that actor and critic share.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        torch.manual_seed(setup.seed)
        self.folder = tempfile.mkdtemp()
        self.config = settings(setup, gamma, lmbda, self.folder)
        env = environment(setup.script)
        base = pufferlib.models.Default(env.driver_env, hidden_size=SIZE)
        self.policy = pufferlib.models.LSTMWrapper(env.driver_env, base, input_size=SIZE, hidden_size=SIZE)
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer = pufferl.PuffeRL(self.config, env, self.policy)
        self.trainer.last_log_time = math.inf  # no dashboard

    def collect(self) -> Outputs:
        """Collect a batch ``[N, T]`` with ``evaluate``, and compute advantages as ``train`` does."""
        trainer, config = self.trainer, self.config
        trainer.evaluate()
        advantages = pufferl.compute_puff_advantage(
            trainer.values,
            trainer.rewards,
            trainer.terminals,
            torch.ones_like(trainer.values),
            torch.zeros_like(trainer.values),
            config["gamma"],
            config["gae_lambda"],
            config["vtrace_rho_clip"],
            config["vtrace_c_clip"],
        )
        batch = (trainer.observations, trainer.actions, trainer.logprobs, trainer.values, advantages)
        return Outputs(*(entry.numpy().copy() for entry in batch))

    def learn(self) -> list[Outputs]:
        """Call ``train``."""
        found: list[Outputs] = []

        def record(_: Any, inputs: tuple[Any, ...], outputs: tuple[Any, Any]) -> None:
            (observations, state), (logits, values) = inputs, outputs
            with torch.no_grad():
                log_probs = pufferlib.pytorch.sample_logits(logits, action=state["action"])[1]
            shape = state["action"].shape
            entries = (observations, state["action"], log_probs.reshape(shape), values.reshape(shape))
            found.append(Outputs(*(entry.detach().numpy().copy() for entry in entries)))

        hook = self.policy.register_forward_hook(record)
        self.trainer.train()
        hook.remove()
        return found

    def play(self, script: Script, steps: int) -> Outputs:
        """Call ``eval``, which samples actions: those returned are the likelier ones of the logits it computed.

        Steps in which an environment ignores the action and resets don't count.
        """
        env = environment(script)
        seen: list[Any] = []
        taken: list[Any] = []
        counted: list[Any] = []
        forward_eval = self.policy.forward_eval

        def forward(observations: Any, state: Any) -> Any:
            if len(seen) == steps:
                raise _Played
            logits, values = forward_eval(observations, state)
            seen.append(observations.numpy().copy())
            taken.append(logits.argmax(-1).numpy())
            counted.append([not each.done for each in env.envs])
            return logits, values

        arguments = {"train": {"device": "cpu", "use_rnn": True}, "save_frames": 0, "fps": 0}
        with mock.patch.object(self.policy, "forward_eval", forward), contextlib.suppress(_Played):
            pufferl.eval("scripted", arguments, env, self.policy)
        env.close()
        return Outputs(np.stack(seen), np.stack(taken), counted=np.stack(counted))

    def save(self, path: Path) -> None:
        """Call ``save_checkpoint``."""
        shutil.copy(self.trainer.save_checkpoint(), path)

    def load(self, path: Path) -> None:
        """Load the parameters, as ``load_policy`` does."""
        self.policy.load_state_dict(torch.load(path))

    def export(self, path: Path) -> Play:
        """Raise: ``export`` writes the parameters alone."""
        raise NotOffered("its export writes the parameters for C programs, without the network")

    def close(self) -> None:
        """Stop the monitoring thread and close the environments."""
        self.trainer.utilization.stop()
        self.trainer.vecenv.close()
        shutil.rmtree(self.folder)


class _Played(Exception):
    """Ends ``eval``, which goes on forever."""


class _Rendered(ScriptedEnv):
    """A scripted environment that ``eval`` can render."""

    render_mode = "human"

    def render(self) -> None:
        """Do nothing."""


def environment(script: Script) -> Any:
    """Create the environments of a script."""
    indices = iter([0, *range(script.num_envs)])  # the first one only tells the spaces

    def creator(buf: Any = None, seed: int = 0) -> Any:
        if script.agents > 1:
            return pufferlib.emulation.PettingZooPufferEnv(env=script.make_agents(next(indices)), buf=buf, seed=seed)
        return pufferlib.emulation.GymnasiumPufferEnv(env=_Rendered(script, next(indices)), buf=buf, seed=seed)

    return pufferlib.vector.make(creator, backend=pufferlib.vector.Serial, num_envs=script.num_envs)


def settings(setup: Setup, gamma: float, lmbda: float, folder: str) -> dict[str, Any]:
    """Return the settings of the trainer."""
    with mock.patch.object(sys, "argv", ["puffer"]):
        config: dict[str, Any] = pufferl.load_config("default")["train"]
    batch = setup.script.num_rows * setup.steps
    config.update(
        env="scripted",
        use_rnn=True,
        seed=setup.seed,
        device="cpu",
        optimizer="adam",
        anneal_lr=False,
        learning_rate=setup.learning_rate,
        gamma=gamma,
        gae_lambda=lmbda,
        update_epochs=setup.epochs,
        batch_size=batch,
        minibatch_size=batch // setup.minibatches,
        bptt_horizon=setup.steps,
        total_timesteps=10**9,
        checkpoint_interval=10**9,
        data_dir=folder,
    )
    return config
