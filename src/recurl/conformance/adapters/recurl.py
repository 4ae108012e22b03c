"""recurl: its collector, ``GAE``, ``ClipPPOLoss`` and minibatches of sequences, as in the README."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tensordict
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import recurl
from recurl.collectors import Collector
from recurl.conformance.adapter import Outputs, Play, Setup
from recurl.conformance.playing import play_steps
from recurl.conformance.script import ACTIONS, FEATURES, Script
from recurl.data import SequenceMinibatches
from recurl.envs import EnvBase, ExplorationType, GymWrapper, PettingZooEnv
from recurl.modules import (
    ActorValueOperator,
    Categorical,
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.trainers import export_policy


class Recurl:
    """recurl itself."""

    gamma, lmbda, no_agents = 0.99, 0.95, ""
    documented: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.versions = {
            "recurl": recurl.__version__,
            "torch": torch.__version__,
            "tensordict": tensordict.__version__,
        }

    def make(self, setup: Setup) -> RecurlAgent:
        """Create an agent."""
        return RecurlAgent(setup, self.gamma, self.lmbda)


class RecurlAgent:
    """An LSTM that actor and critic share.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        torch.manual_seed(setup.seed)
        self.setup = setup
        trunk = LSTMModule(FEATURES, 16, in_key="observation", out_key="memory", recurrent_backend="fastest")
        self.heads = (nn.Linear(16, ACTIONS), nn.Linear(16, 1))
        head = TensorDictModule(self.heads[0], in_keys=["memory"], out_keys=["logits"])
        actor_head = ProbabilisticActor(head, ["logits"], distribution_class=Categorical, return_log_prob=True)
        model = ActorValueOperator(trunk, actor_head, ValueOperator(self.heads[1], in_keys=["memory"]))
        self.actor, self.critic = model.get_policy_operator(), model.get_value_operator()
        frames = setup.script.num_rows * setup.steps
        self.collector = Collector(environment(setup.script), self.actor, frames_per_batch=frames, total_frames=-1)
        self.batches = iter(self.collector)
        self.gae = GAE(gamma=gamma, lmbda=lmbda, value_network=self.critic)
        self.loss = ClipPPOLoss(self.actor, self.critic, normalize_advantage=True)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=setup.learning_rate)

    def collect(self) -> Outputs:
        """Collect a batch ``[N, T]`` and estimate its advantages."""
        self.batch = next(self.batches)
        self.gae(self.batch)
        return outputs(self.batch, self.batch["action_log_prob"], self.batch["state_value"], self.batch["advantage"])

    def learn(self) -> list[Outputs]:
        """Descend the loss of ClipPPOLoss over minibatches of whole rows."""
        found: list[Outputs] = []
        for _ in range(self.setup.epochs):
            for minibatch in SequenceMinibatches(self.batch, num_minibatches=self.setup.minibatches):
                with watched(self.heads[0]) as logits, watched(self.heads[1]) as values:
                    losses = self.loss(minibatch)
                self.optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                found.append(learned(minibatch, logits[0], values[0]))
                self.optimizer.step()
        return found

    def play(self, script: Script, steps: int) -> Outputs:
        """Collect greedily with another collector."""
        rows = script.num_rows
        collector = Collector(
            environment(script),
            self.actor,
            frames_per_batch=rows * steps,
            total_frames=rows * steps,
            exploration_type=ExplorationType.DETERMINISTIC,
        )
        batch = next(iter(collector))
        collector.shutdown()
        return outputs(batch)

    def save(self, path: Path) -> None:
        """Save the parameters."""
        torch.save(self.loss.state_dict(), path)

    def load(self, path: Path) -> None:
        """Load parameters; collection goes on."""
        self.loss.load_state_dict(torch.load(path))

    def export(self, path: Path) -> Play:
        """Export with ``torch.export``."""
        policy = recurl.load(export_policy(self.actor, environment(Script([[]])), path.with_suffix(".pt2")))

        def play(script: Script, steps: int) -> Outputs:
            return play_steps(script, steps, policy.predict)

        return play

    def close(self) -> None:
        """Shut the collector down."""
        self.collector.shutdown()


def environment(script: Script) -> EnvBase:
    """Create the environments of a script."""
    if script.agents > 1:
        indices = iter(range(script.num_envs))
        return PettingZooEnv(lambda: script.make_agents(next(indices)), script.num_envs)
    makers = [partial(script.make, row) for row in range(script.num_envs)]
    return GymWrapper(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), categorical_action_encoding=True)


@contextmanager
def watched(module: nn.Module) -> Generator[list[torch.Tensor]]:
    """Collect what a module returns, which then keeps its gradients."""
    found: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        found.append(output)

    hook = module.register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def learned(batch: TensorDictBase, logits: torch.Tensor, values: torch.Tensor) -> Outputs:
    """Return what a loss computed for a batch; steps count whose logits or values have a gradient."""
    assert logits.grad is not None
    assert values.grad is not None
    counted = logits.grad.any(-1) | values.grad.any(-1)
    log_probs = Categorical(logits=logits.detach()).log_prob(batch["action"])
    return Outputs(batch["observation"], batch["action"], log_probs, values.detach(), batch["advantage"], counted)


def outputs(batch: TensorDictBase, log_probs: Any = None, values: Any = None, advantages: Any = None) -> Outputs:
    """Return the outputs of a batch; those of absent agents don't count."""
    counted = batch.get(("collector", "mask"), None)
    return Outputs(batch["observation"], batch["action"], log_probs, values, advantages, counted)
