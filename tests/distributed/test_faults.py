"""Ranks that die, fail or hang end the others with a line that names them; impossible setups get one-line errors."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from recurl.cli.arguments import without_options
from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint
from tests.programs import Programs

pytestmark = pytest.mark.slow

TASK = ["--env", "recurl/RepeatPrevious-v0", "--hidden-size", 8, "--num-envs", 2, "--rollout-steps", 8]
TASK += ["--sequence-length", 4, "--minibatches", 2, "--logger", "none", "--eval-episodes", 1]
LONG = ["train", "ppo", *TASK, "--total-steps", 10_000_000, "--checkpoint-every", 2]
SECONDS = 15


def with_options(words, *more):
    """Return a command line with other values of some options."""
    return [*without_options([str(word) for word in words], [str(word) for word in more]), *more]


class Server:
    """Starts ranks."""

    def __init__(self, programs, folder):
        self._programs, self._folder, self._ranks = programs, folder, []

    def start(self, words, *, port, rank=0, world=2, **environment):
        out = self._folder / f"{time.monotonic_ns()}-{rank}.txt"
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": port, **environment}
        env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        with out.open("wb") as file:
            command, folder = [sys.executable, "-m", "recurl", *words], Path(__file__).parents[2]
            self._ranks.append(Rank(self._programs.Popen(command, cwd=folder, env=env, stdout=file, stderr=file), out))
        return self._ranks[-1]

    def both(self, *words, other=None):
        port = free_port()
        lines = [words, words if other is None else other]
        return [self.start(line, port=port, rank=number) for number, line in enumerate(lines)]

    def end(self):
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()


class Rank:
    def __init__(self, process, out):
        self.process, self._out = process, out
        self.pid = process.pid

    def text(self):
        return self._out.read_text()

    def is_there(self):
        return self.process.poll() is None

    def ends_within(self, seconds):
        began = time.monotonic()
        while self.is_there():
            assert time.monotonic() - began < seconds, self.text()
            time.sleep(0.05)
        return self.text()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def await_update(folder, ranks, update):
    deadline = time.monotonic() + 60
    while not folder.metrics.exists() or len(folder.metrics.read_text().splitlines()) <= update:
        assert time.monotonic() < deadline, [rank.text() for rank in ranks]
        assert all(rank.is_there() for rank in ranks), [rank.text() for rank in ranks]
        time.sleep(0.05)


@pytest.fixture
def server(programs, tmp_path_factory):
    server = Server(programs, tmp_path_factory.mktemp("out"))
    yield server
    server.end()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(server, tmp_path, victim):
    folder = RunFolder(tmp_path / "run")
    ranks = server.both(*LONG, "--run-dir", folder.path)
    await_update(folder, ranks, 3)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    text = ranks[1 - victim].ends_within(SECONDS)
    assert f"rank {victim} has died" in text or (victim == 0 and "rank 0 at 127.0.0.1" in text)
    assert "Traceback" not in text
    assert latest_checkpoint(folder.checkpoints)


def test_a_rank_that_fails_ends_the_others(server, tmp_path):
    slow = ["--env", "tests.distributed.slow:recurl-test/Slow-v0", "--env-kwargs", "fails=True"]
    ranks = server.both(*with_options(LONG, *slow), "--run-dir", tmp_path / "run")
    texts = [rank.ends_within(SECONDS + 20) for rank in ranks]
    assert "rank 0 ends, as rank 1 has failed: The environment raised RuntimeError: no more." in texts[0]
    assert "recurl: The environment raised RuntimeError: no more." in texts[1]
    assert "Traceback" not in "".join(texts)


@pytest.mark.full
def test_a_rank_that_hangs_ends_all(server, tmp_path):
    slow = ["--env", "tests.distributed.slow:recurl-test/Slow-v0", "--env-kwargs", "hangs=True", "--rank-timeout", 2]
    ranks = server.both(*with_options(LONG, *slow), "--run-dir", tmp_path / "run")
    for number, rank in enumerate(ranks):
        text = rank.ends_within(SECONDS + 20)
        assert f"rank {number} ends, as rank 1 has made no progress for 2 s (--rank-timeout)" in text


def test_a_rank_that_is_stopped_ends_the_others(server, tmp_path):
    folder = RunFolder(tmp_path / "run")
    ranks = server.both(*LONG, "--rank-timeout", 2, "--run-dir", folder.path)
    await_update(folder, ranks, 4)
    os.kill(ranks[0].pid, signal.SIGSTOP)  # it hosts the store
    try:
        text = ranks[1].ends_within(SECONDS)
    finally:
        os.kill(ranks[0].pid, signal.SIGKILL)
    assert "rank 1 ends, as rank 0 at 127.0.0.1:" in text
    assert "has not answered for 2 s (--rank-timeout)" in text


JOINED_TWICE = """
import os
import time
from recurl.distributed import gather, joined
for block in range(2):
    with joined():
        assert gather(block) == [block, block]
        if block == 1:
            time.sleep(float(os.environ["RANK"]))  # rank 1 has seen that rank 0 failed before it fails itself
            raise ValueError("both")
"""


@pytest.mark.full
def test_ranks_join_again_and_end_by_themselves_where_all_fail(programs):
    """Two programs that end normally: neither is aborted. The store is torchrun's, which outlives a block."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [
        programs.Popen(
            [sys.executable, "-c", JOINED_TWICE],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(number), "LOCAL_RANK": str(number)},
        )
        for number in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert sorted(rank.returncode for rank in ranks) == [1, 2], said
    assert sorted(text.count("ValueError: both") for text in said) == [0, 1]
    assert "rank 1 ends, as" not in said[1]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Outputs of pairs of ranks that can't train. Most of their time is spent waiting, so all run at once."""
    folder, programs = tmp_path_factory.mktemp("refused"), Programs()
    server = Server(programs, folder)
    (folder / "holds").mkdir()
    (folder / "holds" / "mine.txt").write_text("mine")
    words = [*LONG, "--run-dir", folder / "run"]
    pairs = {
        "rank 0 alone": server.both(*LONG, "--run-dir", folder / "holds"),
        "all": server.both(*with_options(words, "--minibatches", 3)),
        "words": server.both("train", "ppo", "--env", "recurl/TMaze-v0", "--num-envs", "none"),
        "options": server.both(*words, other=with_options(words, "--hidden-size", 4)),
        "devices": server.both(*words, other=[*words, "--device", "cuda"]),
        "no run": server.both("train", "--resume", folder / "none"),
    }
    yield {name: [rank.ends_within(2 * SECONDS) for rank in ranks] for name, ranks in pairs.items()}
    assert not (folder / "run").exists()
    server.end()
    programs.end()


@pytest.mark.full
def test_an_error_on_rank_0_alone_ends_the_others(refused):
    texts = refused["rank 0 alone"]
    assert texts[0].startswith("recurl: ")
    assert "is not empty and holds no run" in texts[0]
    assert "rank 1 ends, as rank 0 has failed: " in texts[1]


def test_an_error_on_all_ranks_is_one_line(refused):
    assert sum(text.count("all minibatches must have the same size") for text in refused["all"]) == 1
    assert sorted(len(text.splitlines()) for text in refused["words"]) == [0, 1]


def test_options_differ(refused):
    said = "recurl: All ranks must have the same options, but --hidden-size is 8 on rank 0 and 4 on rank 1.\n"
    texts = refused["options"]
    assert said in texts
    assert sum("All ranks must have the same options" in text and "Traceback" not in text for text in texts) >= 1


def test_one_line_for_a_run_that_isnt_there(refused):
    assert sorted(len(text.splitlines()) for text in refused["no run"]) == [0, 1]


def test_devices_differ(refused):
    said = "recurl: All ranks must have the same device, got cpu on rank 0, cuda on rank 1.\n"
    lines = [line for text in refused["devices"] for line in text.splitlines(keepends=True) if "recurl: " in line]
    assert "".join(lines) == said, "one of them reports it"


@pytest.mark.full
def test_actors_that_cant_be_had(server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        actors = ["--collectors", "ray:1", "--ray-address", f"127.0.0.1:{silent.getsockname()[1]}"]
        ranks = server.both(*LONG, *actors, "--run-dir", tmp_path / "run")
        texts = [rank.ends_within(2 * SECONDS) for rank in ranks]
    assert sum(text.count("recurl: No Ray cluster answers at 127.0.0.1:") for text in texts) == 1
    assert "Traceback" not in "".join(texts)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_no_answer_from_other_ranks(server, tmp_path):
    began = time.monotonic()
    rank = server.start([*LONG, "--run-dir", tmp_path / "run"], port=free_port(), TORCHELASTIC_USE_AGENT_STORE="True")
    text = rank.ends_within(SECONDS + 5)
    assert time.monotonic() - began < SECONDS + 3
    assert "recurl: No answer at 127.0.0.1:" in text


@pytest.mark.full
def test_torchrun_resumes_after_a_kill(tmp_path, programs):
    """End to end: torchrun, a killed rank, a restart from the newest checkpoint, completion."""
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "recurl", "train", "ppo", *TASK, "--total-steps", "640"]
    command += ["--checkpoint-every", "1", "--callback", "tests.distributed.slow:KillOnce", "--run-dir", folder.path]
    done = programs.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "rank 1 ends, as rank 0 has died" in done.stderr
    lines = folder.metrics.read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(number) for number in range(1, 21)]
    assert lines[-1].split(",")[1] == "640"
