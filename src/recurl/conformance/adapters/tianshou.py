"""Tianshou: ``PPO`` with ``Recurrent`` and ``RecurrentCritic`` over stacked observations, as its cheat sheet describes.

The cheat sheet's "RNN-style Training" asks for a buffer with ``stack_num`` and a recurrent network, and refers to issue
19, where the maintainer shows it for PPO. The rest follows ``test/discrete/test_ppo_discrete.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from tianshou.algorithm.modelfree.ppo import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Recurrent
from tianshou.utils.net.continuous import RecurrentCritic
from tianshou.utils.torch_utils import policy_within_training_step
from torch import nn

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.script import ACTIONS, FEATURES, Script

HIDDEN = 16
"""Size of the memory."""
STACKED = "Recurrent.forward: updates take stacks [bsz, len, dim] without a state, evaluation [bsz, dim] with one"
"""Where it says that an update computes something else than collection."""


class Tianshou:
    """Tianshou.

    Attributes:
        stack_num: length of the stacked observations of an update.
        ignore_obs_next: whether the buffer takes next observations from the next step, as that of the example does.
    """

    no_agents = "agents of its environments act in turn (PettingZoo's AEC)"
    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = dict.fromkeys(
        (
            "replay",
            "replay-terminations",
            "replay-truncations",
            "replay-short-episodes",
            "replay-next-rollout",
            "replay-end-of-rollout",
            "replay-long-episodes",
            "replay-any-ends",
            "replay-after-updates",
            "passes",
        ),
        STACKED,
    )
    stack_num = 4
    ignore_obs_next = False

    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("tianshou", "torch", "gymnasium")}

    def make(self, setup: Setup) -> TianshouAgent:
        """Create an agent."""
        return TianshouAgent(setup, self)


class TianshouAgent:
    """Actor and critic with an LSTM each.

    Args:
        setup: how it collects and learns.
        adapter: the adapter, which has the options.
    """

    def __init__(self, setup: Setup, adapter: Tianshou) -> None:
        np.random.seed(setup.seed)  # noqa: NPY002 - as its examples do: its minibatches are drawn so
        torch.manual_seed(setup.seed)
        self.setup = setup
        envs = setup.script.num_envs
        self.frames = envs * setup.steps
        network: dict[str, Any] = {"layer_num": 1, "state_shape": (FEATURES,), "hidden_layer_size": HIDDEN}
        actor = Recurrent(action_shape=ACTIONS, **network)
        nn.init.orthogonal_(actor.fc2.weight, 10)  # greedy actions depend on the memory
        nn.init.zeros_(actor.fc2.bias)
        policy = DiscreteActorPolicy(
            actor=actor,
            action_space=Discrete(ACTIONS),
            deterministic_eval=True,
        )
        self.algorithm: Any = PPO(
            policy=policy,
            critic=RecurrentCritic(**network),
            optim=AdamOptimizerFactory(lr=setup.learning_rate),
            gamma=adapter.gamma,
            gae_lambda=adapter.lmbda,
        )
        self.stepped: list[Outputs] = []
        buffer = VectorReplayBuffer(
            envs * 128, envs, stack_num=adapter.stack_num, ignore_obs_next=adapter.ignore_obs_next
        )
        self.collector = self._collector(setup.script, self.stepped, buffer)

    def _collector(self, script: Script, stepped: list[Outputs], buffer: VectorReplayBuffer | None = None) -> Any:
        """Create a collector that notes what the policy returned in each step."""

        def note(action_batch: Any, rollout_batch: Any) -> None:
            actions = torch.as_tensor(action_batch.act)
            log_probs = action_batch.dist.log_prob(actions)
            stepped.append(Outputs(np.array(rollout_batch.obs), actions.clone(), log_probs.detach()))

        envs = DummyVectorEnv([partial(script.make, row) for row in range(script.num_envs)])
        collector = Collector[CollectStats](self.algorithm, envs, buffer, on_step_hook=note)
        collector.reset()  # as a trainer does at its start
        return collector

    def collect(self) -> Outputs:
        """Collect as ``OnPolicyTrainer`` does.

        ``update`` computes values and advantages: here that of a copy of the algorithm; those returned are before
        normalization.
        """
        self.stepped.clear()
        self.collector.reset_buffer(keep_statistics=True)  # as after an update, for rollouts without one
        with policy_within_training_step(self.algorithm.policy):
            self.collector.collect(n_step=self.frames)
        other = copy.deepcopy(self.algorithm)
        estimate = other.compute_episodic_return
        targets: list[Any] = []

        def watched(batch: Any, buffer: Any, indices: Any, v_s_: Any = None, v_s: Any = None, **others: Any) -> Any:
            result = estimate(batch, buffer, indices, v_s_, v_s, **others)
            targets.extend([v_s, result[1]])
            return result

        other.compute_episodic_return = watched
        with torch.random.fork_rng(devices=[]):
            self._update(other)
        values, advantages = (part.reshape(-1, self.setup.steps).T for part in targets)  # a row for each environment
        seen, actions, log_probs = (
            np.stack([getattr(step, name) for step in self.stepped])
            for name in ("observations", "actions", "log_probs")
        )
        return Outputs(seen, actions, log_probs, values, advantages)

    def _update(self, algorithm: Any) -> None:
        with policy_within_training_step(algorithm.policy):
            algorithm.update(
                buffer=self.collector.buffer,
                batch_size=self.frames // self.setup.minibatches,
                repeat=self.setup.epochs,
            )

    def learn(self) -> list[Outputs]:
        """Update, watching what actor and critic return to it."""
        found: list[Outputs] = []
        parts: list[Any] = []

        def after_policy(_: nn.Module, args: Any, result: Any) -> None:
            if torch.is_grad_enabled():  # not where it computes values and old log-probabilities
                log_probs = result.dist.log_prob(args[0].act).detach()
                parts.extend([np.array(args[0].obs[:, -1]), args[0].act.clone(), log_probs])

        def after_critic(_: nn.Module, args: Any, values: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                found.append(Outputs(parts[0], parts[1], parts[2], values[:, 0].detach().clone()))
                parts.clear()

        handles = [
            self.algorithm.policy.register_forward_hook(after_policy),
            self.algorithm.critic.register_forward_hook(after_critic),
        ]
        try:
            self._update(self.algorithm)
        finally:
            for handle in handles:
                handle.remove()
        self.collector.reset_buffer(keep_statistics=True)
        return found

    def play(self, script: Script, steps: int) -> Outputs:
        """Collect with a test collector."""
        stepped: list[Outputs] = []
        collector = self._collector(script, stepped)
        collector.collect(n_step=script.num_envs * steps)
        collector.env.close()
        return Outputs(np.stack([step.observations for step in stepped]), np.stack([step.actions for step in stepped]))

    def save(self, path: Path) -> None:
        """Save the algorithm."""
        torch.save(self.algorithm.state_dict(), path)

    def load(self, path: Path) -> None:
        """Load an algorithm."""
        self.algorithm.load_state_dict(torch.load(path, weights_only=False))

    def export(self, path: Path) -> Play:
        """Refuse: there is none."""
        raise NotOffered("Tianshou exports no policies")

    def close(self) -> None:
        """Close the environments."""
        self.collector.env.close()
