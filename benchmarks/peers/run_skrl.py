"""skrl's PPO_RNN with the LSTM of its documentation, and the body of its trainer, split into collection and update."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from harness import parser, run
from skrl.agents.torch.ppo import PPO_RNN
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from tensor_cartpole import TensorCartPole
from torch import Tensor, nn

SEQUENCE = 32


class Shared(CategoricalMixin, DeterministicMixin, Model):
    """Encoder, LSTM, and two heads, in one model for policy and value."""

    def __init__(self, observations: Any, actions: Any, options: argparse.Namespace) -> None:
        Model.__init__(self, observation_space=observations, action_space=actions, device=options.device)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True, role="policy")
        DeterministicMixin.__init__(self, role="value")
        size, self.rows = options.hidden_size, options.num_envs
        self.sequence_length = min(SEQUENCE, options.rollout_steps)
        self.encoder = nn.Sequential(nn.Linear(self.num_observations, size), nn.Tanh())
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.heads = nn.ModuleDict({"policy": nn.Linear(size, self.num_actions), "value": nn.Linear(size, 1)})

    def get_specification(self) -> dict[str, Any]:
        size = (1, self.rows, self.lstm.hidden_size)
        return {"rnn": {"sequence_length": self.sequence_length, "sizes": [size, size]}}

    def act(self, inputs: dict[str, Any], *, role: str = "") -> Any:
        return (CategoricalMixin if role == "policy" else DeterministicMixin).act(self, inputs, role=role)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        observations = self.encoder(inputs["observations"])
        terminated = inputs.get("terminated")
        hidden_states, cell_states = inputs["rnn"][0], inputs["rnn"][1]

        # training
        if self.training:
            rnn_input = observations.view(-1, self.sequence_length, observations.shape[-1])
            hidden_states = hidden_states.view(1, -1, self.sequence_length, hidden_states.shape[-1])
            cell_states = cell_states.view(1, -1, self.sequence_length, cell_states.shape[-1])
            hidden_states = hidden_states[:, :, 0, :].contiguous()
            cell_states = cell_states[:, :, 0, :].contiguous()

            # reset the RNN state in the middle of a sequence
            if terminated is not None and torch.any(terminated):
                rnn_outputs = []
                terminated = terminated.view(-1, self.sequence_length)
                indexes = [0]
                indexes += (terminated[:, :-1].any(dim=0).nonzero(as_tuple=True)[0] + 1).tolist()
                indexes += [self.sequence_length]

                for i in range(len(indexes) - 1):
                    i0, i1 = indexes[i], indexes[i + 1]
                    rnn_output, (hidden_states, cell_states) = self.lstm(
                        rnn_input[:, i0:i1, :], (hidden_states, cell_states)
                    )
                    hidden_states[:, (terminated[:, i1 - 1]), :] = 0
                    cell_states[:, (terminated[:, i1 - 1]), :] = 0
                    rnn_outputs.append(rnn_output)

                rnn_states = (hidden_states, cell_states)
                rnn_output = torch.cat(rnn_outputs, dim=1)
            # no need to reset the RNN state in the sequence
            else:
                rnn_output, rnn_states = self.lstm(rnn_input, (hidden_states, cell_states))
        # rollout
        else:
            rnn_input = observations.view(-1, 1, observations.shape[-1])
            rnn_output, rnn_states = self.lstm(rnn_input, (hidden_states, cell_states))

        rnn_output = torch.flatten(rnn_output, start_dim=0, end_dim=1)
        return self.heads[role](rnn_output), {"rnn": [rnn_states[0], rnn_states[1]]}


class Skrl:
    """PPO_RNN on tensors, with sequences of 32 steps as in skrl's documentation."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.tensors, self.rows, self.steps = TensorCartPole(options), options.num_envs, options.rollout_steps
        spaces = {
            "observation_space": gymnasium.spaces.Box(-np.inf, np.inf, (2,)),
            "action_space": gymnasium.spaces.Discrete(2),
        }
        model = Shared(*spaces.values(), options).to(options.device)
        if options.accelerate:
            importlib.import_module("recurl").accelerate(model)
        self.folder = tempfile.TemporaryDirectory()
        config = {
            "rollouts": self.steps,
            "learning_epochs": options.epochs,
            "mini_batches": options.minibatches,
            "learning_rate": options.learning_rate,
            "discount_factor": 0.99,
            "gae_lambda": 0.95,
            "ratio_clip": 0.2,
            "value_clip": 0.2,
            "value_loss_scale": 0.5,
            "grad_norm_clip": 0.5,
            "experiment": {"directory": self.folder.name, "write_interval": 0, "checkpoint_interval": 0},
        }
        memory = RandomMemory(memory_size=self.steps, num_envs=self.rows, device=options.device)
        self.agent = PPO_RNN(
            models={"policy": model, "value": model}, memory=memory, cfg=config, device=options.device, **spaces
        )
        self.agent.init()
        self.agent.enable_training_mode(True)
        self.observations, self.time = self.tensors.observe(), {"timestep": 0, "timesteps": 10**9}
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.versions = {"torch": torch.__version__, "skrl": version("skrl")}
        self.finished = self.tensors.finished

    def collect(self) -> int:
        with torch.no_grad():
            for _ in range(self.steps):
                actions, _ = self.agent.act(self.observations, None, **self.time)
                rewards, terminated, truncated = self.tensors.step(actions[:, 0] == 1)
                seen = self.tensors.observe()
                self.agent.record_transition(
                    observations=self.observations,
                    states=None,
                    actions=actions,
                    rewards=rewards[:, None],
                    next_observations=seen,
                    next_states=None,
                    terminated=terminated[:, None],
                    truncated=truncated[:, None],
                    infos={},
                    **self.time,
                )
                self.observations = seen
        return self.steps * self.rows

    def learn(self) -> None:
        self.agent.enable_models_training_mode(True)
        self.agent.update(**self.time)
        self.agent.enable_models_training_mode(False)


if __name__ == "__main__":
    run(parser().parse_args(), Skrl)
