"""Deployment: the greedy policy of a run as one function, with its hidden states as inputs and outputs.

The function maps ``(observation, is_init, *states)`` of any number of rows to ``(action, *states after)``. It holds
everything that the policy does to an observation, normalisation included, and needs neither recurl nor tensordict.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from tensordict.nn import TensorDictSequential
from torch import Tensor

from recurl import __version__, specs
from recurl.archive import damage
from recurl.envs import EnvBase
from recurl.errors import ArgumentError, MissingDependencyError, StorageError
from recurl.trainers.config import RunConfig
from recurl.trainers.durable import make_folder, write_whole
from recurl.trainers.environment import make_env
from recurl.trainers.evaluate import load_agent
from recurl.trainers.policy_step import VERIFIED_STEPS, Function, PolicyStep, verify
from recurl.trainers.run_folder import RunFolder

_ROWS = 4
_SEED = 2_000_003
_ONNX = ("onnx", "onnxscript", "onnxruntime")


def export_run(folder: RunFolder, format: str, path: Path | None = None) -> Path:  # noqa: A002 - as on the command line
    """Write the greedy policy of a run's newest checkpoint as a file, checked against the policy.

    Beside it goes ``<file>.json``: names, shapes and dtypes of inputs and outputs, which output feeds which state, the
    actions, the environment, and the SHA-256 of the file, for :func:`check_export`. The file computes on the CPU
    (ONNX: wherever its runtime does).

    Args:
        folder: the run.
        format: ``"torch"``, a ``torch.export`` program, which ``torch.export.load`` reads; or ``"onnx"``.
        path: the file; by default ``policy.pt2`` or ``policy.onnx`` in the run's folder.

    Returns:
        The file.

    Raises:
        ArgumentError: there is no such format, or the run can't be read.
        StorageError: the file can't be written.
        NonFiniteError: the policy isn't finite.
        MissingDependencyError: ``"onnx"`` without the extra ``export``.
        UnsupportedError: the function would not compute what the policy computes; no file is written.
    """
    if format not in _FORMATS:
        raise ArgumentError(f"--format must be one of {', '.join(_FORMATS)}, got {format!r}.")
    kind = _FORMATS[format]
    kind.check()
    path = folder.path / f"policy{kind.suffix}" if path is None else path
    if path.suffix != kind.suffix:
        raise ArgumentError(f"A file of format {format} must end with {kind.suffix}, got {path}: name another (--out).")
    config, agent = load_agent(folder, on_cpu=True)
    policy = PolicyStep(cast(TensorDictSequential, agent.actor)).eval().requires_grad_(False)
    with make_env(config, _ROWS, policy=agent.actor) as env, TemporaryDirectory() as place:
        env.set_seed(_SEED)
        trial = Path(place) / path.name
        kind.write(policy, policy.arguments(env.reset()), trial)
        verify(kind.read(trial), policy, env)
        data = trial.read_bytes()
        about = {"format": format, "file": path.name, "sha256": _sha256(data), **describe(config, policy, env)}
        try:
            make_folder(path.parent)
            write_whole(path, data)
            write_whole(_description(path), json.dumps(about, indent=2).encode() + b"\n")
        except StorageError as error:
            raise StorageError(f"{error} Another file is named with --out.") from error
    check_export(path)
    return path


def check_export(path: Path) -> dict[str, Any]:
    """Verify a file that :func:`export_run` wrote, and return what the file beside it, ``<file>.json``, says of it.

    The file must have the SHA-256 that is written there: a damaged one, or one that doesn't belong to it, is refused.

    Raises:
        ArgumentError: it does not, or one of the two can't be read.
    """
    try:
        data, text = path.read_bytes(), _description(path).read_bytes()
        about = json.loads(text)
    except OSError as error:
        raise ArgumentError(f"{error.filename} can't be read ({error.strerror}): export the run again.") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{_description(path)} is not JSON ({error}): export the run again.") from error
    expected = about.get("sha256") if isinstance(about, dict) else None
    if expected != _sha256(data):
        raise ArgumentError(
            f"{path} must have the SHA-256 in {_description(path).name}, {expected}, got {_sha256(data)}: it was "
            "damaged, or is another file; export the run again."
        )
    return cast(dict[str, Any], about)


def _description(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def describe(config: RunConfig, policy: PolicyStep, env: EnvBase) -> dict[str, Any]:
    """Return what a user of the function must know, as plain values: see :func:`export_run`."""
    arguments = policy.arguments(env.reset())
    with torch.no_grad():
        results = policy(*arguments)
    return {
        "recurl": __version__,
        "torch": torch.__version__,
        "algorithm": config.algorithm,
        "cell": config.cell,
        "env": config.env,
        "env_arguments": config.env_arguments,
        "inputs": [_tensor(name, value) for name, value in zip(policy.inputs, arguments, strict=True)],
        "outputs": [_tensor(name, value) for name, value in zip(policy.outputs, results, strict=True)],
        "states": dict(zip(policy.inputs[len(policy.observations) + 1 :], policy.outputs[1:], strict=True)),
        "action": _action(env.action_spec_unbatched),
        "verified_steps": VERIFIED_STEPS,
    }


def _tensor(name: str, value: Tensor) -> dict[str, Any]:
    return {"name": name, "shape": ["batch", *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch.")}


def _action(spec: specs.TensorSpec) -> dict[str, Any]:
    if isinstance(spec, specs.Categorical):
        return {"kind": "categorical", "n": spec.n}
    bounded = cast(specs.Bounded, spec)
    return {"kind": "box", "low": bounded.low.tolist(), "high": bounded.high.tolist()}


@contextmanager
def _quietly() -> Generator[None]:
    """Hold back what torch's exporters say about themselves."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _program(policy: PolicyStep, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    with _quietly(), torch.no_grad():
        return torch.export.export(policy, example, dynamic_shapes=(tuple({0: batch} for _ in example),), strict=False)


def _write_torch(policy: PolicyStep, example: tuple[Tensor, ...], path: Path) -> None:
    with _quietly():
        torch.export.save(_program(policy, example), path)


def _read_torch(path: Path) -> Function:
    data = path.read_bytes()
    wrong = damage(data)
    if wrong is not None:
        raise ArgumentError(f"{path} is damaged ({wrong}): export the run again.")
    function = torch.export.load(BytesIO(data)).module()
    return lambda arguments: function(*arguments)


def _write_onnx(policy: PolicyStep, example: tuple[Tensor, ...], path: Path) -> None:
    onnx = importlib.import_module("torch.onnx")
    with _quietly():
        written = onnx.export(
            _program(policy, example),
            input_names=policy.inputs,
            output_names=policy.outputs,
            dynamo=True,
            verbose=False,
        )
        for value in (*written.model.graph.inputs, *written.model.graph.outputs):
            value.shape[0] = "batch"
        written.save(path, external_data=False)


def _read_onnx(path: Path) -> Function:
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def function(arguments: Sequence[Tensor]) -> list[Tensor]:
        feed = {name: value.contiguous().numpy() for name, value in zip(names, arguments, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, feed)]

    return function


def _check_onnx() -> None:
    for package in _ONNX:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[export]'") from error


@dataclass(frozen=True)
class _Format:
    suffix: str
    check: Callable[[], None]
    write: Callable[[PolicyStep, tuple[Tensor, ...], Path], None]
    read: Callable[[Path], Function]


_FORMATS = {
    "torch": _Format(".pt2", lambda: None, _write_torch, _read_torch),
    "onnx": _Format(".onnx", _check_onnx, _write_onnx, _read_onnx),
}
