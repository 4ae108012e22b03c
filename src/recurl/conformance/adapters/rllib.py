"""Ray RLlib: ``PPO`` with ``DefaultModelConfig(use_lstm=True)`` on the new API stack, with a local env runner."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import ray
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.tune import register_env

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.script import Script

ENVIRONMENT, AGENTS = "recurl_conformance", "recurl_conformance_agents"
"""Names under which environments are registered, with one agent and with several."""
CREATED = itertools.count()
"""Number of environments of several agents created until now."""
SHARED = "shared"
"""Name of the policy of all agents."""
SIZE = 16
"""Units of the LSTM, and of the encoder before it."""


class RLlib:
    """Ray RLlib, with PPO's default options."""

    gamma, lmbda, no_agents = 0.99, 0.95, ""
    documented: Mapping[str, str] = {}

    def __init__(self) -> None:
        torch.set_num_threads(1)
        if not ray.is_initialized():
            ray.init("local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR)
        register_env(ENVIRONMENT, environment)
        register_env(AGENTS, agents)
        self.versions = {"ray": ray.__version__, "torch": torch.__version__, "gymnasium": gym.__version__}

    def make(self, setup: Setup) -> RLlibAgent:
        """Create an agent."""
        return RLlibAgent(setup, self.gamma, self.lmbda)


class RLlibAgent:
    """An encoder and an LSTM that actor and critic share.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        self.setup, self.gamma, self.lmbda = setup, gamma, lmbda
        self.algo: Any = self._config(setup.script).build_algo()
        name = SHARED if setup.script.agents > 1 else DEFAULT_MODULE_ID
        # The learner is in this process: its module is the one that the update uses.
        modules = self.algo.learner_group.foreach_learner(lambda learner: learner.module[name])
        self.module: Any = next(iter(modules)).get()
        self.learned: list[Outputs] = []

    def _config(self, script: Script) -> PPOConfig:
        setup = self.setup
        several = script.agents > 1
        batch = setup.script.num_envs * setup.steps
        config = PPOConfig()
        if several:  # with one policy for all agents
            config.multi_agent(policies={SHARED}, policy_mapping_fn=lambda *_, **__: SHARED)
        return (
            config.environment(
                AGENTS if several else ENVIRONMENT,
                env_config={"script": script},
                disable_env_checking=True,  # which takes a step
            )
            .env_runners(
                num_env_runners=0,
                num_envs_per_env_runner=script.num_envs,
                rollout_fragment_length=setup.steps,
                gym_env_vectorize_mode="sync" if several else "vector_entry_point",
            )
            .learners(num_learners=0)
            .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[SIZE], use_lstm=True, lstm_cell_size=SIZE))
            .training(
                train_batch_size_per_learner=batch,
                # The number of agents' steps isn't known in advance: None takes them all.
                minibatch_size=None if several else batch // setup.minibatches,
                num_epochs=setup.epochs,
                lr=setup.learning_rate,
                gamma=self.gamma,
                lambda_=self.lmbda,
            )
            .debugging(seed=setup.seed, log_level="ERROR")
        )

    def collect(self) -> Outputs:
        """Call ``training_step``, which samples and updates.

        Values are those that the update computes for the advantages: RLlib computes none when it samples.
        """
        if self.learned and self.setup.learning_rate:
            raise RuntimeError("The last update changed the parameters: call learn first.")
        passes: list[tuple[Any, Any]] = []
        values: list[tuple[Any, Any]] = []
        with (
            _watched(self.module, "forward_train", lambda batch, found: passes.append((dict(batch), found))),
            _watched(self.module, "compute_values", lambda batch, found: values.append((batch, found))),
        ):
            try:
                self.algo.training_step()
            except KeyError as error:
                if error.args != (Columns.OBS,):
                    raise
                raise NotOffered("its update rounds a minibatch to 0 sequences and raises KeyError: 'obs'") from error
        self.learned = [
            self._outputs(batch, found[Columns.ACTION_DIST_INPUTS], value)
            for (batch, found), (_, value) in zip(passes, values[1:], strict=True)
        ]
        batch, value = values[0]
        targets = batch[Postprocessing.VALUE_TARGETS]
        return Outputs(
            numpy(batch[Columns.OBS]),
            numpy(batch[Columns.ACTIONS]),
            log_probs=numpy(batch[Columns.ACTION_LOGP]),
            values=numpy(value),
            advantages=numpy(targets - value),  # those of the batch are standardized
            counted=numpy(batch[Columns.LOSS_MASK]),
        )

    def _outputs(self, batch: Any, logits: Any, values: Any) -> Outputs:
        actions = batch[Columns.ACTIONS]
        log_probs = self.module.get_train_action_dist_cls().from_logits(logits).logp(actions)
        entries = (batch[Columns.OBS], actions, log_probs, values)
        return Outputs(*(numpy(entry) for entry in entries), counted=numpy(batch[Columns.LOSS_MASK]))

    def learn(self) -> list[Outputs]:
        """Return what the last update computed."""
        learned, self.learned = self.learned, []
        return learned

    def play(self, script: Script, steps: int) -> Outputs:
        """Sample with another env runner, without exploration."""
        runner = SingleAgentEnvRunner(config=self._config(script))
        runner.set_state({COMPONENT_RL_MODULE: self.algo.env_runner.module.get_state()})
        episodes = runner.sample(num_timesteps=steps * script.num_envs, explore=False)
        runner.stop()
        observations = [episode.get_observations()[:-1] for episode in episodes]
        return Outputs(np.concatenate(observations), np.concatenate([episode.get_actions() for episode in episodes]))

    def save(self, path: Path) -> None:
        """Call ``save_to_path``."""
        self.algo.save_to_path(path)

    def load(self, path: Path) -> None:
        """Call ``restore_from_path``."""
        self.algo.restore_from_path(path)

    def export(self, path: Path) -> Play:
        """Raise: the new API stack has no export."""
        raise NotOffered("the new API stack has no export to files that run without RLlib")

    def close(self) -> None:
        """Stop the algorithm."""
        folder = self.algo.logdir
        self.algo.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _watched(module: Any, method: str, show: Callable[[Any, Any], None]) -> Generator[None]:
    """Show the batches and outputs of a module's method to a function."""
    original = getattr(module, method)

    def watched(batch: Any, *arguments: Any, **options: Any) -> Any:
        found = original(batch, *arguments, **options)
        show(batch, found)
        return found

    with mock.patch.object(module, method, watched):
        yield


def environment(context: Any) -> SyncVectorEnv:
    """Create the environments of ``context["script"]``, with Gymnasium's default autoreset mode, as RLlib does."""
    script = context["script"]
    makers = [partial(script.make, row) for row in range(script.num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


def agents(context: Any) -> ParallelPettingZooEnv:
    """Create the next one of the environments of ``context["script"]``, whose index RLlib doesn't tell."""
    script: Script = context["script"]
    return ParallelPettingZooEnv(script.make_agents(next(CREATED) % script.num_envs))


def numpy(tensor: Any) -> Any:
    """Return a copy of a tensor as an array."""
    return torch.as_tensor(tensor).detach().numpy().copy()
