"""Launch by torchrun: joining the process group and starting the watch."""

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
from recurl.core.errors import AlreadyReported, ArgumentError, MissingDependencyError, RankError, RecurlError
from recurl.distributed.collectives import all_sum_, world_size
from recurl.distributed.watch import Watch

__all__ = ["check_nccl", "is_launched", "is_local_main_process", "joined", "raise_once", "restarted"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_TIMEOUT = timedelta(seconds=15)
_PAUSE = 0.2
_JOIN_NUMBERS = itertools.count()  # number of each join in this process, the same on all ranks
_EXIT_SECONDS = 30  # seconds within which a failed process must exit
_STORE_TIMEOUT = timedelta(minutes=5)  # time for all ranks to finish their imports


def is_launched() -> bool:
    """Return whether this process was started by torchrun or a launcher that sets the same variables.

    Example:
        >>> is_launched()
        False
    """
    return all(name in os.environ for name in _NEEDED)


def restarted() -> bool:
    """Return whether torchrun has restarted the processes after a failure (``--max-restarts``)."""
    return is_launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def is_local_main_process() -> bool:
    """Return whether this process prints messages for all processes of its machine: True for the first one."""
    return not is_launched() or os.environ["LOCAL_RANK"] == "0"


@contextmanager
def raise_once() -> Generator[None]:
    """Report an error that all processes of a machine raise only once, before the ranks are joined.

    Raises:
        AlreadyReported: in place of an error that another process reports.
    """
    try:
        yield
    except RecurlError:
        if is_local_main_process():
            raise
        raise AlreadyReported(2) from None


def check_nccl() -> None:
    """Check that torch has NCCL, which ranks on GPUs use for communication.

    Raises:
        MissingDependencyError: this build of torch has no NCCL.
    """
    if not distributed.is_nccl_available():
        raise MissingDependencyError(
            "Several ranks on GPUs need NCCL, which this build of torch lacks: install torch for CUDA, or take "
            "--device cpu."
        )


@contextmanager
def joined(device: str = "cpu") -> Generator[None]:
    """Join the ranks started by torchrun for the duration of the block; without torchrun, do nothing.

    CPU tensors are communicated with gloo, GPU tensors with NCCL. The rank's GPU is the one with its local rank, and
    becomes the meaning of ``"cuda"``. If a rank dies or fails inside the block, the others exit with a message that
    names it, and a process whose block raises exits within seconds.

    Args:
        device: device of this rank, ``"cpu"`` or ``"cuda"``; the same on all ranks.

    Raises:
        ArgumentError: the ranks differ in device or versions, a GPU is missing, or the variables are invalid.
        MissingDependencyError: NCCL is missing.
        RankError: the address does not answer.

    Example:
        >>> from recurl.distributed import world_size
        >>> with joined():
        ...     world_size()
        1
    """
    if not is_launched():
        yield
        return
    own, size = _rank_and_size()
    try:
        _join(device, own, size)
        yield
        _leave()
    except BaseException as error:
        if device != "cpu" and Watch.current is not None:
            signal.alarm(_EXIT_SECONDS)  # NCCL may wait for the other ranks at process exit
        if _must_raise(error):
            raise
        raise AlreadyReported(2) from error  # another rank reports it


def _must_raise(error: BaseException) -> bool:
    """Report an error to the other ranks, and return whether this rank must raise it, as the first one to fail."""
    if Watch.current is None:
        return is_local_main_process()
    return Watch.report(" ".join(str(error).split()) or type(error).__name__)


def _join(device: str, own: int, size: int) -> None:
    kind, _, index = device.partition(":")
    refusal = _gpu_error(index) if kind == "cuda" else None
    if refusal is not None and size == 1:
        raise refusal
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    hosts_store = own == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    number = next(_JOIN_NUMBERS)
    store = _connect(address, number, hosts=hosts_store)
    by = "torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else "rank 0"
    Watch(lambda: PrefixStore("watch", _connect(address, number)), own, size, f"{by} at {address}").start()
    _compare(store, own, size, kind)
    if refusal is not None:  # the others no longer wait for this rank, and are informed
        raise refusal
    group: dict[str, Any] = {}
    if kind == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # CUDA graphs with NVLink multicast don't outlive the group
        group["device_id"] = torch.device("cuda", torch.cuda.current_device())
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=own,
        world_size=size,
        **group,
    )
    # The first collective opens connections, which can't be captured in a CUDA graph.
    all_sum_(torch.ones(1, device=kind))


def _rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not all(text.isdecimal() for text in found.values()) or not int(found["RANK"]) < int(found["WORLD_SIZE"]):
        listed = ", ".join(f"{name}={text}" for name, text in found.items())
        raise ArgumentError(
            f"Ranks are numbered from 0 to WORLD_SIZE - 1, got {listed}: let torchrun set them, or unset the variables."
        )
    return int(found["RANK"]), int(found["WORLD_SIZE"])


def _gpu_error(index: str) -> RecurlError | None:
    """Select the GPU of this rank; return the error if that fails."""
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
            f"Every rank needs its own GPU, but this machine has {found} for its local rank {local}: lower "
            "--nproc-per-node, or use --device cpu."
        )
    if index and int(index) != local:
        raise ArgumentError(f"Each rank must use a separate GPU, but all got cuda:{index}: write --device cuda.")
    torch.cuda.set_device(local)


def _connect(address: str, number: int, *, hosts: bool = False) -> Any:
    name, _, port = address.rpartition(":")
    try:
        if not hosts:
            _await_server(name, int(port))
        store = TCPStore(
            name, int(port), is_master=hosts, timeout=_CONNECT_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"No answer at {address} within {_CONNECT_TIMEOUT.seconds} s ({str(error).partition(chr(10))[0]}): start "
            "all ranks with torchrun, and on other machines set the first one's address (--rdzv-endpoint HOST:PORT)."
        ) from error
    store.set_timeout(_STORE_TIMEOUT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store keeps entries of earlier attempts
    return PrefixStore(f"recurl/{attempt}/{number}", store)


def _await_server(name: str, port: int) -> None:
    """Wait until a server listens at the address, without the messages that a store would print.

    Raises:
        OSError: there is no server.
    """
    until = time.monotonic() + _CONNECT_TIMEOUT.seconds
    while True:
        try:
            with socket.create_connection((name, port), max(until - time.monotonic(), 0.1)):
                return
        except OSError:
            if time.monotonic() + _PAUSE > until:
                raise
            time.sleep(_PAUSE)


def _compare(store: Any, own: int, size: int, kind: str) -> None:
    """Check that all ranks have the same device type and versions."""
    mine = {"device": kind, "recurl": __version__, "torch": torch.__version__}
    store.set(f"about/{own}", json.dumps(mine))
    table = [json.loads(store.get(f"about/{number}")) for number in range(size)]
    for name in mine:
        found = [about[name] for about in table]
        if len(set(found)) > 1:
            listed = ", ".join(f"{value} on rank {number}" for number, value in enumerate(found))
            raise ArgumentError(f"All ranks must have the same {name}, got {listed}.")


def _leave() -> None:
    """Leave the process group together with the other ranks."""
    if world_size() > 1:
        all_sum_(torch.ones(1))
    watch = Watch.current
    if watch is not None:
        watch.stop()
    distributed.destroy_process_group()
