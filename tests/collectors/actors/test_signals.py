"""Signals received while Ray is starting."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recurl.collectors.actors.signals import signals_deferred


def interrupted_twice(seen):
    with signals_deferred() as came:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        seen.extend(came)


def test_signals_arrive_after_the_block():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_twice(seen)
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_program_stays_and_one_that_is_registered_inside_does_not():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    mine, register = signal.getsignal(signal.SIGTERM), signal.signal
    try:
        with signals_deferred():
            assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is mine
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.signal is register
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_changes():
    found = []

    def look():
        with signals_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_deferred() as received:
            signal.raise_signal(signal.SIGINT)
        assert received == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def of_session(session):
    """Return the command lines of the running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, *rest = (path / "stat").read_text().rpartition(")")[2].split()
            if int(rest[2]) == session and state != "Z":
                found.append((path / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_run_that_is_interrupted_while_ray_starts_leaves_nothing(tmp_path, number, code):
    words = "train impala --env CartPole-v1 --num-envs 2 --collectors ray:1 --hidden-size 8 --total-steps 10000000"
    command = [sys.executable, "-m", "recurl", *words.split(), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    deadline = time.monotonic() + 100
    while not any(b"gcs_server" in line for line in of_session(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "recurl: interrupted.\n")
    deadline = time.monotonic() + 3
    while left := of_session(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
