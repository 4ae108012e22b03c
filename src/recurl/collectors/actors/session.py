"""A connection to Ray: that of the program, one of an address, or a Ray of this machine that only it reaches."""

from __future__ import annotations

import contextlib
import importlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from recurl.collectors.actors.signals import signals_deferred
from recurl.errors import ArgumentError, MissingDependencyError, UnsupportedError, WorkerError

__all__ = ["RaySession", "import_ray"]

_LOOPBACK = "127.0.0.1"
_ADDRESS_SECONDS = 10.0
_FREE_SECONDS = 5.0  # Ray counts what a program has just freed after a while
_TRY = "import sys; from ray.scripts.scripts import cli; cli(['health-check', '--address', sys.argv[1]])"


class _Started:
    """The connection that recurl has made, if there is one: its users, and whether it is a Ray of this machine."""

    users = 0
    alone = False
    lock = threading.Lock()


def import_ray() -> Any:
    """Import Ray, an extra.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("Ray is not installed: pip install 'recurl[ray]'") from error


class RaySession:
    """A connection to Ray, which several collectors of a program share.

    A Ray that the program has initialised is used as it is. Otherwise one is started on this machine, or that of the
    address is connected, and the last :meth:`close` shuts that down.

    Args:
        address: ``HOST:PORT`` of a cluster, or ``"auto"`` for that of this machine; None for a Ray that listens on the
            loopback interface alone.

    Attributes:
        ray: the module.
        alone: whether recurl has started this Ray, so that nobody else needs its resources.

    Raises:
        ArgumentError: nobody answers at the address, or a Ray of another version.
        MissingDependencyError: Ray is not installed.
        UnsupportedError: this version of Ray would listen elsewhere too.
        WorkerError: Ray can't be started.
    """

    def __init__(self, address: str | None = None) -> None:
        self.ray = import_ray()
        with _Started.lock:
            if not self.ray.is_initialized():
                with signals_deferred() as came:
                    if address is None:
                        _start(self.ray)
                    else:
                        _connect(self.ray, address)
                    if came:
                        self.ray.shutdown()
                _Started.users, _Started.alone = 0, address is None
                self._counted = True
            else:
                self._counted = _Started.users > 0
            _Started.users += self._counted
        self.alone = self._counted and _Started.alone

    def close(self) -> None:
        """Leave Ray, and shut it down if recurl has started it and nobody uses it any more."""
        with _Started.lock:
            if not self._counted:
                return
            self._counted = False
            _Started.users -= 1
            if _Started.users == 0 and self.ray.is_initialized():
                with signals_deferred():
                    self.ray.shutdown()

    def check_free(self, count: int, cpus: float) -> None:
        """Refuse more actors than the cluster has room for.

        Args:
            count: number of actors.
            cpus: CPUs that each one needs.

        Raises:
            ArgumentError: too few CPUs are free.
        """
        end = time.monotonic() + _FREE_SECONDS
        while (free := self.free_cpus()) < count * cpus:
            if time.monotonic() > end:
                total = self.ray.cluster_resources().get("CPU", 0.0)
                raise ArgumentError(
                    f"{count} actors need {count * cpus:g} CPUs of the Ray cluster, but {free:g} of its {total:g} are "
                    "free: take fewer actors, add nodes, or let an actor need less (num_cpus=)."
                )
            time.sleep(0.2)

    def free_cpus(self) -> float:
        """Return how many CPUs of the cluster are free."""
        return self.ray.available_resources().get("CPU", 0.0)


def _start(ray: Any) -> None:
    with _on_loopback():
        try:
            context = ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=_LOOPBACK,
            )
        except Exception as error:
            ray.shutdown()
            raise WorkerError(f"Ray can't be started, {type(error).__name__}: {error}") from error
    found = context.address_info["node_ip_address"]
    if found != _LOOPBACK:
        ray.shutdown()
        raise UnsupportedError(
            f"Ray {ray.__version__} would listen on {found} too, where others may reach it: start a Ray yourself "
            "(ray.init) to allow that, or take the version that recurl is tested with."
        )


@contextlib.contextmanager
def _on_loopback() -> Generator[None]:
    """Let Ray bind to the loopback interface; on Linux it would replace that by the machine's own address."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _connect(ray: Any, address: str) -> None:
    if address != "auto" and not _is_host_and_port(address):
        raise ArgumentError(f"The address of a Ray cluster is HOST:PORT, or auto, got {address!r}.")
    # In this process Ray would try for two minutes, and then end it.
    command = [sys.executable, "-c", _TRY, address]
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, timeout=_ADDRESS_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ArgumentError(
            f"No Ray cluster answers at {address} within {_ADDRESS_SECONDS:g} s: is it running (ray status), and is "
            "the port that of its head node (6379 by default)?"
        ) from error
    if tried.returncode:
        said = [line for line in tried.stderr.splitlines() if line.strip()] or ["it is not healthy"]
        raise ArgumentError(f"The Ray cluster at {address} can't be used: {said[-1].strip()}")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        ray.shutdown()
        raise ArgumentError(f"The Ray cluster at {address} can't be used, {type(error).__name__}: {error}") from error


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
