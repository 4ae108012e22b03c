from dataclasses import replace

import gymnasium as gym
import pytest
import torch

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UnsupportedError
from recurl.envs import GymEnv, ParallelEnv, TensorEnv
from recurl.envs.tasks import RepeatPrevious, TMaze
from recurl.trainers import PPO, DQNConfig, PPOConfig, make_env
from recurl.trainers.algorithms.environment import _checked, _dynamics_on_device, training_env

MODES = ("auto", "native", "sync")


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig])
def test_rows_device_and_arguments(kind):
    env = make_env(kind(env="recurl/RepeatPrevious-v0", env_kwargs=("num_symbols=3",)), 5)
    assert env.batch_size == (5,)
    assert env.action_spec_unbatched.n == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "NoSuchEnv-v0"}, "--env NoSuchEnv-v0 .*can't be used: .*NoSuchEnv"),
        ({"env": "no-such-module:Env-v0"}, "--env no-such-module:Env-v0 .*no-such-module"),
        ({"env": "Zzqxw-v0"}, "Zzqxw.* doesn't exist.* as module:id, such as ale_py:ALE/Pong-v5"),
        ({"env": "CartPoel-v1"}, r"Did you mean: `CartPole`\?$"),
        ({"env": "RockSample-v0"}, r"`RockSample` doesn't exist\. Did you mean recurl/RockSample-v0\?$"),
        (
            {"env": "no_such:Env-v0"},
            "there is no module 'no_such': install the package that provides the module 'no_such', or name a file",
        ),
        ({"env": "pkg:pkg:Maze-v0"}, "is an id or module:id, got 'pkg:pkg:Maze-v0': write 'pkg:Maze-v0'"),
        ({"env": "no_such.envs:a:Maze-v0"}, "write 'a:Maze-v0'"),
        ({"env_kwargs": ("colour=1",)}, r"does not take --env-kwargs .*colour"),
        ({"env_kwargs": ("k=0",)}, "k must be"),
    ],
)
def test_environments_that_cannot_be_made(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_env(PPOConfig(**{"env": "recurl/RepeatPrevious-v0", **options}), 2)


class Written(gym.Env):
    observation_space = gym.spaces.Text(5)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return "text", {}


def test_spaces_that_cannot_be_used():
    with pytest.raises(UnsupportedError, match=r"--env .*Written\(\) can't be used: .*Text"):
        make_env(PPOConfig(env=Written), 1)


def test_a_package_that_an_environment_needs_is_named():
    gym.register("recurl-test/Lacking-v0", "no_such_package.envs:Thing")
    with pytest.raises(MissingDependencyError, match=r"needs the module 'no_such_package', .* the package that prov"):
        make_env(PPOConfig(env="recurl-test/Lacking-v0"), 1)
    del gym.registry["recurl-test/Lacking-v0"]


def cartpole():
    return gym.make("CartPole-v1")


@pytest.mark.parametrize(
    "source", [cartpole, lambda: GymEnv("CartPole-v1"), lambda num_envs: GymEnv("CartPole-v1", num_envs)]
)
def test_functions_create_the_requested_number_of_rows(source):
    assert make_env(PPOConfig(env=source), 3).batch_size == (3,)
    assert training_env(PPOConfig(env=source, num_envs=5)).batch_size == (5,)


def test_an_object_is_used_for_training_and_never_recreated():
    env = GymEnv("CartPole-v1", 2)
    config = PPOConfig(env=env, num_envs=2, minibatches=2)
    assert training_env(config) is env
    with pytest.raises(ArgumentError, match=r"new environment is needed here, .*GymEnv\(\) was passed as an object"):
        make_env(config, 2)
    with pytest.raises(ArgumentError, match=r"\[num_envs\], \[4\], got \[2\]: set --num-envs to 2, or pass a function"):
        training_env(PPOConfig(env=env, num_envs=4))
    with pytest.raises(ArgumentError, match=r"GymEnv\(\) is closed: pass a new one"):
        training_env(config)


def test_objects_are_used_unchanged():
    env = GymEnv("CartPole-v1", 8)
    for options in (
        {"env_workers": 2},
        {"wrapper": ("a:B",)},
        {"env_kwargs": ("k=1",)},
        {"vectorization": "sync"},
        {"drop_observations": ("a",)},
        {"action_mask": "legal"},
    ):
        with pytest.raises(ArgumentError, match="passed as an object is used as is"):
            PPOConfig(env=env, **options)
    with pytest.raises(ArgumentError, match="--overlap creates the environment in a second process: pass a function"):
        PPOConfig(env=env, overlap=True)
    with pytest.raises(ArgumentTypeError, match="pass a function that creates one, env=lambda"):
        PPOConfig(env=cartpole())  # type: ignore[arg-type] # rejected
    with pytest.raises(ArgumentError, match="must be on --device cuda, but it is on cpu"):
        _checked(replace(PPOConfig(env=env), device="cuda"), env)


def test_a_name_alone_needs_the_function_again():
    config = PPOConfig.from_dict(PPOConfig(env=cartpole).to_dict())
    assert config.env == f"{__name__}.cartpole()"
    with pytest.raises(ArgumentError, match=r"passed in Python, as .*\.cartpole\(\): pass the function again, as in"):
        make_env(config, 1)
    again = config.with_env(lambda: cartpole())
    assert again == config
    assert make_env(again, 2).batch_size == (2,)
    assert make_env(config.with_env("Acrobot-v1"), 1).batch_size == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 8, "env_workers": 3}, "--env-workers must divide --num-envs, got 3 and 8: use 1, 2, 4, 8"),
        (
            {"vectorization": "sinc"},
            r"--vectorization must be one of auto, native, sync, async, .* Did you mean sync\?",
        ),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ArgumentError, match=message):
        PPOConfig(env="CartPole-v1", **options)


def test_ways_to_step_together():
    tasks = {mode: make_env(PPOConfig(env="recurl/TMaze-v0", vectorization=mode), 2) for mode in MODES}
    kinds = {mode: type(env.gym_env).__name__ for mode, env in tasks.items() if isinstance(env, GymEnv)}
    assert kinds == {"auto": "TMazeVectorEnv", "native": "TMazeVectorEnv", "sync": "SyncVectorEnv"}
    wrapper = ("gymnasium.wrappers:TimeLimit(max_episode_steps=3)",)
    wrapped = make_env(PPOConfig(env="recurl/TMaze-v0", wrapper=wrapper), 2)
    assert wrapped.rollout(9).shape == (2, 3)
    with pytest.raises(ArgumentError, match=r"--env recurl/TMaze-v0 can't be used: Wrappers need single"):
        make_env(PPOConfig(env="recurl/TMaze-v0", wrapper=wrapper, vectorization="native"), 2)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_workers_collect_the_same_as_one_process():
    options = {"env": "recurl/TMaze-v0", "num_envs": 4, "previous_action": True, "previous_reward": True}
    batches, weights = [], None
    for workers in (0, 2):
        config = PPOConfig(**options, env_workers=workers, rollout_steps=16, sequence_length=16)
        learner = PPO(config)
        weights = weights or learner.agent.state_dict()
        learner.agent.load_state_dict(weights)
        torch.manual_seed(1)  # creating the workers has drawn their seeds
        batches.append([learner.collect(), learner.collect()])
        assert learner.state_obstacle is None
        learner.close()
    for alone, shared in zip(*batches, strict=True):
        for key in ("observation", "action", "previous_action", "previous_reward", ("next", "reward")):
            assert torch.equal(alone[key], shared[key]), key


def test_tasks_are_stepped_on_the_device():
    env = make_env(PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=2",), vectorization="device"), 3)
    assert isinstance(env, TensorEnv)
    assert (env.batch_size, env.dynamics.k) == ((3,), 2)
    assert isinstance(make_env(PPOConfig(env=TMaze, vectorization="device"), 3), TensorEnv)
    for mode in ("auto", "native"):
        assert type(make_env(PPOConfig(env=TMaze, vectorization=mode), 3).gym_env).__name__ == "TaskVectorEnv"


@pytest.mark.parametrize(
    ("options", "on_device"),
    [
        ({}, True),
        ({"vectorization": "native"}, False),
        ({"vectorization": "sync"}, False),
        ({"wrapper": ("gymnasium.wrappers:TimeLimit(max_episode_steps=3)",)}, False),
        ({"env_workers": 2}, False),
        ({"drop_observations": ("a",)}, True),
        ({"action_mask": "legal"}, False),
        ({"action_mask": "none"}, True),
        ({"env": "CartPole-v1"}, False),
        ({"device": "cpu"}, False),
        ({"device": "cpu", "vectorization": "device"}, True),
    ],
)
def test_which_tasks_are_stepped_on_the_device(options, on_device):
    config = replace(PPOConfig(env="recurl/RepeatPrevious-v0"), **{"device": "cuda", **options})
    assert isinstance(_dynamics_on_device(config), RepeatPrevious) == on_device


def test_only_tasks_can_be_stepped_on_the_device():
    with pytest.raises(ArgumentError, match=r"needs a task written as Dynamics, and CartPole-v1 is not one"):
        make_env(PPOConfig(env="CartPole-v1", vectorization="device"), 2)
    with pytest.raises(ArgumentError, match=r"does not take --env-kwargs colour=1"):
        make_env(PPOConfig(env="recurl/TMaze-v0", env_kwargs=("colour=1",), vectorization="device"), 2)
    with pytest.raises(ArgumentError, match="k must be"):
        make_env(PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=0",), vectorization="device"), 2)
    with pytest.raises(ArgumentError, match=r"device needs Dynamics\. This function creates single environments"):
        make_env(PPOConfig(env=cartpole, vectorization="device"), 2)
    for flag, options in (
        ("--env-workers", {"env_workers": 2}),
        ("--wrapper", {"wrapper": ("a:B",)}),
        ("--action-mask", {"action_mask": "legal"}),
    ):
        with pytest.raises(
            ArgumentError, match=f"--vectorization device steps a task as tensors and doesn't support {flag}: leave it"
        ):
            PPOConfig(env="recurl/TMaze-v0", vectorization="device", **options)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_async_environments_are_those_of_one_process_in_workers():
    config = PPOConfig(env="CartPole-v1")
    with make_env(replace(config, vectorization="async"), 3) as env, make_env(config, 3) as same:
        assert type(env) is ParallelEnv
        for each in (env, same):
            each.set_seed(5)
        torch.manual_seed(0)
        found = env.rollout(40, break_when_any_done=False)
        torch.manual_seed(0)
        wanted = same.rollout(40, break_when_any_done=False)
    assert found.batch_size == (3, 40)
    assert wanted["next", "done"].any()
    assert all((found[key] == wanted[key]).all() for key in ("observation", "action", ("next", "done")))


def test_a_single_environment_needs_no_process():
    config = PPOConfig(env="CartPole-v1", vectorization="async")
    for count in (1, None):
        with make_env(config, count) as env:
            assert type(env) is GymEnv


@pytest.mark.usefixtures("shared_interpreter")
def test_async_environments_that_cannot_be_made():
    config = PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=0",), vectorization="async")
    with pytest.raises(ArgumentError, match=r"^--env recurl/RepeatPrevious-v0 k=0 can't be used: k must be"):
        make_env(config, 2)
