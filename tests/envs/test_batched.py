from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    UnsupportedError,
    UsageError,
    WorkerError,
)
from recurl.core.specs import Bounded, Categorical, Composite, Unbounded
from recurl.envs import (
    EnvBase,
    EnvCreator,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from recurl.envs.workers import Worker, WorkerServer
from recurl.envs.workers_env import EnvInfo, Plan, Server, layout
from recurl.envs.workers_memory import Entry, SharedTensors
from recurl.modules import GRUModule, set_recurrent_mode

pytestmark = pytest.mark.slow

# Workers can't import the tests, so definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_policy() -> Seq:
    torch.manual_seed(0)
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    for parameter in gru.parameters():
        nn.init.normal_(parameter)
    return Seq(gru, Mod(nn.Linear(8, 4), ["features"], ["logits"]), Mod(lambda x: x.argmax(-1), ["logits"], ["action"]))


def repeat_previous() -> EnvBase:
    """Two rows, with the transforms that a recurrent policy needs and one that reads its entry at the root."""
    env = GymEnv("recurl/RepeatPrevious-v0", num_envs=2)
    env = env.append_transform(InitTracker()).append_transform(StepCounter(max_steps=7))
    return env.append_transform(make_policy()[0].make_tensordict_primer())


def serial() -> SerialEnv:
    return SerialEnv(2, repeat_previous)


@pytest.fixture(scope="module")
def parallel():
    with ParallelEnv(2, EnvCreator(repeat_previous)) as env:
        yield env


@pytest.fixture(params=["serial", "parallel"])
def env(request):
    return serial() if request.param == "serial" else request.getfixturevalue("parallel")


def wait_until_gone(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


# -- serial and parallel environments are equivalent


def test_specs(env):
    assert env.batch_size == (2, 2)
    check_env_specs(env)
    check_env_specs(TransformedEnv(env, RewardSum()))
    assert {"observation", "is_init", "step_count", "recurrent_state"} == set(env.observation_spec)


def test_parallel_equals_serial(parallel):
    """Recurrent states of primers inside are carried, partial resets happen, seeds reach the rows."""
    policy, rollouts = make_policy(), []
    for env in (serial(), parallel):
        env.set_seed(3)
        rollouts.append(env.rollout(30, policy, break_when_any_done=False).exclude("collector"))
    assert (rollouts[0] == rollouts[1]).all()
    data = rollouts[1]
    assert data.shape == (2, 2, 30)
    assert data["is_init"].sum() > 4
    assert data["recurrent_state"].abs().sum() > 0
    with set_recurrent_mode(True), torch.no_grad():
        torch.testing.assert_close(policy(data.clone())["features"], data["features"], rtol=1e-5, atol=1e-6)


def test_rows_are_seeded_like_those_of_a_vector_environment(env):
    flat = GymEnv("recurl/RepeatPrevious-v0", num_envs=4)
    assert torch.equal(env.reset(seed=5)["observation"].flatten(0, 1), flat.reset(seed=5)["observation"])
    assert not torch.equal(env.reset(seed=6)["observation"].flatten(0, 1), flat.reset(seed=5)["observation"])


def test_partial_reset_keeps_the_other_rows(env):
    root = env.rollout(3, break_when_any_done=False)[..., -1]["next"].exclude("reward")
    before = root.clone()
    mask = torch.tensor([[False, True], [False, False]])
    for shape in ((2, 2), (2, 2, 1)):
        after = env.reset(root.copy().set("_reset", mask.view(shape)))
        assert torch.equal(after["is_init"].squeeze(-1), mask)
        assert torch.equal(after["step_count"].squeeze(-1), torch.where(mask, 0, 3))
        assert torch.equal(after["observation"][~mask], before["observation"][~mask])
    assert (root == before).all()


def test_full_reset_of_a_root(env):
    root = env.rollout(3, break_when_any_done=False)[..., -1]["next"]
    assert env.reset(root)["is_init"].all()


def test_actions_in_any_encoding(env):
    policy = make_policy()
    results = []
    for encode in (lambda a: a, lambda a: nn.functional.one_hot(a, 4), lambda a: nn.functional.one_hot(a, 4).float()):
        root = policy(env.reset(seed=0))
        results.append(env.step(root.set("action", encode(root["action"])))["next", "reward"])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("shared_interpreter")
def test_one_hot_actions_where_the_spec_holds_integers():
    def create() -> EnvBase:
        return GymEnv("recurl/RepeatPrevious-v0", num_envs=2, categorical_action_encoding=True)

    action = torch.tensor([[2, 3]])
    with ParallelEnv(1, create) as env:
        roots = [env.reset(seed=0).set("action", given) for given in (action, nn.functional.one_hot(action, 4))]
        first, second = (env.step(root)["next", "reward"] for root in roots)
    assert torch.equal(first, second)


def test_state_continues_exactly(env):
    policy = make_policy()
    assert env.can_save_state
    env.reset(seed=1)
    root = env.rollout(4, policy)[..., -1]["next"].exclude("reward")
    state = env.get_state()
    again = pickle.loads(pickle.dumps(state))
    straight = env.rollout(10, policy, auto_reset=False, tensordict=root.clone(), break_when_any_done=False).exclude(
        "collector"
    )
    env.reset(seed=7)
    env.set_state(again)
    resumed = env.rollout(10, policy, auto_reset=False, tensordict=root.clone(), break_when_any_done=False).exclude(
        "collector"
    )
    assert (straight == resumed).all()


def test_results_do_not_share_memory(env):
    first = env.rand_step(env.reset())
    kept = first.clone()
    env.rand_step(env.maybe_reset(env.carry(first)))
    assert (first == kept).all()


def test_wrong_input_leaves_the_workers_alone(parallel):
    root = parallel.rand_action(parallel.reset())
    wrong = root.copy().set("recurrent_state", root["recurrent_state"].double())
    with pytest.raises(ArgumentError, match=r"entry 'recurrent_state' must be torch.float32.*got torch.float64"):
        parallel.step(wrong)
    with pytest.raises(ArgumentError, match=r"action must fit OneHot.*got torch.float32 \[2, 2, 99\]"):
        parallel.step(root.copy().set("action", torch.zeros(2, 2, 99)))
    parallel.step(root)


# -- construction


def test_arguments():
    for kind in (SerialEnv, ParallelEnv):
        with pytest.raises(ArgumentError, match="num_workers must be at least 1, got 0"):
            kind(0, repeat_previous)
        with pytest.raises(ArgumentError, match="got 1 for 2"):
            kind(2, [repeat_previous])
        with pytest.raises(ArgumentTypeError, match="must be a function that creates an environment"):
            kind(1, 3)
    with pytest.raises(ArgumentTypeError, match="must return an environment of recurl"):
        SerialEnv(1, lambda: 3)
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ArgumentError, match="timeout must be positive"):
            ParallelEnv(1, repeat_previous, timeout=timeout)
    with pytest.raises(ArgumentTypeError, match="must be picklable"):
        ParallelEnv(1, functools.partial(repeat_previous, threading.Lock()))
    with pytest.raises(ArgumentTypeError, match="create_env_fn must be callable"):
        EnvCreator(3)


def test_environments_must_be_alike():
    names = ["CartPole-v1", "Pendulum-v1"]
    with pytest.raises(ArgumentError, match="must have equal specs: observation_spec of environment 1"):
        SerialEnv(2, [EnvCreator(GymEnv, {"env_name": name}) for name in names])


def test_creator_is_picklable():
    length = 3
    create = pickle.loads(pickle.dumps(EnvCreator(lambda **kwargs: GymEnv("CartPole-v1", **kwargs), {"num_envs": 2})))
    assert create().batch_size == (2,)
    assert create(num_envs=length).batch_size == (3,)


def test_policy_argument_wires_around():
    env = SerialEnv(2, lambda: GymEnv("recurl/RepeatPrevious-v0"), policy=make_policy())
    assert isinstance(env, TransformedEnv)
    assert env.reset()["recurrent_state"].shape == (2, 1, 8)


def test_state_that_cannot_be_saved():
    env = SerialEnv(2, lambda: GymWrapper(Faulty()))
    assert not env.can_save_state
    with pytest.raises(UnsupportedError, match="can't save"):
        env.get_state()
    env.close()
    assert all(child.is_closed for child in env.envs)


# -- faults


class Faulty(gym.Env):
    """Action 0 takes a step, any other action triggers a fault."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1:
            raise ValueError("the wheel came off")
        if action == 2:
            time.sleep(60)
        if action == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(1, np.float32), 0.0, False, False, {}


FAULTS = {
    1: r"^Worker 0 \(process \d+\) raised ValueError: the wheel came off$",
    2: r"^Worker 0 \(process \d+\) hangs: no answer and no step for 1 s\. .*: --env-timeout, or timeout= in Python\.$",
    3: r"^Worker 0 \(process \d+\) was killed by SIGKILL, possibly by the system because memory ran out\.$",
}


@pytest.mark.parametrize("action", FAULTS)
@pytest.mark.usefixtures("shared_interpreter")
def test_a_fault_is_reported_and_everything_cleaned_up(action, descriptors):
    before = descriptors()
    env = ParallelEnv(1, lambda: GymWrapper(Faulty()), timeout=1.0)
    pids = [worker.process.pid for worker in env._group.workers]
    root = env.step(env.reset().set("action", torch.tensor([0])))
    assert root["next", "reward"].shape == (1, 1)
    if action == 1:
        assert not env.can_save_state
        with pytest.raises(UnsupportedError, match="can't save"):
            env.get_state()
        with pytest.raises(ArgumentError, match="restores only states"):
            env.set_state({})
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=FAULTS[action]) as caught:
        env.step(env.reset().set("action", torch.tensor([action])))
    assert action == 3 or " in step\n" in str(caught.value.__cause__)
    del caught  # its frames keep the environment alive
    assert time.monotonic() - begin < 10
    assert wait_until_gone(pids, 1)
    with pytest.raises(UsageError, match="worker processes were stopped"):
        env.reset()
    env.close()
    del env
    assert descriptors() == before


class Liar(EnvBase):
    """Declares an entry that it does not return."""

    def __init__(self, broken: str) -> None:
        spec = Composite(observation=Unbounded(2), extra=Unbounded(1))
        super().__init__(observation_spec=spec, action_spec=Categorical(2))
        self.broken = broken

    def _reset(self, tensordict):
        entries = {"observation": torch.zeros(2), "extra": torch.zeros(1)}
        if self.broken == "missing":
            del entries["extra"]
        return TensorDict({**entries, **({"extra": torch.zeros(3)} if self.broken == "shape" else {})}, [])

    def _step(self, tensordict):
        raise AssertionError

    def _set_seed(self, seed):
        pass


@pytest.mark.usefixtures("shared_interpreter")
def test_errors_of_recurl_keep_their_type_and_name_the_worker():
    """If the second of two workers fails, the first one is stopped too."""
    env = ParallelEnv(2, [lambda: Liar("nothing"), lambda: Liar("missing")])
    pids = [worker.process.pid for worker in env._group.workers]
    with pytest.raises(
        MissingKeyError, match=r"^Worker 1 .* raised MissingKeyError: The environment declares .* 'extra'"
    ):
        env.reset()
    assert wait_until_gone(pids, 1)


def test_a_shape_that_was_not_declared():
    env = Liar("shape")
    memory = SharedTensors(layout(EnvInfo.of(env), 1).fresh)
    server = Server(env, {}, {}, {key: tensor[0] for key, tensor in memory.tensors.items()})
    with pytest.raises(UsageError, match=r"'extra' as torch.float32 \[1\], but returned torch.float32 \[3\]"):
        server.run(Plan(0, "reset", (), None))


@pytest.mark.usefixtures("shared_interpreter")
def test_a_failure_at_the_start(descriptors):
    before = descriptors()
    with pytest.raises(ArgumentTypeError, match=r"^Worker 0 .* must return an environment of recurl, got 3"):
        ParallelEnv(1, lambda: 3)
    assert descriptors() == before


ORPHANS = """
import os, time
import gymnasium as gym, numpy as np, torch
from recurl.envs import GymWrapper, ParallelEnv

class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        os.write(1, f"{os.getpid()}\\n".encode())  # in a single write, as two workers write
        return np.zeros(1, np.float32), {}
    def step(self, action):
        time.sleep(60 * action)
        return np.zeros(1, np.float32), 0.0, False, False, {}

env = ParallelEnv(2, lambda: GymWrapper(Env()), timeout=None)
env.step(env.reset().set("action", torch.tensor([0, 1])))  # one worker is idle, the other hangs
"""


def test_no_orphan_when_the_parent_is_killed(tmp_path, programs):
    """Also tests a script without a guard around its main code."""
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    with programs.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    assert len(set(pids)) == 2
    assert wait_until_gone(pids, 10)


def test_a_hundred_starts_and_stops_leak_nothing(descriptors):
    server = WorkerServer()
    SharedTensors([Entry("x", (2,), torch.float32)]).close()
    before = descriptors()
    workers = []
    for index in range(100):
        server.acquire([])
        worker = Worker(index, server)
        workers.append(server.pid)
        worker.stop(0)
        server.release()
        SharedTensors([Entry("x", (2,), torch.float32)]).close()
    assert descriptors() <= before
    assert wait_until_gone(workers, 1)


def test_dropping_the_environment_stops_the_workers(descriptors):
    before = descriptors()
    env = ParallelEnv(1, lambda: GymEnv("CartPole-v1"))
    pids = [worker.process.pid for worker in env._group.workers]
    env.rand_step()
    del env
    gc.collect()
    assert wait_until_gone(pids, 1)
    assert descriptors() == before


@pytest.mark.usefixtures("shared_interpreter")
def test_rows_of_workers_in_one_dimension():
    """They equal those of a batch of workers, flattened, and those of one environment with the same number of rows."""

    def create():
        return GymEnv("CartPole-v1", num_envs=2)

    actions = torch.nn.functional.one_hot(torch.randint(2, (40, 4)), 2)
    with ParallelEnv(2, create, concatenate=True) as env, GymEnv("CartPole-v1", num_envs=4) as plain:
        assert env.batch_size == (4,)
        assert env.observation_spec == plain.observation_spec
        assert (env.reward_spec, env.done_spec, env.action_spec) == (
            plain.reward_spec,
            plain.done_spec,
            plain.action_spec,
        )
        check_env_specs(env)
        roots = [each.reset(seed=3) for each in (env, plain)]
        for action in actions:
            steps = [each.step(root.set("action", action)) for each, root in zip((env, plain), roots, strict=True)]
            assert (steps[0] == steps[1]).all()
            roots = [each.maybe_reset(each.carry(td)) for each, td in zip((env, plain), steps, strict=True)]


def test_bounds_of_flattened_specs():
    spec = Bounded(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor(9.0), (2, 2))
    assert spec.flatten(2).low.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert spec.expand(3, 2, 2).flatten(2).low.tolist() == [[0.0, 1.0], [2.0, 3.0]] * 3
    assert Composite({"a": spec}, shape=[2, 2]).flatten(2)["a"].shape == (4,)


@pytest.mark.usefixtures("shared_interpreter")
def test_actions_of_several_numbers_and_rows_reach_their_rows():
    def make() -> EnvBase:
        return GymEnv("Pendulum-v1", num_envs=3, wrappers=[ThreeTorques])

    with ParallelEnv(2, make, concatenate=True) as parallel:
        for dtype in (torch.float32, torch.float64):
            actions = torch.linspace(-1, 1, 18, dtype=dtype).view(2, 3, 3)
            rewards = []
            for env in (parallel, SerialEnv(2, make)):
                env.set_seed(0)
                action = actions.view(*env.batch_size, 3)
                rewards.append(env.step(env.reset().set("action", action))["next", "reward"].flatten())
            assert torch.equal(*rewards)


class ThreeTorques(gym.ActionWrapper):
    """Pendulum whose torque is the sum of three numbers."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def action(self, action):
        return action.sum(keepdims=True)
