"""Environments of several agents by name: those of VMAS, and those with the parallel API of PettingZoo."""

from __future__ import annotations

from functools import partial
from typing import Any

from recurl.core.errors import ArgumentError
from recurl.envs.multi_agent import MultiAgentEnv

__all__ = ["named_multi_agent_env"]


def named_multi_agent_env(name: str, num_rows: int, *, device: Any = None, **arguments: Any) -> MultiAgentEnv:
    """Return environments of several agents by name, as few as have ``num_rows`` agents: every agent is a row.

    Args:
        name: ``vmas/SCENARIO``, such as ``vmas/balance``; ``pettingzoo/ID``, such as
            ``pettingzoo/sisl/multiwalker_v9``; or ``pettingzoo/module:function``, such as
            ``pettingzoo/mpe2.simple_spread_v3:parallel_env``.
        num_rows: number of rows; rounded up to whole environments.
        device: device of all tensors.
        **arguments: arguments of :class:`~recurl.envs.VmasEnv` or :class:`~recurl.envs.PettingZooEnv`.

    Raises:
        ArgumentError: there is no such environment.
        MissingDependencyError: a package is not installed.

    Example:
        >>> named_multi_agent_env("vmas/balance", 7).batch_size  # three environments of three agents
        torch.Size([9])
    """
    package, _, given = name.partition("/")
    if package == "vmas" and given:
        from recurl.envs.libs.vmas import VmasEnv  # noqa: PLC0415 - the other package may be missing

        create = partial(VmasEnv, given, device=device, **arguments)
    elif package == "pettingzoo" and given:
        from recurl.envs.libs.pettingzoo import PettingZooEnv  # noqa: PLC0415 - as above

        create = partial(PettingZooEnv, given, device=device, **arguments)
    else:
        raise ArgumentError(
            "An environment of several agents is named vmas/SCENARIO, pettingzoo/ID or pettingzoo/module:function, "
            f"got {name!r}."
        )
    first: MultiAgentEnv = create(num_envs=1)
    if num_rows <= first.n_agents:
        return first
    first.close()
    return create(num_envs=-(-num_rows // first.n_agents))
