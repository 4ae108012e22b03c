"""A module on a group of agents with nested keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.keys import AGENT_ID, COLLECTOR, IS_INIT, NestedKey, normalize_key
from recurl.modules.recurrent import RecurrentModule
from recurl.modules.utils import recurrent_modules
from recurl.sequences.agents import agents_as_rows, in_group, rows_as_agents
from recurl.sequences.start_states import refuse

__all__ = ["AgentsAsRows"]


class AgentsAsRows(TensorDictModuleBase):
    """Run a module on a group of agents with nested keys, as TorchRL's environments have them, each agent as a row.

    ``module`` reads and writes ``"observation"`` and other keys of single agents; this module those of the group:
    ``("agents", "observation")``, ``[*B, A, F]``, and ``("next", "agents", "recurrent_state_h")``. All agents share the
    weights, and each has its own recurrent states, at every step or, in recurrent mode, in sequences ``[*B, T, A, F]``.
    Separate weights are those of a :class:`~recurl.modules.SeparateAgents` as ``module``; its ``"agent_id"`` is added
    if the group lacks it.

    After :func:`~recurl.modules.interop.for_torchrl`, TorchRL's environments and collectors accept the policy.
    Environments of recurl have agents as rows by themselves, and need only ``module``.

    Args:
        module: TensorDict module.
        n_agents: number of agents, A.
        group: name of the group.
        shared: keys that ``module`` reads from the environment, not from the group, such as ``"is_init"`` (without it,
            ``("agents", "is_init")``) or a ``"state"`` for a central critic; all agents see their entries. A ``module``
            may read nothing else.

    Raises:
        ArgumentTypeError: ``module`` isn't a TensorDict module, or contains recurrent modules of another library.
        ArgumentError: when called, the entries of the group have another number of agents.
        MissingKeyError: when called, there is no such group.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.modules import GRUModule
        >>> policy = AgentsAsRows(GRUModule(4, 8, in_key="observation", out_key="features"), n_agents=3)
        >>> batch = TensorDict({"is_init": torch.ones(2, 1, dtype=torch.bool)}, [2])
        >>> batch["agents"] = TensorDict({"observation": torch.zeros(2, 3, 4)}, [2, 3])
        >>> policy(batch)["agents", "features"].shape, batch["next", "agents", "recurrent_state"].shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 1, 8]))
    """

    def __init__(
        self,
        module: TensorDictModuleBase,
        n_agents: int,
        group: str = "agents",
        shared: Sequence[NestedKey] = (IS_INIT,),
    ) -> None:
        super().__init__()
        if not isinstance(module, TensorDictModuleBase):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
            raise ArgumentTypeError(
                f"AgentsAsRows takes a TensorDict module, got {type(module).__name__}: wrap it, "
                "TensorDictModule(net, in_keys=['observation'], out_keys=['logits'])."
            )
        for one in module.modules():
            if hasattr(type(one), "recurrent_mode") and not isinstance(one, RecurrentModule):
                raise ArgumentTypeError(
                    f"AgentsAsRows runs recurrent modules of recurl, got {type(one).__module__}.{type(one).__name__}: "
                    "use recurl.modules.LSTMModule or GRUModule, or replace TorchRL's by recurl.accelerate(module)."
                )
        self.module, self.n_agents, self.group = module, n_agents, group
        self.shared = [normalize_key(key) for key in shared]
        reads, writes = ([normalize_key(key) for key in keys] for keys in (module.in_keys, module.out_keys))
        states = {normalize_key(key) for recurrent in recurrent_modules(module) for key in recurrent.state_keys}
        needed = set(reads) - set(self.shared) - states - {AGENT_ID}  # the others may be absent
        self._absent = None if needed else n_agents
        self._adds_ids = AGENT_ID in reads and AGENT_ID not in self.shared
        self.in_keys: Any = [key if key in self.shared else in_group(key, group) for key in reads if key != AGENT_ID]
        self.out_keys: Any = [in_group(key, group) for key in writes]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run the module, and return ``tensordict`` with its outputs."""
        refuse(tensordict, "AgentsAsRows")
        batch, agents = tensordict.batch_size, self.n_agents
        time = any(recurrent.recurrent_mode for recurrent in recurrent_modules(self.module))
        ids = in_group(AGENT_ID, self.group)
        read = tensordict.select(*self.in_keys, ids, COLLECTOR, strict=False)
        rows = agents_as_rows(read, self.group, time=time, n_agents=self._absent)
        envs = batch[: len(batch) - time].numel()
        if rows.shape[0] != envs * agents:
            raise ArgumentError(
                f"AgentsAsRows was created with n_agents={agents}, but the group {self.group!r} has "
                f"{rows.shape[0] // max(1, envs)} agents."
            )
        if self._adds_ids and AGENT_ID not in rows:
            device = next(iter(rows.values(include_nested=True, leaves_only=True))).device
            one_hot = torch.eye(agents, device=device).repeat(envs, 1)
            rows.set(AGENT_ID, one_hot.unsqueeze(1).expand(*rows.shape, agents) if time else one_hot)
        written = self.module(rows).select(*self.module.out_keys, strict=False)
        found = rows_as_agents(written, agents, self.group, time=time)
        return tensordict.update(found.reshape(batch))
