"""RSL-RL: the loop of ``OnPolicyRunner`` over PPO with ``RNNModel``, as in the example of its overview.

RSL-RL has no distribution of discrete actions; :class:`Categorical` is one, given by ``distribution_cfg`` as its
configuration allows.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rsl_rl.env import VecEnv
from rsl_rl.modules.distribution import Distribution
from rsl_rl.runners import OnPolicyRunner
from rsl_rl.utils import unpad_trajectories
from tensordict import TensorDict
from torch import nn

from recurl.conformance.adapter import Outputs, Play, Setup
from recurl.conformance.playing import play_steps
from recurl.conformance.script import ACTIONS, Script

GROUP = "policy"
"""Name of the observations."""


class RslRl:
    """RSL-RL."""

    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("rsl-rl-lib", "torch", "tensordict")}

    def make(self, setup: Setup) -> RslRlAgent:
        """Create an agent."""
        return RslRlAgent(setup, self.gamma, self.lmbda)


class RslRlAgent:
    """Actor and critic with an LSTM each.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        torch.manual_seed(setup.seed)
        self.setup, self.gamma, self.lmbda = setup, gamma, lmbda
        self.runner = self._runner(setup.script)
        self.alg = self.runner.alg
        self.env = self.runner.env
        self.obs = self.env.get_observations()
        self.alg.train_mode()

    def _runner(self, script: Script) -> OnPolicyRunner:
        model = {"class_name": "RNNModel", "hidden_dims": [16], "rnn_type": "lstm", "rnn_hidden_dim": 16}
        config = {
            "num_steps_per_env": self.setup.steps,
            "save_interval": 1,
            "obs_groups": {"actor": [GROUP], "critic": [GROUP]},
            "actor": {**model, "distribution_cfg": {"class_name": Categorical}},
            "critic": model,
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": self.setup.epochs,
                "num_mini_batches": self.setup.minibatches,
                "learning_rate": self.setup.learning_rate,
                "schedule": "fixed",
                "gamma": self.gamma,
                "lam": self.lmbda,
            },
        }
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its configuration
            return OnPolicyRunner(ScriptVecEnv(script), config)

    def collect(self) -> Outputs:
        """Step as ``OnPolicyRunner.learn`` does; returned advantages are those before their normalization."""
        storage: Any = self.alg.storage
        storage.clear()  # as `update` does, for rollouts without one
        with torch.inference_mode():
            for _ in range(self.setup.steps):
                actions = self.alg.act(self.obs)
                self.obs, rewards, dones, extras = self.env.step(actions)
                self.alg.process_env_step(self.obs, rewards, dones, extras)
            self.alg.compute_returns(self.obs)
        return Outputs(
            storage.observations[GROUP].clone(),
            storage.actions[..., 0].clone(),
            storage.actions_log_prob[..., 0].clone(),
            storage.values[..., 0].clone(),
            (storage.returns - storage.values)[..., 0],
        )

    def learn(self) -> list[Outputs]:
        """Update, watching what actor and critic return to it."""
        actor, critic = self.alg.actor, self.alg.critic
        found: list[Outputs] = []
        parts: list[Any] = []
        log_prob = actor.get_output_log_prob

        def watched(outputs: torch.Tensor) -> torch.Tensor:
            result = log_prob(outputs)
            parts.extend([outputs[..., 0].clone(), result.detach().clone()])
            return result

        def after_critic(_: nn.Module, args: Any, kwargs: Any, values: torch.Tensor) -> None:
            batch: Any = unpad_trajectories(args[0], kwargs["masks"])
            found.append(Outputs(batch[GROUP], parts[0], parts[1], values[..., 0].detach().clone()))
            parts.clear()

        actor.get_output_log_prob = watched
        handle = critic.register_forward_hook(after_critic, with_kwargs=True)
        try:
            self.alg.update()
        finally:
            handle.remove()
            del actor.get_output_log_prob
        return found

    def play(self, script: Script, steps: int) -> Outputs:
        """Load a saved runner into another one and step with its inference policy, as the replay script does.

        States of ended episodes are reset with ``policy.reset``, which the script leaves out; that of Isaac Lab has it.
        """
        runner = self._runner(script)
        with tempfile.TemporaryDirectory() as folder:
            self.runner.save(str(Path(folder, "model.pt")))
            runner.load(str(Path(folder, "model.pt")))
        policy, env = runner.get_inference_policy(), runner.env
        obs = env.get_observations()
        seen: list[Any] = []
        taken: list[Any] = []
        with torch.inference_mode():
            for _ in range(steps):
                actions = policy(obs)
                seen.append(obs[GROUP])
                taken.append(actions[:, 0])
                obs, _, dones, _ = env.step(actions)
                policy.reset(dones)
        return Outputs(torch.stack(seen), torch.stack(taken))

    def save(self, path: Path) -> None:
        """Save the runner."""
        self.runner.save(str(path))

    def load(self, path: Path) -> None:
        """Load a runner."""
        self.runner.load(str(path))

    def export(self, path: Path) -> Play:
        """Export with TorchScript; the file has one environment and is reset where an episode begins."""
        self.runner.export_policy_to_jit(str(path), "policy.pt")
        policy = torch.jit.load(str(path / "policy.pt"))

        def predict(observation: Any, state: Any, starts: Any) -> tuple[Any, Any]:
            if starts[0]:
                policy.reset()
            with torch.inference_mode():
                return policy(torch.from_numpy(observation)).numpy(), state

        def play(script: Script, steps: int) -> Outputs:
            return play_steps(script, steps, predict)

        return play

    def close(self) -> None:
        """Do nothing: the environments hold nothing."""


class ScriptVecEnv(VecEnv):
    """Environments of a script, which reset ended ones in the same step, as those of Isaac Lab do.

    Args:
        script: the script.
    """

    device = "cpu"
    num_actions = 1
    max_episode_length = 1_000_000
    cfg: Any = {}  # noqa: RUF012 - as declared by RSL-RL

    def __init__(self, script: Script) -> None:
        self.num_envs = script.num_envs
        self.envs = [script.make(row) for row in range(script.num_envs)]
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.observations = [env.reset()[0] for env in self.envs]

    def get_observations(self) -> TensorDict:
        """Return the observations."""
        return TensorDict({GROUP: torch.from_numpy(np.stack(self.observations))}, [self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Take a step; ``time_outs`` are the truncations."""
        results = [env.step(int(action)) for env, action in zip(self.envs, actions[:, 0], strict=True)]
        _, rewards, terminated, truncated, _ = zip(*results, strict=True)
        time_outs = torch.tensor(truncated)
        dones = torch.tensor(terminated) | time_outs
        self.observations = [
            env.reset()[0] if done else result[0] for env, done, result in zip(self.envs, dones, results, strict=True)
        ]
        return self.get_observations(), torch.tensor(rewards), dones.long(), {"time_outs": time_outs}


class Categorical(Distribution):
    """Discrete actions, whose logits are the output of the network.

    Args:
        output_dim: number of discrete actions of an environment, each with two choices.
    """

    distribution: torch.distributions.Categorical

    @property
    def input_dim(self) -> list[int]:
        """Shape of the logits."""
        return [self.output_dim, ACTIONS]

    def init_mlp_weights(self, mlp: nn.Module) -> None:
        """Initialize the network: greedy actions depend on the memory."""
        for layer in mlp.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 3)
                nn.init.zeros_(layer.bias)

    def update(self, mlp_output: torch.Tensor) -> None:
        """Take logits ``[..., output_dim, 2]``."""
        self.distribution = torch.distributions.Categorical(logits=mlp_output)

    def sample(self) -> torch.Tensor:
        """Draw actions ``[..., output_dim]``."""
        return self.distribution.sample().float()

    def deterministic_output(self, mlp_output: torch.Tensor) -> torch.Tensor:
        """Return the likeliest actions."""
        return mlp_output.argmax(-1).float()

    def as_deterministic_output_module(self) -> nn.Module:
        """Return a module for export."""
        return Likeliest()

    @property
    def mean(self) -> torch.Tensor:
        """Probabilities of action 1."""
        return self.distribution.probs[..., 1]

    @property
    def std(self) -> torch.Tensor:
        """Standard deviations of the actions."""
        return (self.mean * (1 - self.mean)).sqrt()

    @property
    def entropy(self) -> torch.Tensor:
        """Entropy, summed over the actions."""
        return self.distribution.entropy().sum(-1)

    @property
    def params(self) -> tuple[torch.Tensor, ...]:
        """Logits."""
        return (self.distribution.logits,)

    def log_prob(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, summed over the actions."""
        return self.distribution.log_prob(outputs).sum(-1)

    def kl_divergence(self, old_params: tuple[torch.Tensor, ...], new_params: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the divergence, summed over the actions."""
        old, new = (torch.distributions.Categorical(logits=params[0]) for params in (old_params, new_params))
        return torch.distributions.kl_divergence(old, new).sum(-1)


class Likeliest(nn.Module):
    """The likeliest actions of logits, for export."""

    def forward(self, mlp_output: torch.Tensor) -> torch.Tensor:
        """Return actions ``[..., output_dim]``."""
        return mlp_output.argmax(-1).float()
