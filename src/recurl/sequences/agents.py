"""Batches with a group of agents under a nested key, as rows of agents, and back."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import COLLECTOR, MASK, NEXT, TRAJ_IDS, NestedKey, normalize_key, path_of
from recurl.sequences.entries import leaves

__all__ = ["agents_as_rows", "in_group", "rows_as_agents"]

_MASK = "mask"  # name of TorchRL's entry in a group of agents


def agents_as_rows(
    tensordict: TensorDictBase, group: str = "agents", *, time: bool | None = None, n_agents: int | None = None
) -> TensorDict:
    """Convert a TensorDict of environments with a group of agents, as TorchRL's, to one with a row for each agent.

    Entries ``(group, "observation")``, ``[*B, T, A, ...]``, become ``"observation"``, ``[prod(B) * A, T, ...]``; those
    of the environments, such as ``"done"`` and ``"is_init"``, are repeated for all agents that lack their own. Modules,
    advantages, losses and minibatches of recurl then work as for single agents. Trajectory ids are made different for
    each agent. ``(group, "mask")``, False for agents that take no part, becomes ``("collector", "mask")``.

    Args:
        tensordict: ``[*B, T]``, or ``[*B]`` for a single step.
        group: name of the group.
        time: whether the last dimension is time; by default, if it is named so.
        n_agents: number of agents, A, of a group without entries, whose rows have those of the environment alone.

    Returns:
        ``[prod(B) * A, T]`` or ``[prod(B) * A]``; the row of agent ``a`` of environment ``e`` is ``e * A + a``.

    Raises:
        MissingKeyError: there is no such group, and ``n_agents`` isn't given.
        ArgumentError: its entries don't have a dimension of agents after the batch size, or differ in it; or it isn't
            known whether the last dimension is time.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.data import rows_as_agents
        >>> batch = TensorDict({"is_init": torch.zeros(2, 5, 1, dtype=torch.bool)}, [2, 5])
        >>> batch["agents"] = TensorDict({"observation": torch.zeros(2, 5, 3, 4)}, [2, 5, 3])
        >>> rows = agents_as_rows(batch, time=True)
        >>> rows["observation"].shape, rows["is_init"].shape
        (torch.Size([6, 5, 4]), torch.Size([6, 5, 1]))
        >>> rows_as_agents(rows, 3)["agents", "observation"].shape
        torch.Size([2, 5, 3, 4])
    """
    batch, names = tensordict.batch_size, tensordict.names
    if time is None and batch and "time" not in names:
        raise ArgumentError(
            f"Is the last dimension of {list(batch)} time? Say time=True for a batch of sequences, or time=False for "
            "steps of several environments."
        )
    time = bool(batch) and names[-1] == "time" if time is None else time
    own, shared = dict[tuple[str, ...], Tensor](), dict[tuple[str, ...], Tensor]()
    for path, value in leaves(cast(Any, tensordict)):
        inside = path[1:] if path[0] == NEXT else path
        prefix = path[: len(path) - len(inside)]
        if inside[0] == group and len(inside) > 1:
            own[(*prefix, *inside[1:])] = value
        else:
            shared[path] = value
    agents = _number_of_agents(own, batch, group) if own or n_agents is None else n_agents
    rows = TensorDict({}, [batch[: len(batch) - time].numel() * agents, *batch[len(batch) - time :]])
    for path, value in shared.items():
        if path not in own:
            many = value.unsqueeze(len(batch)).expand(*batch, agents, *value.shape[len(batch) :])
            if path == TRAJ_IDS:
                many = many * agents + torch.arange(agents, device=value.device).view(
                    -1, *(1,) * (value.ndim - len(batch))
                )
            _set(rows, path, _to_rows(many, len(batch), time))
    for path, value in own.items():
        key = MASK if path == (_MASK,) else path
        _set(rows, key, _to_rows(value, len(batch), time))
    mask = rows.get(MASK, None)
    if mask is not None and mask.ndim > rows.ndim:
        rows.set(MASK, mask.squeeze(-1))
    if time:
        rows.refine_names(..., "time")
    return rows


def rows_as_agents(
    tensordict: TensorDictBase, n_agents: int, group: str = "agents", *, time: bool | None = None
) -> TensorDict:
    """Convert rows of agents to a TensorDict of environments with a group of agents: undo :func:`agents_as_rows`.

    All entries are those of agents: ``"done"`` becomes ``(group, "done")``. Only metadata under ``"collector"`` is left
    out.

    Args:
        tensordict: ``[n * A, T]`` or ``[n * A]``.
        n_agents: number of agents, A.
        group: name of the group.
        time: see :func:`agents_as_rows`; by default, if there are two dimensions.

    Returns:
        ``[n, T]`` or ``[n]``.

    Raises:
        ArgumentError: the rows are not those of whole environments.
    """
    batch = tensordict.batch_size
    time = len(batch) == 2 if time is None else time
    if len(batch) != 1 + time or batch[0] % n_agents:
        raise ArgumentError(
            f"Rows of {n_agents} agents must have batch size [n * {n_agents}{', T' if time else ''}], got "
            f"{list(batch)}."
        )
    out = TensorDict({}, [batch[0] // n_agents, *batch[1:]])
    for path, value in leaves(cast(Any, tensordict)):
        if path[0] != COLLECTOR:
            entry = value.unflatten(0, (-1, n_agents))
            key = in_group(path, group)
            inside = key[: 2 if key[0] == NEXT else 1]
            if inside not in out.keys(include_nested=True):
                out.set(inside, TensorDict({}, [*out.batch_size, n_agents]))
            out.set(key, entry.movedim(1, 1 + time))
    if time:
        out.refine_names(..., "time")
    return out


def in_group(key: NestedKey, group: str) -> tuple[str, ...]:
    """Return ``key`` inside a group, ``("next", group, ...)`` if it is under ``"next"``.

    Example:
        >>> in_group("observation", "agents"), in_group(("next", "reward"), "agents")
        (('agents', 'observation'), ('next', 'agents', 'reward'))
    """
    path = path_of(key)
    return (NEXT, group, *path[1:]) if path[0] == NEXT else (group, *path)


def _number_of_agents(own: dict[tuple[str, ...], Tensor], batch: torch.Size, group: str) -> int:
    if not own:
        raise MissingKeyError(
            f"There is no group of agents {group!r} with entries: name another one with group=. In recurl's own "
            "environments agents are rows already."
        )
    lead = len(batch)
    counts = {value.shape[lead] if value.ndim > lead else None for value in own.values()}
    count = counts.pop()
    if counts or count is None:
        shapes = {".".join(path): list(value.shape) for path, value in own.items()}
        raise ArgumentError(
            f"The entries of {group!r} must have a dimension of agents after the batch size {list(batch)}, the same "
            f"for all, got {shapes}."
        )
    return count


def _to_rows(value: Tensor, lead: int, time: bool) -> Tensor:
    """Return ``[*B, T, A, ...]`` as ``[prod(B) * A, T, ...]``, or ``[*B, A, ...]`` as ``[prod(B) * A, ...]``."""
    if time:
        value = value.movedim(lead, lead - 1)
    kept = value.shape[lead - time + 1 :]
    return value.reshape(-1, *kept)


def _set(tensordict: TensorDict, path: tuple[str, ...], value: Tensor) -> None:
    tensordict.set(normalize_key(path), value)
