from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from imageio_ffmpeg import count_frames_and_secs

from recurl.cli import main
from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.trainers import PPOConfig, RunFolder, evaluate_run, play_run
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = trained(tmp_path_factory.mktemp("run"), PPOConfig, "recurl/MaskedCartPole-v1", {"cell": "gru"})
    return RunFolder(folder.path, notify=lambda _: None)


class Blind(gym.Env):
    """Environment that can't be rendered, or only in a window that needs a package."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["human"]}  # noqa: RUF012 - as declared by gymnasium

    def __init__(self, render_mode=None, modes=("human",)):
        self.metadata = {"render_modes": list(modes)}
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.render_mode == "human":
            raise gym.error.DependencyNotInstalled("pygame is not installed")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, bool(self.np_random.random() < 0.2), False, {}


gym.register("recurl-test/Blind-v0", entry_point=Blind)


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("blind"), PPOConfig, "recurl-test/Blind-v0", {"cell": "none"})


def frames(path):
    return count_frames_and_secs(str(path))[0]


def test_a_video_of_each_episode(run, tmp_path, capsys):
    video = tmp_path / "out.mp4"
    assert main(["play", str(run.path), "--video", str(video), "--episodes", "2", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-1.mp4", "out-2.mp4"]
    found, _ = play_run(run, episodes=2, seed=3)
    for number, length in enumerate(found.lengths):
        path = video.with_stem(f"out-{number + 1}")
        assert lines[number] == f"Episode {number + 1}: return {found.returns[number]:g}, length {length}, {path}"
        assert abs(frames(path) - (length + 1)) <= 1  # the first observation is rendered too
    assert found.returns[0] == evaluate_run(run, episodes=1, seed=3).returns[0]


def test_one_video_has_the_name_that_was_given(run, tmp_path):
    video = tmp_path / "out.mp4"
    video.write_text("an older one")
    found, files = play_run(run, video=video, max_steps=5)
    assert files == [video]
    assert list(tmp_path.iterdir()) == [video]
    assert (found.lengths, found.cut) == ([5], 1)
    assert abs(frames(video) - 6) <= 1


@pytest.mark.usefixtures("_no_display")
def test_without_a_display_returns_are_printed(run, capsys):
    assert main(["play", str(run.path), "--episodes", "2", "--stochastic", "--max-steps", "7"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Episode 1: return 7, length 7\nEpisode 2: return 7, length 7\n2 of 2 episodes were cut")
    assert said.err == "Notice: Nothing is shown because there is no display: use --video FILE.mp4 to record.\n"


@pytest.fixture
def _no_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def test_a_window_that_needs_a_package(blind, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    with pytest.raises(
        MissingDependencyError, match=r"--env recurl-test/Blind-v0 needs a package that is missing: pygame is not inst"
    ):
        play_run(blind)


def test_drawn_actions_follow_the_seed(run):
    first, again, other = (play_run(run, seed=seed, deterministic=False)[0] for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert not first.deterministic


def test_mistakes(run, blind, tmp_path, monkeypatch):
    def refused(match, folder=run, error=ArgumentError, **options):
        with pytest.raises(error, match=match):
            play_run(folder, **options)

    refused(r"--video must end with \.mp4, got out\.gif", video=Path("out.gif"))
    refused("There is no folder .*nowhere: create it, or name another file", video=tmp_path / "nowhere" / "out.mp4")
    refused("--episodes must be positive, got 0", episodes=0)
    refused(
        "--video needs an environment with the render mode rgb_array, but .*Blind-v0 has human",
        blind,
        video=tmp_path / "out.mp4",
    )
    refused("has no best checkpoint", checkpoint="best")
    refused("holds no run", RunFolder(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(
        r"moviepy is not installed: pip install 'recurl\[train\]'",
        error=MissingDependencyError,
        video=tmp_path / "out.mp4",
    )
