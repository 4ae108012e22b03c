"""A module of its own for each agent of an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.keys import AGENT_ID, IS_INIT, NestedKey, normalize_key
from recurl.sequences.index import SequenceIndex
from recurl.sequences.mode import recurrent_mode
from recurl.sequences.start_states import refuse

__all__ = ["SeparateAgents"]


class SeparateAgents(TensorDictModuleBase):
    """Run a module of its own for each agent: separate policies or critics in one batch, as of independent learners.

    Each row of a :class:`~recurl.envs.MultiAgentEnv` belongs to an agent, named by the one-hot ``"agent_id"``
    (``agent_ids=True``). Module ``a`` runs the rows of agent ``a``, step by step or, in recurrent mode, their
    sequences. Collectors, advantages, losses and minibatches see one module. The modules read and write the same keys.
    The same module for several agents shares its weights. Recurrent states have the same keys for all agents, since a
    row has only one agent.

    Modules run one after the other, on the tokens of their agents, whose number is read from the device. States must be
    stored at every step (no ``sequence_length`` of a collector).

    Args:
        modules: the modules, one for each agent, in order.
        agent_key: key of the one-hot index of the agent, ``[*B, n_agents]``.

    Attributes:
        alternatives: the modules, of which each token runs one.

    Raises:
        ArgumentTypeError: a module isn't a TensorDict module.
        ArgumentError: there is none, or they differ in their keys; or, at a call, the index is of another number of
            agents.
        MissingKeyError: at a call, there is no index.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> nets = [TensorDictModule(nn.Linear(2, 1), ["observation"], ["state_value"]) for _ in range(3)]
        >>> critic = SeparateAgents(nets)
        >>> batch = TensorDict({"observation": torch.ones(3, 2), "agent_id": torch.eye(3)}, [3])
        >>> torch.equal(critic(batch)["state_value"][1], nets[1].module(torch.ones(2)))
        True
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], agent_key: NestedKey = AGENT_ID) -> None:
        super().__init__()
        if not modules:
            raise ArgumentError("SeparateAgents needs a module for each agent, got none.")
        for module in modules:
            if not isinstance(module, TensorDictModuleBase):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
                raise ArgumentTypeError(
                    f"SeparateAgents takes TensorDict modules, got {type(module).__name__}: wrap it, "
                    "TensorDictModule(net, in_keys=['observation'], out_keys=['action'])."
                )
        reads, writes = (
            [[normalize_key(key) for key in m.in_keys] for m in modules],
            [[*map(normalize_key, m.out_keys)] for m in modules],
        )
        for name, keys in (("in_keys", reads), ("out_keys", writes)):
            if any(set(other) != set(keys[0]) for other in keys):
                raise ArgumentError(f"The modules of all agents must have the same {name}, got {keys}.")
        self.agent_key = normalize_key(agent_key)
        self.in_keys: Any = [*dict.fromkeys([*reads[0], self.agent_key])]
        self.out_keys: Any = writes[0]
        self.alternatives = nn.ModuleList(modules)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run the modules, and return ``tensordict`` with their outputs."""
        agent, shape = self._agents(tensordict), tensordict.batch_size
        refuse(tensordict, "SeparateAgents")
        flat = tensordict.select(*self.in_keys, strict=False).reshape(-1)
        if recurrent_mode() and IS_INIT in flat:
            flat.set(IS_INIT, SequenceIndex.of(tensordict).starts.unsqueeze(-1))
        tokens: list[Tensor] = []
        found: list[TensorDictBase] = []
        for index, module in enumerate(self.alternatives):
            where = (agent == index).nonzero().squeeze(-1)
            if where.numel():
                tokens.append(where)
                found.append(module(flat[where]).select(*self.out_keys, strict=False))
        order = torch.cat(tokens).argsort()
        for key in self.out_keys:
            parts = [part.get(key, None) for part in found]
            if all(part is not None for part in parts):
                value = torch.cat(parts)[order]
                tensordict.set(key, value.reshape(*shape, *value.shape[1:]))
        return tensordict

    def _agents(self, tensordict: TensorDictBase) -> Tensor:
        """Return the index of the agent of each token, int64 ``[N]``."""
        ids = tensordict.get(self.agent_key, None)
        if ids is None:
            raise MissingKeyError(
                f"SeparateAgents reads the agent of each row from {self.agent_key!r}, which is missing: create the "
                "environment with agent_ids=True."
            )
        count = len(self.alternatives)
        if ids.shape != torch.Size([*tensordict.batch_size, count]):
            raise ArgumentError(
                f"{self.agent_key!r} must be one-hot for {count} agents, {[*tensordict.batch_size, count]}, got "
                f"{list(ids.shape)}: give SeparateAgents a module for each agent."
            )
        return ids.reshape(-1, count).argmax(-1)
