"""Requests to all workers at once: plans arrive in order, and a worker that doesn't reply is named."""

import os
import pickle
import signal
import sys
import threading

import cloudpickle
import pytest

from recurl.core.errors import WorkerError
from recurl.envs.parallel import Requests
from recurl.envs.workers import WorkerGroup, WorkerTask
from recurl.envs.workers_env import Announcement, Plan
from recurl.envs.workers_rounds import RoundServer

pytestmark = pytest.mark.slow

# Workers can't import the tests, so definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS, PLACES = 3, 2


def serve(channel, index):
    """Record the completed rounds, in order; plans are identified by their keys."""
    channel.send("ready")
    rounds = RoundServer(channel, index, PLACES, WORKERS)
    plans, done = {}, []
    while True:
        number = rounds.next_plan()
        if number is None or number not in plans:
            message = pickle.loads(channel.receive_bytes())
            if isinstance(message, Announcement):
                plans[message.number] = message.plan
            elif message[0] == "close":
                return
            else:
                channel.send(done)
                done = []
        if number is None:
            continue
        while number not in plans:
            message = pickle.loads(channel.receive_bytes())
            plans[message.number] = message.plan
        plan = plans[number]
        done.append((plan.place, plan.keys[0]))
        if plan.keys[0] == f"stop {index}":
            os.kill(os.getpid(), signal.SIGSTOP)
        if plan.keys[0] == f"raise {index}":
            raise ArithmeticError("on purpose")
        rounds.answer(plan.place)


def plan(place, name):
    return Plan(place, "step", (name,), None)


def started(timeout, descriptors):
    before = descriptors()
    requests = Requests(WorkerGroup([WorkerTask(serve, (index,)) for index in range(WORKERS)], timeout=timeout), PLACES)
    yield requests
    requests.group.kill()
    requests.free()
    assert descriptors() == before


@pytest.fixture
def requests(shared_interpreter, descriptors):
    yield from started(1.5, descriptors)


@pytest.fixture(scope="module")
def lasting(descriptors):
    """Shared workers, for tests that don't change their state."""
    yield from started(60.0, descriptors)


def noted(requests):
    """Return the rounds that each worker has completed since the last call."""
    for index in range(WORKERS):
        requests.ask(0, index, pickle.dumps(("what was done?",)))
    return requests.answers(0, range(WORKERS))


def test_rounds_are_carried_out_in_their_order_by_everyone(lasting):
    wanted = []
    for number in range(20):
        for place in range(PLACES):
            lasting.ask_all(plan(place, f"plan {number % 3}"))
            wanted.append((place, f"plan {number % 3}"))
        for place in reversed(range(PLACES)):
            assert lasting.answers(place, range(WORKERS)) == []
    assert noted(lasting) == [wanted] * WORKERS


def test_an_unawaited_round_does_not_block_others(lasting):
    lasting.ask_all(plan(0, "first"))
    wanted = [(0, "first")]
    for number in range(7):
        lasting.ask_all(plan(1, f"plan {number}"))
        wanted.append((1, f"plan {number}"))
        lasting.answers(1, range(WORKERS))
    lasting.answers(0, range(WORKERS))
    lasting.ask_all(plan(0, "last"))
    lasting.answers(0, range(WORKERS))
    assert noted(lasting) == [[*wanted, (0, "last")]] * WORKERS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stop 1", r"^Worker 1 \(process \d+\) hangs: no answer and no step for 1.5 s"),
        ("raise 2", r"^Worker 2 \(process \d+\) raised ArithmeticError: on purpose"),
    ],
)
def test_a_worker_that_does_not_answer_is_named(requests, name, text):
    requests.ask_all(plan(0, "fine"))
    requests.answers(0, range(WORKERS))
    requests.ask_all(plan(0, name))
    with pytest.raises(WorkerError, match=text):
        requests.answers(0, range(WORKERS))
    assert requests.group.closed


def test_an_error_is_found_where_another_round_must_wait_for_it(requests):
    requests.ask_all(plan(0, "raise 0"))

    def go_on():
        for _ in range(4):
            requests.ask_all(plan(1, "fine"))
            requests.answers(1, range(WORKERS))

    with pytest.raises(WorkerError, match="on purpose"):
        go_on()
    assert requests.group.closed


def test_a_slow_worker_is_waited_for(lasting):
    lasting.ask_all(plan(0, "fine"))
    process = lasting.group.workers[1].process
    lasting.answers(0, range(WORKERS))
    process.send_signal(signal.SIGSTOP)
    lasting.ask_all(plan(0, "slow"))
    threading.Timer(0.5, process.send_signal, (signal.SIGCONT,)).start()
    lasting.answers(0, range(WORKERS))
    lasting.ask_all(plan(0, "fine"))
    lasting.answers(0, range(WORKERS))
    assert noted(lasting)[1] == [(0, "fine"), (0, "slow"), (0, "fine")]
