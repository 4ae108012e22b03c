"""Connection to Ray: the program's instance, a cluster at an address, or a private local instance."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import threading
import time
from typing import Any

from recurl.collectors.actors.ray_compat import on_loopback
from recurl.collectors.actors.signals import signals_deferred
from recurl.core.errors import ArgumentError, MissingDependencyError, UnsupportedError, WorkerError

__all__ = ["RaySession", "import_ray"]

_LOOPBACK = "127.0.0.1"
_ADDRESS_SECONDS = 10.0
_FREE_SECONDS = 5.0  # Ray reports freed resources with a delay
_TRY = "import sys; from ray.scripts.scripts import cli; cli(['health-check', '--address', sys.argv[1]])"


class _Connection:
    """The connection made by recurl, if any: its number of users, and whether the instance is private."""

    users = 0
    is_private = False
    lock = threading.Lock()


def import_ray() -> Any:
    """Import Ray, an optional dependency.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("Ray is not installed: pip install 'recurl[ray]'") from error


class RaySession:
    """Connection to Ray, shared by the collectors of a program.

    If the program has initialized Ray, that instance is used. Otherwise, an instance is started on this machine, or a
    connection to the address is made; the last :meth:`close` shuts it down.

    Args:
        address: ``HOST:PORT`` of a cluster, or ``"auto"`` for that of this machine; None for an instance that listens
            only on the loopback interface.

    Attributes:
        ray: the module.
        is_private: whether recurl has started this instance, whose resources have no other users.

    Raises:
        ArgumentError: the address does not answer, or runs another version of Ray.
        MissingDependencyError: Ray is not installed.
        UnsupportedError: this version of Ray would also listen on other interfaces.
        WorkerError: Ray can't be started.
    """

    def __init__(self, address: str | None = None) -> None:
        self.ray = import_ray()
        with _Connection.lock:
            if not self.ray.is_initialized():
                with signals_deferred() as received:
                    if address is None:
                        _start(self.ray)
                    else:
                        _connect(self.ray, address)
                    if received:
                        self.ray.shutdown()
                _Connection.users, _Connection.is_private = 0, address is None
                self._is_user = True
            else:
                self._is_user = _Connection.users > 0
            _Connection.users += self._is_user
        self.is_private = self._is_user and _Connection.is_private

    def close(self) -> None:
        """Disconnect, and shut down Ray if recurl has started it and this was the last user."""
        with _Connection.lock:
            if not self._is_user:
                return
            self._is_user = False
            _Connection.users -= 1
            if _Connection.users == 0 and self.ray.is_initialized():
                with signals_deferred():
                    self.ray.shutdown()

    def check_free(self, count: int, cpus: float) -> None:
        """Check that the cluster has enough free CPUs for the actors.

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
                    "free: use fewer actors, add nodes, or reserve fewer CPUs per actor (num_cpus=)."
                )
            time.sleep(0.2)

    def free_cpus(self) -> float:
        """Return the number of free CPUs of the cluster."""
        return self.ray.available_resources().get("CPU", 0.0)


def _start(ray: Any) -> None:
    with on_loopback():
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
            f"Ray {ray.__version__} would also listen on {found}, where others may reach it: start Ray yourself "
            "(ray.init) to allow that, or install the version that recurl is tested with."
        )


def _connect(ray: Any, address: str) -> None:
    if address != "auto" and not _is_host_and_port(address):
        raise ArgumentError(f"The address of a Ray cluster is HOST:PORT, or auto, got {address!r}.")
    # In this process, Ray would retry for two minutes and then exit the process.
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
        lines = [line for line in tried.stderr.splitlines() if line.strip()] or ["it is not healthy"]
        raise ArgumentError(f"The Ray cluster at {address} can't be used: {lines[-1].strip()}")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        ray.shutdown()
        raise ArgumentError(f"The Ray cluster at {address} can't be used, {type(error).__name__}: {error}") from error


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
