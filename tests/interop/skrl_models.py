"""Recurrent models for skrl, with the pass over sequences that its documentation has."""

from __future__ import annotations

from typing import Any

import torch
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from torch import nn

ROWS, HIDDEN, STEPS = 4, 8, 8


class Policy(CategoricalMixin, Model):
    """Logits of actions, with an LSTM."""

    def __init__(self, *spaces: Any) -> None:
        Model.__init__(self, observation_space=spaces[0], action_space=spaces[1])
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.lstm = nn.LSTM(self.num_observations, HIDDEN, batch_first=True)
        self.net = nn.Linear(HIDDEN, self.num_actions)

    def get_specification(self) -> dict[str, Any]:
        return {"rnn": {"sequence_length": STEPS, "sizes": [(1, ROWS, HIDDEN), (1, ROWS, HIDDEN)]}}

    def compute(self, inputs: Any, role: str = "") -> tuple[Any, Any]:
        observations = inputs["observations"]
        terminated = inputs.get("terminated", None)
        hidden_states, cell_states = inputs["rnn"][0], inputs["rnn"][1]

        if self.training:
            rnn_input = observations.view(-1, STEPS, observations.shape[-1])
            hidden_states = hidden_states.view(1, -1, STEPS, hidden_states.shape[-1])[:, :, 0, :].contiguous()
            cell_states = cell_states.view(1, -1, STEPS, cell_states.shape[-1])[:, :, 0, :].contiguous()
            # reset the RNN state in the middle of a sequence
            if terminated is not None and torch.any(terminated):
                rnn_outputs = []
                terminated = terminated.view(-1, STEPS)
                indexes = [0, *(terminated[:, :-1].any(dim=0).nonzero(as_tuple=True)[0] + 1).tolist(), STEPS]

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
        else:
            rnn_input = observations.view(-1, 1, observations.shape[-1])
            rnn_output, rnn_states = self.lstm(rnn_input, (hidden_states, cell_states))

        rnn_output = torch.flatten(rnn_output, start_dim=0, end_dim=1)
        return self.net(rnn_output), {"rnn": [rnn_states[0], rnn_states[1]]}


class Value(DeterministicMixin, Model):
    """Values of states, with a GRU."""

    def __init__(self, *spaces: Any) -> None:
        Model.__init__(self, observation_space=spaces[0], action_space=spaces[1])
        DeterministicMixin.__init__(self)
        self.gru = nn.GRU(self.num_observations, HIDDEN, batch_first=True)
        self.net = nn.Linear(HIDDEN, 1)

    def get_specification(self) -> dict[str, Any]:
        return {"rnn": {"sequence_length": STEPS, "sizes": [(1, ROWS, HIDDEN)]}}

    def compute(self, inputs: Any, role: str = "") -> tuple[Any, Any]:
        observations = inputs["observations"]
        terminated = inputs.get("terminated", None)
        hidden_states = inputs["rnn"][0]

        if self.training:
            rnn_input = observations.view(-1, STEPS, observations.shape[-1])
            hidden_states = hidden_states.view(1, -1, STEPS, hidden_states.shape[-1])[:, :, 0, :].contiguous()
            if terminated is not None and torch.any(terminated):
                rnn_outputs = []
                terminated = terminated.view(-1, STEPS)
                indexes = [0, *(terminated[:, :-1].any(dim=0).nonzero(as_tuple=True)[0] + 1).tolist(), STEPS]

                for i in range(len(indexes) - 1):
                    i0, i1 = indexes[i], indexes[i + 1]
                    rnn_output, hidden_states = self.gru(rnn_input[:, i0:i1, :], hidden_states)
                    hidden_states[:, (terminated[:, i1 - 1]), :] = 0
                    rnn_outputs.append(rnn_output)

                rnn_output = torch.cat(rnn_outputs, dim=1)
            else:
                rnn_output, hidden_states = self.gru(rnn_input, hidden_states)
        else:
            rnn_input = observations.view(-1, 1, observations.shape[-1])
            rnn_output, hidden_states = self.gru(rnn_input, hidden_states)

        rnn_output = torch.flatten(rnn_output, start_dim=0, end_dim=1)
        return self.net(rnn_output), {"rnn": [hidden_states]}
