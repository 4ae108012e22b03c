"""Workers of collectors that raise, die or hang; for those of ParallelEnv see tests/envs/test_batched.py."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq

from recurl.collectors import MultiAsyncCollector, MultiSyncCollector
from recurl.core.errors import UsageError, WorkerError
from recurl.envs import GymWrapper
from recurl.modules import GRUModule, set_recurrent_mode

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_interpreter")]

# Workers can't import the tests: objects defined here are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Faulty(gym.Env):
    """Episodes of five steps. Before a step, executes the order in a file once; ``always ...`` every time."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, orders: Path) -> None:
        self.orders = orders
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)

    def step(self, action):
        if self.orders.exists():
            order = self.orders.read_text()
            if not order.startswith("always"):
                self.orders.unlink()
            if order.endswith("raise"):
                raise ValueError("the wheel came off")
            if order.endswith("hang"):
                time.sleep(60)
            if order.endswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
        self.time += 1
        return self.observe(), 1.0, self.time >= 5, False, {}


REPORTS = {
    "raise": r"Worker {0} \(process \d+\) raised ValueError: the wheel came off",
    "hang": r"Worker {0} \(process \d+\) hangs: no answer and no step for 1.5 s",
    "kill": r"Worker {0} \(process \d+\) was killed by SIGKILL",
}


def give_order(folder: Path, order: str) -> None:
    """Write the file atomically: a stepping worker may read it at any time."""
    (folder / "written").write_text(order)
    (folder / "written").replace(folder / "orders")


def make_policy() -> Seq:
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    return Seq(gru, Mod(lambda x: (x[..., 0] > 0).long(), ["features"], ["action"]))


def creator(orders: Path) -> functools.partial:
    return functools.partial(lambda path: GymWrapper(Faulty(path)), orders)


@pytest.mark.parametrize(("kind", "fault"), [(MultiAsyncCollector, "raise"), (MultiSyncCollector, "hang")])
def test_a_fault_is_reported_and_everything_cleaned_up(
    kind: type, fault: str, tmp_path: Path, descriptors: Callable[[], int]
) -> None:
    before = descriptors()
    collector = kind([creator(tmp_path / "orders")], make_policy(), frames_per_batch=20, timeout=1.5)
    collector.collect()
    pids = [worker.process.pid for worker in collector._transport.group.workers]
    give_order(tmp_path, fault)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=REPORTS[fault].format(0)) as caught:
        list(collector)  # the order may arrive when a batch is already in progress
    assert " in step\n" in str(caught.value.__cause__)
    del caught  # its frames keep the collector
    assert time.monotonic() - begin < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(UsageError, match="worker processes were stopped"):
        collector.collect()
    collector.shutdown()
    del collector
    assert descriptors() == before


def test_a_worker_is_replaced(tmp_path: Path, descriptors: Callable[[], int]) -> None:
    """Worker 1 raises, is killed, or hangs; the batch is still complete, and worker 0 is not affected."""
    before, policy = descriptors(), make_policy()
    creators = [creator(tmp_path / "never"), creator(tmp_path / "orders")]
    options = {"frames_per_batch": 40, "timeout": 1.5, "restart_workers": True}
    collector = MultiSyncCollector(creators, policy, **options)
    batches = [collector.collect()]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.5)
    collector.update_policy_weights_()  # a replacement must get these, not its initial ones
    for fault, report in REPORTS.items():
        give_order(tmp_path, fault)
        with pytest.warns(UserWarning, match=f"A worker failed and is replaced(?s:.*){report.format(1)}"):
            batches.append(collector.collect())
        with set_recurrent_mode(True), torch.no_grad():
            features = policy(batches[-1].clone())["features"]
        torch.testing.assert_close(features, batches[-1]["features"], rtol=1e-5, atol=1e-6)
        assert batches[-1]["is_init"][1, 0]
        assert batches[-1].shape == (2, 20)
    ids = torch.cat([batch["collector", "traj_ids"] for batch in batches], 1)
    assert torch.equal(ids[0, 1:] != ids[0, :-1], torch.cat([b["is_init"] for b in batches], 1)[0, 1:, 0])
    assert len(ids.unique()) == 4 * 2 * 4
    give_order(tmp_path, "always raise")
    with (
        pytest.warns(UserWarning, match="A worker failed and is replaced"),
        pytest.raises(WorkerError, match=REPORTS["raise"].format(1)),
    ):
        collector.collect()
    collector.shutdown()
    del collector
    assert descriptors() == before


def test_a_fault_in_the_background_surfaces(tmp_path: Path) -> None:
    class Buffer(list):
        def extend(self, batch):
            self.append(batch)

    buffer = Buffer()
    collector = MultiSyncCollector(
        [creator(tmp_path / "orders")], make_policy(), frames_per_batch=20, replay_buffer=buffer
    )
    collector.start()
    give_order(tmp_path, "kill")
    end = time.monotonic() + 10
    while collector.running and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(WorkerError, match=REPORTS["kill"].format(0)):
        collector.update_policy_weights_()
    collector.async_shutdown()
