"""Loading of policies from runs and exported files."""

from __future__ import annotations

import os
from pathlib import Path

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.keys import ACTION_MASK, dotted
from recurl.core.messages import nearest
from recurl.envs import ActionReader, ObservationReader
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
    """Load a trained policy for inference on the CPU.

    Args:
        source: run folder, or a file written by ``recurl export`` or :func:`recurl.export_policy`.
        checkpoint: ``"newest"``, or ``"best"``, the checkpoint kept by ``recurl train --keep-best``.
        env: the environment of a run whose environment was passed in Python; see :meth:`RunFolder.read_config`.
        trust: import the code that the folder names; see :class:`RunFolder`, whose own setting applies if one is given.

    Returns:
        The policy; see :meth:`Policy.predict`.

    Raises:
        ArgumentError: the run or file doesn't exist, is damaged, has no such checkpoint, or names code and isn't
            trusted.
        ArgumentTypeError: ``source`` is neither a path nor a :class:`RunFolder`.
        MissingDependencyError: the environment or the file needs a package that is not installed.
        UnsupportedError: the environment of the run is not a Gymnasium environment.
    """
    if isinstance(source, RunFolder):
        return _load_from_run(source, checkpoint, env)
    if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
        raise ArgumentTypeError(
            f"load takes a run folder, a RunFolder or an exported file, got {type(source).__name__}."
        )
    path = Path(source)
    if path.is_dir():
        return _load_from_run(RunFolder(path, trust=trust), checkpoint, env)
    if path.suffix in _SUFFIXES:
        return _load_from_file(path, checkpoint)
    if path.exists():
        raise ArgumentError(f"load takes a run folder, or a file that ends with {_endings()}, got {path}.")
    siblings = [str(other) for other in path.parent.glob("*")]
    raise ArgumentError(
        f"There is no run {path}: name the folder that recurl train wrote, or a file that recurl export wrote "
        f"({_endings()}).{nearest(str(path), siblings)}"
    )


def _endings() -> str:
    return " or ".join(_SUFFIXES)


def _load_from_run(folder: RunFolder, checkpoint: str, env: EnvSource | None) -> Policy:
    config, agent = load_agent(folder, on_cpu=True, env=env, checkpoint=checkpoint)
    with make_env(config, 1, policy=agent.actor) as envs:
        step = AgentStep(agent.eval().requires_grad_(False), envs)
        inner = with_spaces(envs)
    if inner is None:
        raise UnsupportedError(
            f"load supports Gymnasium environments only, and {config.env_name} is not one: use load_agent."
        )
    observations, actions = inner.readers
    observations = observations.without(config.private_observations)
    converter = Converter(observations, actions, inner.mask_path or (ACTION_MASK,))
    return Policy(step, converter, f"the policy in {folder.path}")


def _load_from_file(path: Path, checkpoint: str) -> Policy:
    if checkpoint != "newest":
        raise ArgumentError(
            f"An exported file holds one policy, so checkpoint must be left out, got {checkpoint!r}: export the run "
            f"again with --checkpoint {checkpoint}."
        )
    about = check_export(path)
    if "observations" not in about:
        raise ArgumentError(
            f"{path} was exported without its spaces, by an earlier version, from an environment that isn't "
            "Gymnasium's, or with transforms that change what the policy reads: export it again, or call its function."
        )
    observations = ObservationReader.from_json(about["observations"], (), path)
    actions = ActionReader.from_json(about["actions"], ())
    keys = {dotted(key): key for key in observations.spec.keys(True, True)}
    step = FileStep(FORMATS[about["format"]].read(path), about, keys)
    return Policy(step, Converter(observations, actions, tuple(about["action_mask"])), f"the policy in {path}")
