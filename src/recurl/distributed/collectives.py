"""Collectives of the default process group, with single-process behavior if there is none."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from recurl.core.errors import ArgumentError, RankError
from recurl.core.torch_compat import foreach_copy_

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
    """Return the rank of this process in the process group, 0 without one.

    Example:
        >>> from recurl.distributed import world_size
        >>> rank(), world_size()
        (0, 1)
    """
    return distributed.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of processes in the process group, 1 without one."""
    return distributed.get_world_size() if _has_group() else 1


@contextmanager
def _rank_errors() -> Generator[None]:
    """Convert the failure of a collective to a RankError, unless the watch ends the process first.

    Raises:
        RankError: a collective raised a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        from recurl.distributed.watch import Watch  # noqa: PLC0415 - imported by its only user, launch

        Watch.await_verdict()
        raise RankError(
            f"Another rank is gone, or its tensors differ: {str(error).partition(chr(10))[0]}. Look at the first "
            "error among the ranks."
        ) from error


def all_sum_(tensor: Tensor) -> Tensor:
    """Sum a contiguous tensor over all ranks, in place, and return it.

    Raises:
        RankError: a rank is gone.
    """
    if world_size() > 1:
        with _rank_errors():
            distributed.all_reduce(tensor)
    return tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Gather a contiguous tensor ``[...]`` from all ranks into ``[ranks, ...]``.

    Raises:
        RankError: a rank is gone.
    """
    found = tensor.new_empty(world_size(), *tensor.shape)
    # The first name exists since torch 2.13, which warns about the second.
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    with _rank_errors():
        getattr(distributed, name)(found.view(-1), tensor.view(-1))
    return found


def _average_(tensor: Tensor) -> Tensor:
    """Replace a contiguous tensor by its mean over all ranks, and return it."""
    if tensor.is_cuda and "nccl" in distributed.get_backend_config():  # other backends can't divide
        with _rank_errors():
            distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        return tensor
    return all_sum_(tensor).div_(world_size())


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their means over all ranks, with one flat all-reduce per dtype and device.

    Args:
        tensors: real or complex tensors or parameters, with the same number, shapes and dtypes on every rank.

    Raises:
        ArgumentError: a tensor holds integers or bools, whose means are not of the same dtype.
        RankError: a rank is gone.

    Example:
        >>> x = torch.ones(2)
        >>> average_([x])  # without a process group: unchanged
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
    """Replace gradients by their means over all ranks, in one flat all-reduce; call between backward and step.

    If every rank's loss is a mean over the same number of tokens, these are the gradients of the mean over all tokens.

    Args:
        parameters: trained parameters; the same ones must have a gradient on every rank.

    Raises:
        RankError: a rank is gone.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(3, 2)).mean().backward()
        >>> average_gradients(net.parameters())
        >>> net.weight.grad
        tensor([[1., 1.]])
    """
    average_([parameter.grad for parameter in parameters if parameter.grad is not None])


def broadcast_parameters(module: nn.Module) -> None:
    """Copy the values of parameters and buffers on rank 0 to all ranks.

    Args:
        module: the same networks on every rank.

    Raises:
        RankError: a rank is gone.

    Example:
        >>> from torch import nn
        >>> broadcast_parameters(nn.Linear(2, 1))
    """
    if world_size() == 1:
        return
    with _rank_errors(), torch.no_grad():
        for tensor in chain(module.parameters(), module.buffers()):
            value = tensor.contiguous()
            distributed.broadcast(value, 0)
            if value is not tensor:
                tensor.copy_(value)


def gather(value: _T) -> list[_T]:
    """Return the values of all ranks, in rank order: any picklable objects, on the CPU.

    Raises:
        RankError: a rank is gone.

    Example:
        >>> gather("mine")
        ['mine']
    """
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    packed = _packed(value)
    with _rank_errors():
        distributed.all_gather_object(found, packed)
    return list(map(_unpacked, found))


def gather_on_first(value: _T) -> list[_T]:
    """Return the values of all ranks on rank 0, and an empty list elsewhere; see :func:`gather`.

    Raises:
        RankError: a rank is gone.
    """
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    packed = _packed(value)
    with _rank_errors():
        distributed.gather_object(packed, found if rank() == 0 else None)
    return list(map(_unpacked, found)) if rank() == 0 else []


def on_any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank.

    Raises:
        RankError: a rank is gone.

    Example:
        >>> on_any_rank(True)
        True
    """
    return bool(all_sum_(torch.tensor(int(flag))))


def broadcast(value: _T) -> _T:
    """Return the value of rank 0, any picklable object, on the CPU.

    Raises:
        RankError: a rank is gone.

    Example:
        >>> broadcast("rank 0's")
        "rank 0's"
    """
    if world_size() == 1:
        return value
    found: list[Any] = [_packed(value) if rank() == 0 else None]
    with _rank_errors():
        distributed.broadcast_object_list(found, 0, device=torch.device("cpu"))
    return value if rank() == 0 else _unpacked(found[0])


def _packed(value: Any) -> bytes:
    """Return an object as bytes; not by pickle, which can't load tensors of dtype uint16, uint32, or uint64."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
