"""Unavailable actors are rejected with one line and leave nothing behind."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from recurl.cli import main
from recurl.collectors.actors import session

pytestmark = pytest.mark.slow


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return the error message of a command that is rejected."""

    def call(*words: str) -> str:
        run = tmp_path / "run"
        assert main(["train", "ppo", "--env", "recurl/TMaze-v0", "--run-dir", str(run), *words]) == 2
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1
        assert not run.exists()
        return said.err

    return call


@pytest.mark.parametrize("text", ["dask:4", "ray", "ray:", "ray:0", "ray:-1", "ray:2.5", "ray:two", "8", "RAY:2"])
def test_invalid_engine_or_number(refusal, text: str) -> None:
    said = refusal("--collectors", text)
    assert f"--collectors takes ray:N, such as ray:8 for eight actors, got {text!r}." in said


def test_actors_need_an_environment_each(refusal) -> None:
    said = refusal("--collectors", "ray:8", "--num-envs", "4")
    assert "must divide --num-envs, got 8 and 4: use 1, 2, 4." in said


def test_without_ray(refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "Ray is not installed: pip install 'recurl[ray]'" in refusal("--collectors", "ray:2")


def test_addresses_without_a_cluster(refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_ADDRESS_SECONDS", 2.0)
    said = refusal("--collectors", "ray:2", "--ray-address", "10.0.0.5")
    assert "The address of a Ray cluster is HOST:PORT, or auto, got '10.0.0.5'." in said
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        said = refusal("--collectors", "ray:2", "--ray-address", address)
        assert f"No Ray cluster answers at {address} within 2 s" in said
        assert time.monotonic() - began < 7
