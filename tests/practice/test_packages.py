"""Environments of other packages by their ids: trained, evaluated, loaded, and played in a Gymnasium loop.

Each runs where its package is installed; ``make practice`` installs them all.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gymnasium as gym
import pytest

import recurl
from recurl.cli import main
from recurl.envs import PettingZooEnv
from recurl.envs.gym_wrappers import SelectEntries
from tests.trainers.resumes import assert_resumes_bit_for_bit, small, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

IDS = {
    "ale-py": [["ale_py:ALE/Pong-v5"], ["ale_py:ALE/Breakout-v5", "--env-kwargs", "obs_type=ram"]],
    "minigrid": [["minigrid:MiniGrid-MemoryS7-v0", "--drop-observations", "mission"]],
    "popgym": [
        ["popgym:popgym-RepeatPreviousEasy-v0", "--previous-action", "--previous-reward"],
        ["popgym:popgym-AutoencodeEasy-v0"],
        ["popgym:popgym-BattleshipEasy-v0"],
        ["popgym:popgym-PositionOnlyPendulumEasy-v0"],
    ],
    "mujoco": [["HalfCheetah-v5", "--wrapper", "recurl.envs.gym_wrappers:SelectEntries(start=0, stop=8)"]],
    "box2d": [["LunarLander-v3"], ["BipedalWalker-v3"]],
}
SMALL = (  # noqa: SIM905 - reads as it is typed
    "--num-envs 2 --rollout-steps 16 --sequence-length 8 --total-steps 64 --minibatches 2 --epochs 1 --hidden-size 8 "
    "--eval-episodes 1 --eval-max-steps 10 --logger none"
).split()


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


INSTALLED = [
    pytest.param(options, marks=[pytest.mark.full] * ("obs_type=ram" in options))  # which is also resumed
    for package, found in IDS.items()
    if is_installed(package)
    for options in found
]


def test_the_packages_of_the_dev_extra_are_installed() -> None:
    assert all(map(is_installed, ("ale-py", "minigrid", "popgym")))


@pytest.mark.filterwarnings("ignore")  # of these packages
@pytest.mark.parametrize("options", INSTALLED, ids=lambda options: options[0])
def test_trains_and_acts(options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["train", "ppo", "--env", *options, *SMALL, "--run-dir", str(folder)]) == 0
    assert main(["evaluate", str(folder), "--episodes", "1", "--max-steps", "5", "--stochastic"]) == 0
    name, *rest = options
    settings = {"obs_type": "ram"} if "obs_type=ram" in rest else {}
    policy = recurl.load(folder)
    env = gym.make(name, **settings)
    env = SelectEntries(env, 0, 8) if "--wrapper" in rest else env
    observation, _ = env.reset(seed=0)
    state, reward = None, 0.0
    for _ in range(5):
        action, state = policy.predict(observation, state, reward=reward)
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            observation, _ = env.reset()
            state = None
    env.close()


GAMES = {
    "pygame-ce": ["butterfly/knights_archers_zombies_v11"],
    "box2d": ["sisl/multiwalker_v9"],
    "mpe2": ["mpe2.simple_spread_v3:parallel_env"],
}


@pytest.mark.filterwarnings("ignore")  # of these packages
@pytest.mark.parametrize("name", [name for package, found in GAMES.items() if is_installed(package) for name in found])
def test_games_of_pettingzoo_train_and_act(name: str, tmp_path: Path) -> None:
    small = "--num-envs 12 --rollout-steps 16 --total-steps 192 --hidden-size 8 --eval-episodes 3 --eval-max-steps 10"
    words = [*small.split(), "--logger", "none", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "ppo", "--env", f"pettingzoo/{name}", *words]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "3", "--max-steps", "5"]) == 0
    policy = recurl.load(tmp_path / "run")
    game = PettingZooEnv(name).envs[0]
    seen, _ = game.reset(seed=0)
    states = dict.fromkeys(game.agents)
    for _ in range(5):
        actions = {}
        for agent in game.agents:
            actions[agent], states[agent] = policy.predict(seen[agent], states[agent])
            assert game.action_space(agent).contains(actions[agent])
        seen, *_ = game.step(actions)
    game.close()


RESUMED = {
    "ale-py": [{"env": "ale_py:ALE/Breakout-v5", "env_kwargs": ("obs_type=ram",)}],
    "mujoco": [
        {"env": f"{name}-v5"}
        for name in (
            *("Ant", "HalfCheetah", "Hopper", "Humanoid", "InvertedDoublePendulum"),
            *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
        )
    ],
    "minigrid": [
        {"env": f"minigrid:{name}-v0", "drop_observations": ("mission",)}
        for name in ("MiniGrid-MemoryS7", "MiniGrid-KeyCorridorS3R1", "BabyAI-GoToObjS4")
    ],
    "popgym": [{"env": f"popgym:popgym-{name}Easy-v0"} for name in ("CountRecall", "Battleship", "Concentration")],
}


@pytest.mark.filterwarnings("ignore")  # of these packages
@pytest.mark.parametrize(
    "options",
    [
        # The MiniGrid environments of tests/trainers/run/test_resumed_envs.py are resumed by `make test`.
        pytest.param(options, marks=[pytest.mark.full] * options["env"].startswith("minigrid:MiniGrid"))
        for package, found in RESUMED.items()
        if is_installed(package)
        for options in found
    ],
    ids=lambda options: options["env"],
)
def test_a_resumed_run_is_the_run_that_was_left_alone(options: dict[str, object], tmp_path: Path) -> None:
    assert_resumes_bit_for_bit(small(**options), tmp_path)


BOX2D = ["LunarLander-v3", "BipedalWalker-v3"] if is_installed("box2d") else []


@pytest.mark.filterwarnings("ignore")  # of these packages
@pytest.mark.parametrize("name", BOX2D)
def test_box2d_worlds_are_not_saved_with_a_notice(name: str, tmp_path: Path) -> None:
    config = small(env=name)
    train(config, tmp_path, stop_after=2)
    assert "isn't restored: b2World.this is of type SwigPyObject" in train(config, tmp_path, resume=True)
