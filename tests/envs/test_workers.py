"""Workers that stop in the middle of an operation: the parent never waits forever."""

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from recurl.collectors import MultiAsyncCollector, OverlappedCollector
from recurl.core.errors import RemoteTraceback, UsageError, WorkerError
from recurl.envs import GymEnv, workers
from recurl.envs.workers import WorkerGroup, WorkerTask
from recurl.envs.workers_memory import Entry, SharedTensors

pytestmark = pytest.mark.slow

# Workers can't import the tests, so definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENTRIES = [Entry("x", (3,), torch.float32)]
HANGS = r"^Worker 0 \(process \d+\) hangs: no answer and no step for 1 s"
LARGE = 16 << 20  # exceeds any socket buffer


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def serve(channel, what):
    """Send a greeting, and at the next message stop in the middle of a reply."""
    channel.send("ready")
    if what == "unread":
        stop()
    channel.receive_bytes()
    if what == "announced":
        channel.send(ENTRIES)
        stop()
    elif what == "shared":
        channel.send(ENTRIES)
        channel.share(ENTRIES)
        channel.send("done")
    elif what == "half":
        half = pickle.dumps(b"v" * LARGE)
        os.write(channel._connection.fileno(), len(half).to_bytes(4, "big") + half[: 64 << 10])
        stop()
    elif what == "dead":
        os.write(channel._connection.fileno(), (1000).to_bytes(4, "big") + b"v" * 10)
        os._exit(3)
    elif what == "locked":
        memory = channel.receive_memory(tuple(ENTRIES))
        channel.send("mine")
        with memory.lock():
            stop()


@pytest.fixture
def group(request, shared_interpreter, descriptors):
    before = descriptors()
    group = WorkerGroup([WorkerTask(serve, (request.param,))], timeout=1.0)
    yield group
    group.kill()
    assert descriptors() == before


def seconds(function):
    begin = time.monotonic()
    function()
    return time.monotonic() - begin


@pytest.mark.parametrize("group", ["shared"], indirect=True)
def test_memory_that_is_sent_is_received(group):
    group.ask(0, b"go")
    assert group.next_reply([0]).value == ENTRIES
    assert group.receive_memory(0, ENTRIES).tensors["x"].shape == (3,)
    assert group.answers([0]) == ["done"]


@pytest.mark.parametrize("group", ["announced"], indirect=True)
def test_memory_that_is_announced_and_not_sent(group):
    group.ask(0, b"go")
    assert group.next_reply([0]).value == ENTRIES
    assert seconds(lambda: group.receive_memory(0, ENTRIES)) < 5
    assert group.receive_memory(0, ENTRIES) is None
    with pytest.raises(WorkerError, match=HANGS):
        group.answers([0])


@pytest.mark.parametrize("group", ["half"], indirect=True)
def test_half_an_answer(group):
    group.ask(0, b"go")
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=HANGS):
        group.answers([0])
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("group", ["dead"], indirect=True)
def test_half_an_answer_of_a_process_that_ended(group):
    group.ask(0, b"go")
    with pytest.raises(WorkerError, match=r"^Worker 0 \(process \d+\) exited with code 3"):
        group.answers([0])


@pytest.mark.parametrize("group", ["unread"], indirect=True)
def test_a_message_that_is_not_read(group):
    assert seconds(lambda: group.ask(0, b"m" * LARGE)) < 5
    assert seconds(lambda: group.ask(0, b"m" * LARGE)) < 0.5
    memory = SharedTensors(ENTRIES)
    assert seconds(lambda: group.send_memory(0, memory)) < 0.5
    memory.close()
    with pytest.raises(WorkerError, match=HANGS):
        group.answers([0])


@pytest.mark.full
@pytest.mark.parametrize("group", ["unread"], indirect=True)
def test_closing_a_full_socket(group):
    group.ask(0, b"m" * LARGE)
    assert seconds(group.close) < 10
    assert group.closed


@pytest.mark.parametrize("group", ["locked"], indirect=True)
def test_memory_that_stays_locked(group):
    memory = SharedTensors(ENTRIES)
    group.ask(0, b"go")
    group.send_memory(0, memory)
    assert group.answers([0]) == ["mine"]
    time.sleep(0.2)
    with pytest.raises(WorkerError, match="hangs: it has held the shared-memory lock for 1 s"), memory.lock(1.0):
        pass
    group.kill()
    with memory.lock(1.0):
        pass
    memory.close()


class Greedy(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(-1)


class Stops(TensorDictModule):
    """Policy that stops the worker when it loads the second set of weights."""

    loaded = 0

    def load_state_dict(self, *arguments, **options):
        self.loaded += 1
        if self.loaded == 2:
            stop()
        return super().load_state_dict(*arguments, **options)


@pytest.mark.usefixtures("shared_interpreter")
def test_a_worker_that_stops_while_it_reads_weights():
    policy = Stops(Greedy(4, 2), in_keys=["observation"], out_keys=["action"])
    collector = MultiAsyncCollector([lambda: GymEnv("CartPole-v1")], policy, frames_per_batch=4, timeout=1.0)
    collector.collect()
    time.sleep(0.7)  # the worker collects its second batch with the same weights
    collector.update_policy_weights_()
    collector.collect()
    time.sleep(0.7)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="hangs: it has held the shared-memory lock for 1 s"):
        collector.update_policy_weights_()
    assert time.monotonic() - begin < 5
    with pytest.raises(UsageError, match="worker processes were stopped"):
        collector.collect()
    collector.shutdown()


@pytest.mark.usefixtures("shared_interpreter")
def test_a_worker_that_stops_between_batches():
    create = lambda: GymEnv("CartPole-v1")  # noqa: E731 - sent to a worker
    collector = OverlappedCollector(create, frames_per_batch=4, timeout=2.0)
    collector.collect()
    collector._transport.group.workers[0].process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"hangs: no answer and no step for 2 s"):
        list(collector)
    assert time.monotonic() - begin < 10
    collector.shutdown()


def describe(channel, _):
    numbers = float(np.random.rand()), random.random(), torch.rand(()).item()  # noqa: NPY002
    open_files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    channel.send((os.getppid(), numbers, sum("memfd:recurl" in file for file in open_files)))
    channel.receive_bytes()


@pytest.fixture(scope="module")
def three():
    """Three workers with a server of their own, started where sys.path has entries that imports ignore."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "SERVER", workers.WorkerServer())
        patch.setattr(sys, "path", [Path("/no/such/folder"), b"/no/such/folder", None, *sys.path])
        group = WorkerGroup([WorkerTask(describe, (None,))] * 3, timeout=1.0)
    yield group
    (interpreter,) = {parent for parent, *_ in group.greetings}
    group.close()
    assert not Path(f"/proc/{interpreter}").exists()


def test_workers_of_a_group_are_forks_of_one_interpreter_without_threads(three):
    """Nothing is computed in the interpreter, so a fork is complete; the generators of forks differ from each other."""
    (interpreter,) = {parent for parent, *_ in three.greetings}
    assert len(os.listdir(f"/proc/{interpreter}/task")) == 1
    numbers = [drawn for _, drawn, _ in three.greetings]
    assert [len(set(column)) for column in zip(*numbers, strict=True)] == [3, 3, 3]


def test_a_worker_has_no_file_of_another(three):
    assert len({files for *_, files in three.greetings}) == 1


@pytest.mark.full
def test_workers_end_with_their_interpreter_and_a_replacement_begins_in_another():
    group = WorkerGroup([WorkerTask(serve, ("shared",))] * 2, timeout=30.0)
    os.kill(group._server.pid, signal.SIGKILL)
    begin = time.monotonic()
    error = group.next_reply([0, 1]).error
    assert time.monotonic() - begin < 20
    assert isinstance(error, WorkerError)
    assert re.match(r"Worker \d \(process \d+\) closed its connection\.", str(error))
    group.end(1)
    group.restart(0)
    assert group.next_reply([0]).value == "ready"
    group.kill()


def tell(channel, _):
    channel.send((os.getppid(), os.environ.get("RECURL_TEST"), os.getcwd()))
    channel.receive_bytes()


def test_groups_share_a_server_until_the_last_ends_and_have_their_own_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "SERVER", workers.WorkerServer())
    first = WorkerGroup([WorkerTask(tell, (None,))], timeout=1.0)
    monkeypatch.setenv("RECURL_TEST", "set")
    monkeypatch.chdir(tmp_path)
    second = WorkerGroup([WorkerTask(tell, (None,))], timeout=1.0)
    server = workers.SERVER.pid
    assert (first.greetings[0][:2], second.greetings) == ((server, None), [(server, "set", str(tmp_path))])
    first.close()
    assert Path(f"/proc/{server}").exists()
    second.close()
    assert not Path(f"/proc/{server}").exists()


def test_a_server_that_fails(monkeypatch):
    monkeypatch.setattr(workers, "SERVER", workers.WorkerServer())
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: b"/bin/false")
    with pytest.raises(WorkerError, match=r"^Worker \d \(process \d+\) closed its connection"):
        WorkerGroup([WorkerTask(serve, ("shared",))] * 2, timeout=1.0)


def ends_after_a_fork(channel, _):
    channel.send("ready")
    channel.receive_bytes()
    if not os.fork():
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("shared_interpreter")
def test_a_worker_that_dies_while_its_fork_is_alive():
    """The fork keeps the connection open, but the parent doesn't wait for it, and it exits too."""
    group = WorkerGroup([WorkerTask(ends_after_a_fork, (None,))], timeout=None)
    group.ask(0, b"go")
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL"):
        group.answers([0])
    assert time.monotonic() - begin < 10


RAISES = """
import sys
from recurl.envs import GymEnv, ParallelEnv
def create():
    raise RuntimeError("first line\\nsecond line")
try:
    ParallelEnv(1, create)
except Exception as error:
    assert str(error).endswith(" raised RuntimeError: first line"), error
    raise
"""


def test_the_traceback_is_shown_as_the_cause(programs):
    ended = programs.run([sys.executable, "-c", RAISES], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "RemoteTraceback" in ended.stderr
    assert "in create" in ended.stderr
    assert "RuntimeError: first line\nsecond line" in ended.stderr
    assert "was the direct cause" in ended.stderr
    assert str(RemoteTraceback("text\n")) == "\n\ntext\n"


FORKS = """
import os, time
from recurl.envs import GymEnv, ParallelEnv
env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
root = env.reset()
child = os.fork()
if not child:
    try:
        env.rand_step(root)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    env.close()
    time.sleep(60)
time.sleep(1)
env.rand_step(root)
group = env._group
print(child, group._server.pid, *(worker.process.pid for worker in group.workers), flush=True)
time.sleep(60)
"""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
def test_a_fork_of_the_program_neither_uses_nor_stops_nor_keeps_its_workers(programs):
    with programs.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        refused = program.stdout.readline()
        assert re.match(rf"UsageError .* belong to the process .* {program.pid}, .* is a fork of it", refused)
        fork, *processes = map(int, program.stdout.readline().split())
        assert all(map(runs, (fork, *processes)))
        program.kill()
        end = time.monotonic() + 20
        while any(map(runs, processes)) and time.monotonic() < end:
            time.sleep(0.1)
        left = [pid for pid in processes if runs(pid)]
        assert runs(fork)
        os.kill(fork, signal.SIGKILL)
    assert not left


ABANDONED = """
import os, signal
from recurl.envs import GymEnv, ParallelEnv
env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
pids = [worker.process.pid for worker in env._workers.group.workers]
os.kill(pids[1], signal.SIGSTOP)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_a_stopped_worker_ends_with_the_program(programs):
    done = programs.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    pids = list(map(int, done.stdout.split()))
    deadline = time.monotonic() + 3
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))
