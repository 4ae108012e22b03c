"""Other operating systems, simulated by removing the functions that they lack before any import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.data.replay_buffers import LazyMemmapStorage, storages

pytestmark = pytest.mark.slow

WINDOWS = """
import faulthandler, os, select, signal, socket, sys
import torch  # checks for functions that exist here, but would find others on Windows
sys.modules["fcntl"] = sys.modules["resource"] = None
for module, names in {
    os: ["fork", "killpg", "lockf", "pread", "memfd_create", "sysconf", "register_at_fork", "sched_getaffinity"],
    select: ["poll", "epoll"],
    signal: ["SIGKILL", "SIGUSR1", "SIGHUP"],
    socket: ["SCM_RIGHTS"],
    faulthandler: ["register"],
}.items():
    for name in names:
        delattr(module, name)
"""
MACOS = """
import os
del os.memfd_create, os.sched_getaffinity
"""
COMMANDS = """
import contextlib, io
from recurl.cli import main
from recurl.collectors import MultiSyncCollector
from recurl.envs import EnvCreator, GymEnv, ParallelEnv
from recurl.core.errors import UnsupportedError

small = "--num-envs 2 --rollout-steps 8 --minibatches 1 --hidden-size 4 --total-steps 32".split()
train = ["train", "ppo", "--env", "recurl/RepeatPrevious-v0", *small]
assert main([*train, "--run-dir", "run"]) == 0
assert main(["evaluate", "run", "--episodes", "2"]) == 0
said = io.StringIO()
with contextlib.redirect_stderr(said):
    assert main([*train, "--run-dir", "overlapped", "--overlap"]) == 2
print("refused:", said.getvalue())
make = EnvCreator(lambda: GymEnv("CartPole-v1"))
for function in (lambda: ParallelEnv(2, make), lambda: MultiSyncCollector([make], frames_per_batch=8)):
    try:
        function()
    except UnsupportedError as error:
        print("refused:", error)
"""
STEP = """
from recurl.envs import GymEnv, ParallelEnv
env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
print(env.rollout(3, break_when_any_done=False).shape)
env.close()
"""


def run(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.full
def test_without_posix_runs_train_and_workers_are_refused(tmp_path: Path) -> None:
    said = run(WINDOWS + COMMANDS, tmp_path)
    assert "doesn't support locks: the file .owner in it names the process" in said
    command, *programs = said.split("refused: ")[1:]
    lacking = "Worker processes need a POSIX system such as Linux or macOS, and linux lacks os.killpg, os.lockf"
    assert lacking in command
    assert len(command.strip().splitlines()) <= 3
    advice = "use SerialEnv instead of ParallelEnv, Collector instead of a collector with workers, and no --overlap."
    assert len(programs) == 2
    assert all(text.startswith(lacking) and text.strip().endswith(advice) for text in programs)


@pytest.mark.full
def test_workers_work_on_posix_without_linux_features(tmp_path: Path) -> None:
    assert run(MACOS + STEP, tmp_path).strip() == "torch.Size([2, 3])"


def test_files_without_a_name_need_posix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storages, "os", SimpleNamespace(name="nt"))
    with pytest.raises(UnsupportedError, match="and this is Windows: give LazyMemmapStorage a scratch_dir"):
        LazyMemmapStorage(4).prepare(torch.zeros(2))
    LazyMemmapStorage(4, scratch_dir=tmp_path).prepare(torch.zeros(2))
