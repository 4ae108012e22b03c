"""SB3-Contrib: ``RecurrentPPO`` with ``MlpLstmPolicy``, as in the example of its documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import sb3_contrib
import stable_baselines3
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.playing import play_steps
from recurl.conformance.script import Script


class Sb3Contrib:
    """SB3-Contrib."""

    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.versions = {
            "sb3_contrib": sb3_contrib.__version__,
            "stable_baselines3": stable_baselines3.__version__,
            "torch": torch.__version__,
        }

    def make(self, setup: Setup) -> Sb3ContribAgent:
        """Create an agent."""
        return Sb3ContribAgent(setup, self.gamma, self.lmbda)


class InTurns(RecurrentPPO):
    """``RecurrentPPO`` whose ``learn`` collects and doesn't train; ``update`` trains."""

    def train(self) -> None:
        """Wait for ``update``."""

    def update(self) -> None:
        """Train on the last rollout."""
        super().train()


class Sb3ContribAgent:
    """An LSTM for the actor and one for the critic, by default.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        self.frames = setup.steps * setup.script.num_envs
        self.found: list[Outputs] = []
        self.mask: Any = None
        self.env = DummyVecEnv([partial(setup.script.make, row) for row in range(setup.script.num_envs)])
        model: Any = InTurns(
            "MlpLstmPolicy",
            self.env,
            learning_rate=setup.learning_rate,
            n_steps=setup.steps,
            batch_size=self.frames // setup.minibatches,
            n_epochs=setup.epochs,
            gamma=gamma,
            gae_lambda=lmbda,
            policy_kwargs={"lstm_hidden_size": 16},
            seed=setup.seed,
            device="cpu",
        )
        # The default gain of 0.01 hides the memory in the probabilities.
        torch.nn.init.orthogonal_(model.policy.action_net.weight)
        self.model = self._watched(model)

    def _watched(self, model: Any) -> InTurns:
        """Record what ``evaluate_actions`` returns for each minibatch of an update."""
        get, evaluate = model.rollout_buffer.get, model.policy.evaluate_actions

        def minibatches(batch_size: int | None = None) -> Iterator[Any]:
            for samples in get(batch_size):
                self.mask = samples.mask > 0
                yield samples

        def evaluated(observations: Any, actions: Any, *state: Any) -> tuple[Any, ...]:
            values, log_probs, entropy = evaluate(observations, actions, *state)
            kept = (part.detach().clone() for part in (log_probs, values.flatten()))
            self.found.append(Outputs(observations, actions, *kept, counted=self.mask))
            return values, log_probs, entropy

        model.rollout_buffer.get, model.policy.evaluate_actions = minibatches, evaluated
        return model

    def collect(self) -> Outputs:
        """Collect with ``learn``."""
        self.model.learn(self.frames, reset_num_timesteps=False)
        buffer = self.model.rollout_buffer
        entries = (buffer.observations, buffer.actions, buffer.log_probs, buffer.values, buffer.advantages)
        return Outputs(*(entry.copy() for entry in entries))

    def learn(self) -> list[Outputs]:
        """Train on minibatches of padded sequences; padding doesn't count."""
        self.found = []
        self.model.update()
        return self.found

    def play(self, script: Script, steps: int) -> Outputs:
        """Step with ``predict``."""

        def predict(observation: Any, state: Any, starts: Any) -> tuple[Any, Any]:
            return self.model.predict(observation, state=state, episode_start=starts, deterministic=True)

        return play_steps(script, steps, predict)

    def save(self, path: Path) -> None:
        """Save with ``save``."""
        self.model.save(path)

    def load(self, path: Path) -> None:
        """Load with ``load``, which resets the environments."""
        self.model = self._watched(InTurns.load(path, env=self.env, device="cpu"))

    def export(self, path: Path) -> Play:
        """Raise an error."""
        raise NotOffered("its export guide has no recurrent policies")

    def close(self) -> None:
        """Close the environments."""
        self.env.close()
