from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recurl.collectors import RayCollector
from recurl.collectors.actors import session
from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.envs import GymEnv
from tests.programs import Programs

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, os, sys, time
import torch
from recurl.collectors import RayCollector
from recurl.envs import GymEnv

create = lambda: GymEnv("CartPole-v1", num_envs=2)
with RayCollector(create, num_collectors=1, frames_per_batch=20, total_frames=40) as collector:
    frames = sum(batch.numel() for batch in collector)
    import ray
    print(json.dumps({"frames": frames, "session": ray.get_runtime_context().gcs_address}), flush=True)
    time.sleep(100)
"""


def family(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = [pid]
    for each in found:
        path = Path(f"/proc/{each}/task/{each}/children")
        found += map(int, path.read_text().split()) if path.exists() else []
    return found[1:]


def listening(pids: list[int]) -> set[str]:
    """Return the addresses at which processes listen, in hexadecimal as in /proc."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            sockets.add(target.removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {words[1].partition(":")[0] for words in lines if words[3] == "0A" and words[9] in sockets}


@pytest.mark.full
def test_a_private_ray_listens_on_loopback_and_ends_with_the_program(programs: Programs) -> None:
    program = programs.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        found = json.loads(program.stdout.readline())
        assert found["frames"] == 40
        assert found["session"].startswith("127.0.0.1:")
        started = family(program.pid)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0") for pid in started]
        assert b"ray::CollectorActor" in names
        assert listening([program.pid, *started]) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
        program.stdout.close()
    agents = {b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"}  # they retry for a minute to reach the others
    others = [pid for pid, name in zip(started, names, strict=True) if name not in agents]
    assert len(others) >= 3
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in others):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("address", "error_line"),
    [
        ("nonsense", "The address of a Ray cluster is HOST:PORT, or auto, got 'nonsense'"),
        ("silent", "No Ray cluster answers at 127.0.0.1:{port} within 2 s"),
    ],
)
def test_an_address_that_does_not_answer(address: str, error_line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(session, "_ADDRESS_SECONDS", 2.0)

    assert not ray.is_initialized()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = f"127.0.0.1:{port}" if address == "silent" else address
        begin = time.monotonic()
        with pytest.raises(ArgumentError, match=error_line.format(port=port)):
            RayCollector(
                lambda: GymEnv("CartPole-v1", num_envs=2), num_collectors=1, frames_per_batch=20, address=place
            )
        assert time.monotonic() - begin < 7
    assert not ray.is_initialized()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"Ray is not installed: pip install 'recurl\[ray\]'"):
        RayCollector(lambda: GymEnv("CartPole-v1", num_envs=2), num_collectors=1, frames_per_batch=20)
