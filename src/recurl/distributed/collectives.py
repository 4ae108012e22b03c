"""Collectives of the default process group; without one, what a single process needs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from recurl._torch import foreach_copy_
from recurl.distributed.watch import Watch
from recurl.errors import ArgumentError, RankError

__all__ = [
    "all_sum_",
    "average_",
    "average_gradients",
    "broadcast",
    "broadcast_parameters",
    "gather",
    "gather_on_first",
    "on_any_rank",
    "rank",
    "world_size",
]

_T = TypeVar("_T")


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """Return the number of this process in the process group, 0 without one.

    Example:
        >>> rank(), world_size()
        (0, 1)
    """
    return distributed.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of processes in the process group, 1 without one."""
    return distributed.get_world_size() if _has_group() else 1


@contextmanager
def _saying_who() -> Generator[None]:
    """Turn the failure of a collective into an error that says which rank has gone.

    Raises:
        RankError: instead of torch's errors.
    """
    try:
        yield
    except RuntimeError as error:
        Watch.await_verdict()
        raise RankError(
            f"Another rank has gone, or its tensors differ: {str(error).partition(chr(10))[0]}. Look at the first "
            "error among the ranks."
        ) from error


def all_sum_(tensor: Tensor) -> Tensor:
    """Sum a contiguous tensor over all ranks, in place, and return it.

    Raises:
        RankError: a rank has gone.
    """
    if world_size() > 1:
        with _saying_who():
            distributed.all_reduce(tensor)
    return tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor ``[...]`` of all ranks, ``[ranks, ...]``.

    Raises:
        RankError: a rank has gone.
    """
    found = tensor.new_empty(world_size(), *tensor.shape)
    # From torch 2.13 on the first is its name, and it warns of the second.
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    with _saying_who():
        getattr(distributed, name)(found.view(-1), tensor.view(-1))
    return found


def _average_(tensor: Tensor) -> Tensor:
    """Replace a contiguous tensor by its mean over all ranks, and return it."""
    if tensor.is_cuda and "nccl" in distributed.get_backend_config():  # others can't divide
        with _saying_who():
            distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        return tensor
    return all_sum_(tensor).div_(world_size())


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their means over all ranks: one flat all-reduce for those of one dtype and device.

    Args:
        tensors: the same number, shapes and dtypes on every rank, real or complex; parameters too.

    Raises:
        ArgumentError: one holds integers or bools, which have no means of their dtype.
        RankError: a rank has gone.

    Example:
        >>> x = torch.ones(2)
        >>> average_([x])  # without a process group: as it was
        >>> x
        tensor([1., 1.])
    """
    if world_size() == 1:
        return
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    for dtype, _ in kinds:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise ArgumentError(f"Means need real or complex numbers, got a tensor of {dtype}: convert it first.")
    for kind in kinds:
        same = [tensor.detach() for tensor in tensors if (tensor.dtype, tensor.device) == kind]
        if len(same) == 1 and same[0].is_contiguous():
            _average_(same[0])
            continue
        flat = _average_(torch.cat([tensor.reshape(-1) for tensor in same]))
        parts = flat.split([tensor.numel() for tensor in same])
        foreach_copy_(same, [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)])


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their means over all ranks, in one flat all-reduce; call it between backward and step.

    Where every rank's loss is a mean over equally many tokens, these are the gradients of the mean over all tokens.

    Args:
        parameters: those that are trained; the ones that have a gradient are the same on every rank.

    Raises:
        RankError: a rank has gone.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(3, 2)).mean().backward()
        >>> average_gradients(net.parameters())
        >>> net.weight.grad
        tensor([[1., 1.]])
    """
    average_([parameter.grad for parameter in parameters if parameter.grad is not None])


def broadcast_parameters(module: nn.Module) -> None:
    """Give parameters and buffers of every rank the values that they have on rank 0.

    Args:
        module: the same networks on every rank.

    Raises:
        RankError: a rank has gone.

    Example:
        >>> broadcast_parameters(nn.Linear(2, 1))
    """
    if world_size() == 1:
        return
    with _saying_who(), torch.no_grad():
        for tensor in chain(module.parameters(), module.buffers()):
            value = tensor.contiguous()
            distributed.broadcast(value, 0)
            if value is not tensor:
                tensor.copy_(value)


def gather(value: _T) -> list[_T]:
    """Return the values of all ranks, in their order: any objects that can be pickled, on the CPU.

    Raises:
        RankError: a rank has gone.

    Example:
        >>> gather("mine")
        ['mine']
    """
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    with _saying_who():
        distributed.all_gather_object(found, value)
    return found


def gather_on_first(value: _T) -> list[_T]:
    """Return the values of all ranks on rank 0, and none elsewhere; see :func:`gather`.

    Raises:
        RankError: a rank has gone.
    """
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    with _saying_who():
        distributed.gather_object(value, found if rank() == 0 else None)
    return found if rank() == 0 else []


def on_any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on a rank.

    Raises:
        RankError: a rank has gone.

    Example:
        >>> on_any_rank(True)
        True
    """
    return bool(all_sum_(torch.tensor(int(flag))))


def broadcast(value: _T) -> _T:
    """Return the value of rank 0, any object that can be pickled, on the CPU.

    Raises:
        RankError: a rank has gone.

    Example:
        >>> broadcast("rank 0's")
        "rank 0's"
    """
    if world_size() == 1:
        return value
    found: list[Any] = [value]
    with _saying_who():
        distributed.broadcast_object_list(found, 0, device=torch.device("cpu"))
    return found[0]
