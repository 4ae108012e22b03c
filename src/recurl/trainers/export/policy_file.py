"""Export of a run's policy to a verified file with a description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from recurl._version import __version__
from recurl.core import specs
from recurl.core.errors import ArgumentError, StorageError
from recurl.core.keys import ACTION_MASK
from recurl.core.seeding import env_seed
from recurl.envs import EnvBase, GymWrapper, JaxEnv, TensorEnv
from recurl.trainers.algorithms.environment import make_env, with_spaces
from recurl.trainers.config import RunConfig
from recurl.trainers.env_name import EnvSource
from recurl.trainers.export.checksum import check_export, description_of, sha256
from recurl.trainers.export.formats import FORMATS
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.export.verification import VERIFIED_STEPS, verify
from recurl.trainers.files.durable import make_folder, write_atomic
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.load import load_agent

_ROWS = 4


def export_run(
    folder: RunFolder,
    format: str,  # noqa: A002 - as on the command line
    path: Path | None = None,
    *,
    env: EnvSource | None = None,
    checkpoint: str = "newest",
) -> Path:
    """Export the greedy policy of a run to a file and verify it against the policy.

    A description is written to ``<file>.json``: names, shapes and dtypes of inputs and outputs, the output that feeds
    each state, the actions, the environment, and the SHA-256 of the file, for :func:`check_export`. The exported
    function runs on the CPU (ONNX: on any device that its runtime supports).

    Args:
        folder: the run folder.
        format: ``"torch"``, a ``torch.export`` program for ``torch.export.load``; ``"onnx"``; or ``"compiled"``, a
            program of recurl's C++ library for :func:`recurl.load`.
        path: the file; by default ``policy.pt2``, ``policy.onnx`` or ``policy.recurl`` in the run folder.
        env: see :func:`load_agent`.
        checkpoint: ``"newest"``, or ``"best"``, the checkpoint kept by ``recurl train --keep-best``.

    Returns:
        Path of the file.

    Raises:
        ArgumentError: the format is unknown, or the run can't be read.
        StorageError: the file can't be written.
        NonFiniteError: the policy isn't finite.
        MissingDependencyError: format ``"onnx"`` without the extra ``export``.
        UnsupportedError: the exported function doesn't match the policy; no file is written.
    """
    if format not in FORMATS:
        raise ArgumentError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}.")
    kind = FORMATS[format]
    kind.check()
    path = folder.path / f"policy{kind.suffix}" if path is None else path
    if path.suffix != kind.suffix:
        raise ArgumentError(f"A file of format {format} must end with {kind.suffix}, got {path}: name another (--out).")
    config, agent = load_agent(folder, on_cpu=True, env=env, checkpoint=checkpoint)
    policy = PolicyStep(agent.actor).eval().requires_grad_(False)
    with make_env(config, _ROWS, policy=agent.actor) as envs, TemporaryDirectory() as place:
        envs.set_seed(env_seed(config.seed, "fresh"))
        trial = Path(place) / path.name
        kind.write(policy, policy.arguments(envs.reset()), trial)
        verify(kind.read(trial), policy, envs)
        data = trial.read_bytes()
        about = {"format": format, "file": path.name, "sha256": sha256(data), **describe(config, policy, envs)}
        try:
            make_folder(path.parent)
            write_atomic(path, data)
            write_atomic(description_of(path), json.dumps(about, indent=2).encode() + b"\n")
        except StorageError as error:
            raise StorageError(f"{error} Another file is named with --out.") from error
    check_export(path)
    return path


def describe(config: RunConfig, policy: PolicyStep, env: EnvBase) -> dict[str, Any]:
    """Return the description of the exported function as plain values. See :func:`export_run`."""
    arguments = policy.arguments(env.reset())
    with torch.no_grad():
        results = policy(*arguments)
    inner = with_spaces(env)
    private = config.private_observations
    return {
        "recurl": __version__,
        "torch": torch.__version__,
        "algorithm": config.algorithm,
        "cell": config.cell,
        "env": config.env_name,
        "env_arguments": config.env_arguments,
        "inputs": [_tensor(name, value) for name, value in zip(policy.inputs, arguments, strict=True)],
        "outputs": [_tensor(name, value) for name, value in zip(policy.outputs, results, strict=True)],
        "states": dict(
            zip(policy.inputs[len(policy.observations) + 1 :], policy.outputs[len(policy.actions) :], strict=True)
        ),
        "action": _action(env.action_spec_unbatched),
        **({} if inner is None else _spaces(inner, private)),
        "verified_steps": VERIFIED_STEPS,
    }


def _spaces(env: GymWrapper | TensorEnv | JaxEnv, private: Sequence[str]) -> dict[str, Any]:
    observations, actions = env.readers
    observations = observations.without(private)
    mask = env.mask_path or (ACTION_MASK,)
    return {"observations": observations.to_json(), "actions": actions.to_json(), "action_mask": list(mask)}


def _tensor(name: str, value: Tensor) -> dict[str, Any]:
    return {"name": name, "shape": ["batch", *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch.")}


def _action(spec: specs.TensorSpec) -> dict[str, Any]:
    match spec:
        case specs.Composite():
            return {"kind": "parts", "parts": {str(name): _action(part) for name, part in spec.items()}}
        case specs.Categorical():
            return {"kind": "categorical", "n": spec.n}
        case specs.MultiCategorical():
            return {"kind": "multi_categorical", "nvec": spec.nvec}
        case specs.Binary():
            return {"kind": "binary", "shape": list(spec.shape)}
        case specs.Bounded():
            return {"kind": "box", "low": spec.low.tolist(), "high": spec.high.tolist()}
        case _:
            return {"kind": "unbounded", "shape": list(spec.shape)}
