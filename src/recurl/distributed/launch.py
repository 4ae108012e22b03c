"""Processes started by torchrun: joined in a process group, and watched."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented there

from recurl._version import __version__
from recurl.distributed.collectives import all_sum_, world_size
from recurl.distributed.watch import Watch
from recurl.errors import ArgumentError, MissingDependencyError, RankError, RecurlError, SaidElsewhere

__all__ = ["check_nccl", "is_launched", "joined", "restarted", "said_once", "speaks"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ANSWER = timedelta(seconds=15)
_PAUSE = 0.2
_BLOCKS = itertools.count()  # of joined ranks in this process, as many on all of them
_END = 30  # seconds that a process that has failed may take to end
_OTHERS = timedelta(minutes=5)  # for all ranks to import what they need


def is_launched() -> bool:
    """Return whether torchrun, or something that sets the same variables, has started this process.

    Example:
        >>> is_launched()
        False
    """
    return all(name in os.environ for name in _NEEDED)


def restarted() -> bool:
    """Return whether torchrun has started the processes again after a failure (``--max-restarts``)."""
    return is_launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def speaks() -> bool:
    """Return whether this process says what all of a machine's have to say: the first one there."""
    return not is_launched() or os.environ["LOCAL_RANK"] == "0"


@contextmanager
def said_once() -> Generator[None]:
    """Let one process of a machine say what all of them find, before they are joined.

    Raises:
        SaidElsewhere: instead of an error that another process says.
    """
    try:
        yield
    except RecurlError:
        if speaks():
            raise
        raise SaidElsewhere(2) from None


def check_nccl() -> None:
    """Refuse a torch without NCCL, which ranks on GPUs talk through.

    Raises:
        MissingDependencyError: this torch has none.
    """
    if not distributed.is_nccl_available():
        raise MissingDependencyError(
            "Several ranks on GPUs need NCCL, which this build of torch lacks: install torch for CUDA, or take "
            "--device cpu."
        )


@contextmanager
def joined(device: str = "cpu") -> Generator[None]:
    """Join the ranks that torchrun has started, for the block; without torchrun, do nothing.

    Tensors on the CPU go through gloo, those on GPUs through NCCL; the rank's GPU is the one of its number on the
    machine, which ``"cuda"`` then means. A rank that dies or fails inside the block ends the others, with a line that
    names it, and a process whose block raises ends within seconds.

    Args:
        device: where this rank computes, ``"cpu"`` or ``"cuda"``; the same on all ranks.

    Raises:
        ArgumentError: the ranks differ in device or versions, a GPU is missing, or the variables make no sense.
        MissingDependencyError: NCCL is missing.
        RankError: nobody answers at the address.

    Example:
        >>> with joined():
        ...     world_size()
        1
    """
    if not is_launched():
        yield
        return
    own, size = _place()
    try:
        _join(device, own, size)
        yield
        _leave()
    except BaseException as error:
        if device != "cpu" and Watch.current is not None:
            signal.alarm(_END)  # NCCL may wait for the other ranks when the process ends
        if _says(error):
            raise
        raise SaidElsewhere(2) from error  # another rank says it


def _says(error: BaseException) -> bool:
    """Tell the other ranks of an error, and return whether this one is to raise it: one of those that meet it."""
    if Watch.current is None:
        return speaks()
    return Watch.report(" ".join(str(error).split()) or type(error).__name__)


def _join(device: str, own: int, size: int) -> None:
    kind, _, index = device.partition(":")
    refusal = _why_no_gpu(index) if kind == "cuda" else None
    if refusal is not None and size == 1:
        raise refusal
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    hosts_store = own == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    number = next(_BLOCKS)
    store = _connected(address, number, hosts=hosts_store)
    by = "torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else "rank 0"
    Watch(lambda: PrefixStore("watch", _connected(address, number)), own, size, f"{by} at {address}").start()
    _compare(store, own, size, kind)
    if refusal is not None:  # the others wait no longer, and are told
        raise refusal
    group: dict[str, Any] = {}
    if kind == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # graphs with NVLink multicast don't outlive the group
        group["device_id"] = torch.device("cuda", torch.cuda.current_device())
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=own,
        world_size=size,
        **group,
    )
    all_sum_(torch.ones(1, device=kind))  # the first makes connections, which a CUDA graph can't record


def _place() -> tuple[int, int]:
    """Return the number of this rank, and how many there are."""
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not all(text.isdecimal() for text in said.values()) or not int(said["RANK"]) < int(said["WORLD_SIZE"]):
        listed = ", ".join(f"{name}={text}" for name, text in said.items())
        raise ArgumentError(
            f"Ranks are numbered from 0 to WORLD_SIZE - 1, got {listed}: let torchrun set that, or unset the variables."
        )
    return int(said["RANK"]), int(said["WORLD_SIZE"])


def _why_no_gpu(index: str) -> RecurlError | None:
    """Take the GPU of this rank; return the error where that can't be."""
    try:
        check_nccl()
        _take_gpu(index)
    except RecurlError as error:
        return error
    return None


def _take_gpu(index: str) -> None:
    local, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= found:
        raise ArgumentError(
            f"Every rank needs a GPU of its own, but this machine has {found} for rank {local} of those here: lower "
            "--nproc-per-node, or take --device cpu."
        )
    if index and int(index) != local:
        raise ArgumentError(f"The ranks take one GPU each: write --device cuda, got cuda:{index} on all of them.")
    torch.cuda.set_device(local)


def _connected(address: str, number: int, *, hosts: bool = False) -> Any:
    name, _, port = address.rpartition(":")
    try:
        if not hosts:
            _await_answer(name, int(port))
        store = TCPStore(name, int(port), is_master=hosts, timeout=_ANSWER, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"Nobody answers at {address} within {_ANSWER.seconds} s ({str(error).partition(chr(10))[0]}): start all "
            "ranks with torchrun, and give those of other machines the first one's address (--rdzv-endpoint HOST:PORT)."
        ) from error
    store.set_timeout(_OTHERS)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store remembers earlier ones, and blocks
    return PrefixStore(f"recurl/{attempt}/{number}", store)


def _await_answer(name: str, port: int) -> None:
    """Wait until somebody listens there: in silence, which a store doesn't.

    Raises:
        OSError: nobody does.
    """
    until = time.monotonic() + _ANSWER.seconds
    while True:
        try:
            with socket.create_connection((name, port), max(until - time.monotonic(), 0.1)):
                return
        except OSError:
            if time.monotonic() + _PAUSE > until:
                raise
            time.sleep(_PAUSE)


def _compare(store: Any, own: int, size: int, kind: str) -> None:
    """Refuse ranks that differ in what they must share."""
    mine = {"device": kind, "recurl": __version__, "torch": torch.__version__}
    store.set(f"about/{own}", json.dumps(mine))
    table = [json.loads(store.get(f"about/{number}")) for number in range(size)]
    for name in mine:
        found = [about[name] for about in table]
        if len(set(found)) > 1:
            listed = ", ".join(f"{value} on rank {number}" for number, value in enumerate(found))
            raise ArgumentError(f"All ranks must have the same {name}, got {listed}.")


def _leave() -> None:
    """Leave the process group together with the others."""
    if world_size() > 1:
        all_sum_(torch.ones(1))
    watch = Watch.current
    if watch is not None:
        watch.stop()
    distributed.destroy_process_group()
