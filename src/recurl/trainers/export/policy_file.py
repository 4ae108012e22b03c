"""Export of a run's policy to a verified file with a description."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl._version import __version__
from recurl.core import specs
from recurl.core.errors import ArgumentError, ArgumentTypeError, RecurlError, StorageError, UnsupportedError
from recurl.core.keys import (
    ACTION_MASK,
    PREVIOUS_ACTION,
    PREVIOUS_REWARD,
    REWARD,
    NestedKey,
    is_action,
    next_key,
    normalize_key,
)
from recurl.core.seeding import env_seed
from recurl.envs import EnvBase, TransformedEnv
from recurl.envs.wiring import check_policy_wiring, policy_transforms
from recurl.execution.lowering import modules_leading_to
from recurl.trainers.algorithms.environment import make_env, with_spaces
from recurl.trainers.config import RunConfig
from recurl.trainers.env_name import EnvSource
from recurl.trainers.export.checksum import check_export, description_of, sha256
from recurl.trainers.export.formats import FORMATS
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.export.verification import VERIFIED_STEPS, rows_on_cpu, verify
from recurl.trainers.files.durable import make_folder, write_atomic
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.load import load_agent
from recurl.transforms import (
    InitTracker,
    ObservationDelay,
    ObservationNoise,
    PreviousAction,
    PreviousReward,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)

_ROWS = 4
_ADDS_ENTRIES = (InitTracker, PreviousAction, PreviousReward, RewardSum, StepCounter, TensorDictPrimer)
_SENSORS = (ObservationNoise, ObservationDelay)  # a deployed policy has real ones, which measure the same


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
    with make_env(config, _ROWS, policy=agent.actor) as envs:
        envs.set_seed(env_seed(config.seed, "fresh"))
        try:
            return _export(agent.actor, envs, format, path, _facts(config))
        except StorageError as error:
            raise StorageError(f"{error} Another file is named with --out.") from error


def export_policy(actor: TensorDictModuleBase, env: EnvBase, path: str | os.PathLike[str]) -> Path:
    """Export the greedy policy of an actor that your own loop trained, and verify it against the actor.

    The file and its description ``<file>.json`` are those of ``recurl export``: one function from observations,
    ``is_init`` and hidden states to the action and the new states, for any number of rows. A copy of the actor is
    exported, on the CPU and in evaluation mode; only the modules that the action depends on are included.
    :func:`recurl.load` reads the file if the environment has Gymnasium spaces and its transforms don't change what the
    actor reads; the observation space of the loaded policy then has only the entries that the actor reads.

    Args:
        actor: TensorDict module that writes ``"action"`` or its parts. Its hidden states must be those of recurl's
            recurrent modules. Leave out an exploration module such as ``EGreedyModule``. It is not modified.
        env: environment for the actor, of any batch shape and on any device. An ``InitTracker`` and primers are added
            where missing, without changing ``env``. The verification resets it and takes 1,000 steps: reset it before
            further steps, and don't pass that of a Collector that goes on. It is not closed.
        path: the file, which ends with ``.pt2`` (``torch.export``), ``.onnx`` (needs the extra ``export``) or
            ``.recurl`` (a program of recurl's C++ library).

    Returns:
        Path of the file.

    Raises:
        ArgumentError: the suffix is unknown, the actor writes no action, or it reads entries that ``env`` lacks.
        ArgumentTypeError: ``actor`` is not a TensorDict module, or ``env`` not an environment of recurl.
        WiringError: two recurrent modules share a state, or ``env`` overwrites an entry that the actor writes.
        StorageError: the file can't be written.
        NonFiniteError: a parameter isn't finite.
        MissingDependencyError: a package for the format is missing.
        UnsupportedError: the actor can't be exported, carries a state of its own, or the exported function doesn't
            match it; no file is written.

    Example:
        >>> import tempfile
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> import recurl
        >>> memory = recurl.LSTMModule(2, 8, in_key="observation", out_key="features")
        >>> head = TensorDictModule(torch.nn.Linear(8, 2), in_keys=["features"], out_keys=["logits"])
        >>> actor = recurl.ProbabilisticActor(
        ...     TensorDictSequential(memory, head), ["logits"], distribution_class=recurl.Categorical
        ... )
        >>> env = recurl.GymEnv("recurl/MaskedCartPole-v1", num_envs=2, categorical_action_encoding=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     policy = recurl.load(recurl.export_policy(actor, env, f"{folder}/policy.pt2"))
        >>> action, state = policy.predict(policy.observation_space.sample())
        >>> sorted(state)
        ['recurrent_state_c', 'recurrent_state_h']
        >>> env.close()
    """
    path = Path(path)
    format = next((name for name, kind in FORMATS.items() if kind.suffix == path.suffix), None)  # noqa: A001 - as above
    if format is None:
        suffixes = ", ".join(kind.suffix for kind in FORMATS.values())
        raise ArgumentError(f"The path of an exported policy must end with one of {suffixes}, got {path}.")
    if not isinstance(actor, TensorDictModuleBase):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
        raise ArgumentTypeError(f"export_policy takes a TensorDict module as actor, got {type(actor).__name__}.")
    if not isinstance(env, EnvBase):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
        raise ArgumentTypeError(f"export_policy takes an environment of recurl, got {type(env).__name__}.")
    FORMATS[format].check()
    copied = _acting_part(copy.deepcopy(actor).cpu())
    wired = TransformedEnv(env)
    for transform in policy_transforms(copied, wired):
        wired.append_transform(transform)
    check_policy_wiring(copied, wired)
    check_finite(copied.state_dict(), "the actor")
    inner = with_spaces(env)
    return _export(copied, wired, format, path, {"env": repr(env if inner is None else inner)})


def _acting_part(actor: TensorDictModuleBase) -> TensorDictSequential:
    """Return the modules of ``actor`` that its action depends on."""
    written = list(map(normalize_key, actor.out_keys))
    actions = [key for key in written if is_action(key)]
    if not actions:
        raise ArgumentError(
            f"The actor must write 'action', or its parts under 'action', but it writes {written}: pass the policy "
            "itself, such as get_policy_operator() of an ActorValueOperator."
        )
    return TensorDictSequential(*modules_leading_to(actor, actions))


def _export(actor: TensorDictSequential, env: EnvBase, format: str, path: Path, facts: Mapping[str, Any]) -> Path:  # noqa: A002 - as above
    """Write an actor on the CPU and the description of its function, verified in ``env``. See :func:`export_policy`."""
    kind = FORMATS[format]
    policy = PolicyStep(actor).eval().requires_grad_(False)
    _check_inputs(policy, env)
    with TemporaryDirectory() as place:
        root = rows_on_cpu(env.reset())
        example = policy.arguments(root[torch.arange(_ROWS) % len(root)])
        with torch.no_grad():
            results = policy(*example)
        trial = Path(place) / path.name
        try:
            kind.write(policy, example, trial)
        except RecurlError:
            raise
        except Exception as error:  # torch's exporters raise errors of many types
            raise UnsupportedError(
                f"The policy can't be exported in format {format}, {type(error).__name__}: {error}"
            ) from error
        verify(kind.read(trial), policy, env)
        data = trial.read_bytes()
    described = describe(policy, env, example, results, facts)
    about = {"format": format, "file": path.name, "sha256": sha256(data), **described}
    make_folder(path.parent)
    write_atomic(path, data)
    write_atomic(description_of(path), json.dumps(about, indent=2).encode() + b"\n")
    check_export(path)
    return path


def _check_inputs(policy: PolicyStep, env: EnvBase) -> None:
    written = list(map(normalize_key, policy.actor.out_keys))
    own = [key for key in policy.observations if next_key(key) in written]
    if own:
        raise UnsupportedError(
            f"The hidden states of an exported policy must be those of recurl's recurrent modules, which reset them "
            f"where is_init is set, but the actor carries {own} itself: write its memory as a cell, for a CellModule."
        )
    known = list(env.observation_spec.keys(True, True))
    missing = [key for key in policy.observations if key not in known]
    if missing:
        raise ArgumentError(
            f"The environment must have all entries that the actor reads, but it lacks {missing}: it has {known}. Pass "
            "an environment with the transforms that it was trained with."
        )


def _facts(config: RunConfig) -> dict[str, Any]:
    return {
        "algorithm": config.algorithm,
        "cell": config.cell,
        "env": config.env_name,
        "env_arguments": config.env_arguments,
    }


def describe(
    policy: PolicyStep,
    env: EnvBase,
    arguments: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the description of the exported function as plain values. See :func:`export_run`."""
    return {
        "recurl": __version__,
        "torch": torch.__version__,
        **facts,
        "inputs": [_tensor(name, value) for name, value in zip(policy.inputs, arguments, strict=True)],
        "outputs": [_tensor(name, value) for name, value in zip(policy.outputs, results, strict=True)],
        "states": dict(
            zip(policy.inputs[len(policy.observations) + 1 :], policy.outputs[len(policy.actions) :], strict=True)
        ),
        "action": _action(env.action_spec_unbatched),
        **_spaces(env, set(policy.observations)),
        "verified_steps": VERIFIED_STEPS,
    }


def _spaces(env: EnvBase, read: set[NestedKey]) -> dict[str, Any]:
    """Return the Gymnasium spaces of what the policy reads, if it reads what the spaces hold; nothing otherwise."""
    inner = with_spaces(env)
    if inner is None:
        return {}
    observations, actions = inner.readers
    own = {normalize_key(key) for key in observations.spec.keys(True, True)} - {ACTION_MASK}
    if not read <= own | {ACTION_MASK, PREVIOUS_ACTION, PREVIOUS_REWARD} or _rewrites(env, inner, read):
        return {}
    if read & own:
        observations = observations.without(sorted(own - read, key=str))
    mask = inner.mask_path or (ACTION_MASK,)
    return {"observations": observations.to_json(), "actions": actions.to_json(), "action_mask": list(mask)}


def _rewrites(env: EnvBase, inner: EnvBase, read: set[NestedKey]) -> bool:
    """Return whether a transform between ``env`` and ``inner`` may change an entry that the policy reads."""
    while env is not inner:
        if type(env) is not TransformedEnv or any(_may_change(part, read) for part in env.transform):
            return True
        env = env.base_env
    return False


def _may_change(transform: Transform, read: set[NestedKey]) -> bool:
    if type(transform) in (*_ADDS_ENTRIES, *_SENSORS):
        return False
    changed = set(map(normalize_key, transform.out_keys))
    return not changed or not changed.isdisjoint(read | ({REWARD} if PREVIOUS_REWARD in read else set()))


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
