"""Playing episodes of a trained policy on screen or to a video."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import torch

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.seeding import derive_seed, env_seed
from recurl.core.untrusted import check_regular
from recurl.envs import EnvBase, MultiAgentEnv
from recurl.trainers.algorithms.environment import gym_of, make_env, with_spaces
from recurl.trainers.config import RunConfig
from recurl.trainers.env_name import EnvSource
from recurl.trainers.files.durable import replacing
from recurl.trainers.report.evaluation_display import EvaluationDisplay
from recurl.trainers.run.evaluate import Evaluation, check_bounds, evaluate_policy
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.load import load_agent

if TYPE_CHECKING:
    from rich.console import Console

_SUFFIX = ".mp4"
_SEVERAL = "environments of several agents aren't rendered"
_OWN_LOOP = "step one of your own with the policy recurl.load(run), and render it there"


def play_run(
    folder: RunFolder,
    *,
    episodes: int = 1,
    video: Path | None = None,
    seed: int | None = None,
    max_steps: int | None = None,
    console: Console | None = None,
    checkpoint: str = "newest",
    deterministic: bool = True,
    env: EnvSource | None = None,
) -> tuple[Evaluation, list[Path]]:
    """Play episodes one after another, recorded to a video or else shown on screen if there is one.

    Args:
        folder: the run folder.
        episodes: number of episodes.
        video: the ``.mp4`` file. Several episodes are written to separate files with the episode number appended to the
            name.
        seed: seed of the environment and of sampled actions; by default one that training did not use.
        max_steps: episodes are cut off after this many steps; by default the run's ``eval_max_steps``.
        console: where to show progress if playing takes seconds.
        checkpoint: ``"newest"``, or ``"best"``, the checkpoint kept by ``recurl train --keep-best``.
        deterministic: take greedy actions; otherwise act as in training.
        env: see :func:`load_agent`.

    Returns:
        Returns and lengths of the episodes, and the video files.

    Raises:
        ArgumentError: the run or its environment can't be used, the environment can't render frames for a video, or the
            video file can't be written.
        MissingDependencyError: the video or the environment's window needs a package that is not installed.
        NonFiniteError: the policy, a reward or an observation isn't finite.
    """
    check_bounds(episodes, 1 if max_steps is None else max_steps)
    if video is not None:
        _check_video(video)
    config, agent = load_agent(folder, on_cpu=True, env=env, checkpoint=checkpoint)
    policy = agent.actor if deterministic else agent.policy
    seed = env_seed(config.seed, "fresh") if seed is None else seed
    with (
        TemporaryDirectory(dir=None if video is None else video.parent) as place,
        torch.random.fork_rng(devices=[]),
        closing(EvaluationDisplay(console, episodes)) as display,
    ):
        torch.manual_seed(derive_seed(seed, "actions"))
        with _render_env(
            config, policy, record=video is not None, place=Path(place) / "video", notify=folder.notify
        ) as env:
            env.set_seed(seed)
            try:
                found = evaluate_policy(
                    policy,
                    env,
                    episodes=episodes,
                    max_steps=config.eval_max_steps if max_steps is None else max_steps,
                    progress=display.update,
                    deterministic=deterministic,
                )
            except gym.error.DependencyNotInstalled as error:
                raise MissingDependencyError(f"--env {config.env_name} can't be shown: {error}") from error
        return found, [] if video is None else _move_recordings(Path(place) / "video", video)


def _render_env(config: RunConfig, policy: Any, *, record: bool, place: Path, notify: Callable[[str], None]) -> EnvBase:
    """Return a single environment that renders on screen, or records into the folder ``place``."""
    with make_env(config, None) as plain:
        inner, several = gym_of(plain), isinstance(with_spaces(plain), MultiAgentEnv)
        modes: list[str] = [] if inner is None else (inner.gym_env.metadata or {}).get("render_modes", [])
    if not record:
        shows = "human" in modes and _has_display()
        if not shows:
            why = "there is no display" if "human" in modes else f"{config.env_name} has no window"
            how = f"{_SEVERAL}: {_OWN_LOOP}." if several else f"{why}: use --video FILE{_SUFFIX} to record."
            notify(f"Nothing is shown because {how}")
        return make_env(config, None, policy=policy, render_mode="human" if shows else None)
    if several:
        raise ArgumentError(f"--video can't record {config.env_name}, because {_SEVERAL}: {_OWN_LOOP}.")
    if "rgb_array" not in modes:
        raise ArgumentError(
            f"--video needs an environment with the render mode rgb_array, but {config.env_name} has "
            f"{', '.join(map(str, modes)) or 'none'}: leave it out."
        )
    env = make_env(config, None, policy=policy, render_mode="rgb_array")
    recorder = gym_of(env)
    assert recorder is not None
    recorder.wrap_gym(lambda inner: gym.wrappers.RecordVideo(inner, str(place), episode_trigger=lambda _: True))
    return env


def _has_display() -> bool:
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _check_video(video: Path) -> None:
    if video.suffix != _SUFFIX:
        raise ArgumentError(f"--video must end with {_SUFFIX}, got {video}.")
    if not video.parent.is_dir():
        raise ArgumentError(f"There is no folder {video.parent}: create it, or name another file with --video.")
    try:
        check_regular(video)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ArgumentError(f"--video can't be {video} ({error.strerror}): name another file.") from error
    if importlib.util.find_spec("moviepy") is None:
        raise MissingDependencyError("moviepy is not installed: pip install 'recurl[train]'")


def _move_recordings(place: Path, video: Path) -> list[Path]:
    """Move the recordings, one per episode, to the requested files."""
    found = sorted(place.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem.rpartition("-")[2]))
    names = [video] if len(found) == 1 else [video.with_stem(f"{video.stem}-{i + 1}") for i in range(len(found))]
    for path, name in zip(found, names, strict=True):
        with path.open("rb") as recorded, replacing(name) as file:
            shutil.copyfileobj(recorded, file)
    return names
