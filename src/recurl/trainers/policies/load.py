"""Policies loaded from runs and exported files."""

from __future__ import annotations

import os
from pathlib import Path

from recurl.envs import ActionReader, ObservationReader
from recurl.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.keys import ACTION_MASK, dotted
from recurl.nearest import nearest
from recurl.trainers.algorithms.environment import make_env, with_spaces
from recurl.trainers.env_name import EnvSource
from recurl.trainers.export.checksum import check_export
from recurl.trainers.export.formats import FORMATS
from recurl.trainers.policies.converter import Converter
from recurl.trainers.policies.policy import Policy
from recurl.trainers.policies.steps import AgentStep, FileStep
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.load import load_agent

_SUFFIXES = {kind.suffix: kind for kind in FORMATS.values()}


def load(
    source: str | os.PathLike[str] | RunFolder,
    checkpoint: str = "newest",
    *,
    env: EnvSource | None = None,
    trust: bool = False,
) -> Policy:
    """Load a trained policy, to act with on the CPU.

    Args:
        source: folder of a run, or a file that ``recurl export`` wrote.
        checkpoint: ``"newest"``, or ``"best"``, the one that ``recurl train --keep-best`` kept.
        env: the environment of a run that was given one in Python; see :meth:`RunFolder.read_config`.
        trust: import what the folder names, see :class:`RunFolder`, which has it itself.

    Returns:
        The policy; see :meth:`Policy.predict`.

    Raises:
        ArgumentError: there is no run or file, it is damaged, has no such checkpoint, or names code and isn't trusted.
        ArgumentTypeError: ``source`` is neither a path nor a :class:`RunFolder`.
        MissingDependencyError: a package is missing that the environment or the file needs.
        UnsupportedError: the environment of the run isn't gymnasium's.
    """
    if isinstance(source, RunFolder):
        return _of_run(source, checkpoint, env)
    if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
        raise ArgumentTypeError(
            f"load takes the folder of a run, a RunFolder or an exported file, got {type(source).__name__}."
        )
    path = Path(source)
    if path.is_dir():
        return _of_run(RunFolder(path, trust=trust), checkpoint, env)
    if path.suffix in _SUFFIXES:
        return _of_file(path, checkpoint)
    if path.exists():
        raise ArgumentError(f"load takes the folder of a run, or a file that ends with {_endings()}, got {path}.")
    siblings = [str(other) for other in path.parent.glob("*")]
    raise ArgumentError(
        f"There is no run {path}: name the folder that recurl train wrote, or a file that recurl export wrote "
        f"({_endings()}).{nearest(str(path), siblings)}"
    )


def _endings() -> str:
    return " or ".join(_SUFFIXES)


def _of_run(folder: RunFolder, checkpoint: str, env: EnvSource | None) -> Policy:
    config, agent = load_agent(folder, on_cpu=True, env=env, checkpoint=checkpoint)
    with make_env(config, 1, policy=agent.actor) as envs:
        step = AgentStep(agent.eval().requires_grad_(False), envs)
        inner = with_spaces(envs)
    if inner is None:
        raise UnsupportedError(
            f"A policy is loaded for environments of gymnasium, but {config.env_name} is another: use load_agent."
        )
    return Policy(step, Converter(*inner.readers, inner.mask_path or (ACTION_MASK,)), f"the policy in {folder.path}")


def _of_file(path: Path, checkpoint: str) -> Policy:
    if checkpoint != "newest":
        raise ArgumentError(
            f"An exported file holds one policy, so checkpoint must be left out, got {checkpoint!r}: export the run "
            f"again with --checkpoint {checkpoint}."
        )
    about = check_export(path)
    if "observations" not in about:
        raise ArgumentError(
            f"{path} was exported without its spaces, by an earlier version or of an environment that isn't "
            "gymnasium's: export the run again, or call its function."
        )
    observations = ObservationReader.from_json(about["observations"], (), path)
    actions = ActionReader.from_json(about["actions"], ())
    keys = {dotted(key): key for key in observations.spec.keys(True, True)}
    step = FileStep(FORMATS[about["format"]].read(path), about, keys)
    return Policy(step, Converter(observations, actions, tuple(about["action_mask"])), f"the policy in {path}")
