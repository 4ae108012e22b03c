"""The steps of a batch as a CUDA graph: one launch instead of thousands, without Python in between."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from recurl.capture import KeptTensors, recording
from recurl.envs import EnvBase, TensorEnv
from recurl.envs.transformed import TransformedEnv
from recurl.errors import UsageError
from recurl.lowering import Step, leaves

__all__ = ["CapturedSteps", "tensor_env"]

_WARM_UP = 2  # batches before the one that is recorded: kernels are compiled and libraries make their memory
_DEVICE = "cuda"
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch,))

Batch = tuple[TensorDict, Tensor]  # and whether a row was done, at each step
Steps = Callable[[Step], tuple[TensorDict, Tensor, Step]]
Replay = Callable[[], None]


class _Recording(NamedTuple):
    replay: Replay
    batch: Batch
    root: Step
    state: dict[str, Tensor]
    setting: object
    weights: KeptTensors | None


class CapturedSteps:
    """Runs the steps of a batch, and from the third batch on replays them as a CUDA graph.

    A replay repeats the recorded kernels: it reads weights and buffers in place, draws the random numbers that
    launching the kernels one by one would have drawn, and gives the same bits. The root and the states of the
    environment are in memory that every replay reads and overwrites; where somebody replaced them in between, by a
    reset or a restored state, they are copied there first.

    Args:
        env: the environment, a :class:`~recurl.envs.TensorEnv` with any transforms.
        policy: what acts in it.
        steps: makes the steps of a batch, from a root, and returns batch, ``done`` of each step, and next root.

    Raises:
        UsageError: (when called) the steps can't be recorded, or parameters of the policy were replaced since.
    """

    def __init__(self, env: EnvBase, policy: object, steps: Steps) -> None:
        found = tensor_env(env)
        assert found is not None
        self._env = found
        self._policy = policy if isinstance(policy, nn.Module) else None
        self._steps = steps
        self._warm = 0
        self._recording: _Recording | None = None

    def reset(self) -> None:
        """Forget the graph: the next batch records it anew."""
        self._recording = None

    def __call__(self, root: Step, setting: object) -> tuple[TensorDict, Tensor, Step]:
        """Make the steps of a batch.

        Args:
            root: where they begin.
            setting: what else they depend on; the graph is recorded anew where it differs from the recorded one.
        """
        if self._warm < _WARM_UP:
            self._warm += 1
            return self._steps(root)
        now = (setting, self._policy and [module.training for module in self._policy.modules()])
        recording = self._recording
        if recording is None or recording.setting != now:
            recording = self._recording = self._record(root, now)
        if recording.weights is not None:
            recording.weights.check()
        _copy_all(_all_of(recording.root, recording.state), _all_of(root, self._env.running))
        self._env.running = recording.state
        recording.replay()
        batch, done = recording.batch
        return batch.clone(), done.clone(), recording.root

    def _record(self, root: Step, setting: object) -> _Recording:
        state = self._env.running
        kept_root, kept_state = root.clone(), {name: value.clone() for name, value in state.items()}

        def steps() -> Batch:
            self._env.running = kept_state
            batch, done, after = self._steps(kept_root.copy())
            _copy_all(_all_of(kept_root, kept_state), _all_of(after, self._env.running))
            return batch, done

        try:
            replay, batch = record(steps, self._env.generator)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise UsageError(
                f"The steps can't be captured as a CUDA graph, as {_line(error)}: nothing may wait for the GPU "
                "(.item(), .cpu(), if on a tensor, a mask as an index), nor make tensors from Python numbers; or "
                "collect with cuda_graph=False."
            ) from error
        finally:
            self._env.running = state
        weights = None if self._policy is None else KeptTensors(self._policy)
        return _Recording(replay, batch, kept_root, kept_state, setting, weights)


def record(steps: Callable[[], Batch], generator: Generator) -> tuple[Replay, Batch]:
    """Record what ``steps`` launches, and return what launches it, and its result, which every launch overwrites."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with recording(), torch.cuda.graph(graph):
        result = steps()
    return graph.replay, result


def tensor_env(env: EnvBase) -> TensorEnv | None:
    """Return the :class:`~recurl.envs.TensorEnv` that ``env`` is or transforms, or None.

    Example:
        >>> from recurl.envs import GymEnv, StepCounter
        >>> from recurl.envs.tasks import TMaze
        >>> tensor_env(TensorEnv(TMaze(), 2).append_transform(StepCounter()))
        TensorEnv(TMaze, batch_size=[2], device=cpu)
        >>> tensor_env(GymEnv("CartPole-v1")) is None
        True
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env if isinstance(env, TensorEnv) else None


def _all_of(root: Step, state: Mapping[str, Tensor]) -> dict[object, Tensor]:
    return {**dict(leaves(root)), **state}


def _copy_all(kept: dict[object, Tensor], given: dict[object, Tensor]) -> None:
    """Copy what was ``given`` into the tensors of the same names that are ``kept``, which it may share memory with."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in kept.values()}
    found = {name: given[name] for name, tensor in kept.items() if given[name] is not tensor}
    shared = [name for name, tensor in found.items() if tensor.untyped_storage().data_ptr() in memory]
    found.update({name: found[name].clone() for name in shared})
    for name, tensor in found.items():
        kept[name].copy_(tensor)


def _line(error: BaseException) -> str:
    while error.__context__ is not None:  # the end of a failed capture fails too
        error = error.__context__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno} does `{frame.line}`"
    return "an operation waits for it"


def why_not_captured(env: EnvBase, policy: Any, *, init_random_frames: int) -> str | None:
    """Return the reason why a collector can't run ``policy`` in ``env`` as a CUDA graph, or None.

    Example:
        >>> from recurl.envs import GymEnv
        >>> why_not_captured(GymEnv("CartPole-v1"), None, init_random_frames=0)
        'GymEnv steps on the host'
    """
    if tensor_env(env) is None:
        return f"{type(env).__name__} steps on the host"
    devices = {tensor.device for tensor in policy.parameters()} if isinstance(policy, nn.Module) else set()
    if env.device is None or env.device.type != _DEVICE:
        return f"the environment is on {env.device}"
    if devices - {env.device}:
        return f"the policy is on {', '.join(sorted(map(str, devices)))}, the environment on {env.device}"
    return f"the first {init_random_frames} frames have random actions" if init_random_frames else None
