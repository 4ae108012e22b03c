"""The steps of a batch as a program: one compiled step, all of them as one CUDA graph, or both."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from recurl.capture import KeptTensors, recording
from recurl.collectors.start_states import SparseStates, StartStates
from recurl.envs import EnvBase, TensorEnv
from recurl.envs.transformed import TransformedEnv
from recurl.errors import UsageError
from recurl.lowering import Entries, Step, leaves
from recurl.source_lines import line_of
from recurl.traced import Traced

__all__ = ["CapturedSteps", "Programs", "recorded", "tensor_env", "why_not_captured"]

_WARM_UP = 2  # batches before the one that is recorded: kernels are compiled and libraries make their memory
_DEVICE = "cuda"

_Key = tuple[str, ...]
_Tensors = Sequence[Tensor]
_Batch = tuple[_Tensors, list[_Tensors], _Tensors]  # what was written, states of the steps, what comes next


class Programs(TypedDict, total=False):
    """Options of a collector that runs steps as programs; see there."""

    cuda_graph: bool
    compile_step: bool


class _Recording(NamedTuple):
    replay: Callable[[], None]
    written: _Tensors
    states: list[_Tensors]
    memory: list[Tensor]


class CapturedSteps:
    """Runs the steps of a batch as a program of tensors.

    A compiled step is compiled at the first batch (see :class:`~recurl.traced.Traced`). A CUDA graph of all steps is
    recorded at the third batch and launched from then on: it reads weights and buffers in place, draws the random
    numbers that launching the kernels one by one would have drawn, and gives the same bits. The root and the states of
    the environment are in memory that every replay reads and overwrites; where somebody replaced them in between, by a
    reset or a restored state, they are copied there first. Where a module, parameter or buffer of the policy was
    replaced, the program is made anew.

    Args:
        env: the environment, a :class:`~recurl.envs.TensorEnv` with any transforms.
        policy: what acts in it.
        step: makes a step from a root, and returns what is written of it, and the next root.
        count: number of steps of a batch.
        starts: which recurrent states are kept; all when None.
        graph: record a CUDA graph.
        compiled: compile the step.

    Raises:
        UsageError: (when called) the steps can't be recorded.
        UnsupportedError: (when called) the step can't be compiled.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: object,
        step: Callable[[Step], tuple[Step, Step]],
        count: int,
        starts: StartStates | None = None,
        *,
        graph: bool,
        compiled: bool,
    ) -> None:
        found = tensor_env(env)
        assert found is not None
        self._env = found
        self._policy = policy if isinstance(policy, nn.Module) else None
        self._step = step
        self._count = count
        self._starts = starts
        self._graph = graph
        self._compiled = compiled
        self._warm = 0
        self._setting: object = None
        self._weights: KeptTensors | None = None
        self._run: Callable[..., Sequence[Tensor]] | None = None
        self._recording: _Recording | None = None
        self._written: list[_Key] = []
        self._states: list[_Key] = []

    def __call__(self, root: Step, setting: object) -> tuple[TensorDict, Step]:
        """Make the steps of a batch.

        Args:
            root: where they begin.
            setting: what else they depend on; the program is made anew where it differs.

        Returns:
            The batch, in memory of its own, and the next root.
        """
        keys, names = [key for key, _ in leaves(root)], list(self._env.running)
        given = [*(value for _, value in leaves(root)), *self._env.running.values()]
        self._prepare(root, keys, names, given, setting)
        if self._warm < _WARM_UP or not self._graph:
            self._warm += 1
            written, states, after = self._steps(given, root.ndim)
        else:
            written, states, after = self._replayed(given, root.ndim)
        self._env.running = dict(zip(names, after[len(keys) :], strict=True))
        batch = TensorDict({}, [*root.batch_size, self._count], device=root.device)
        for key, tensor in zip(self._written, written, strict=True):
            batch.set(key, tensor)
        if self._starts is not None:
            self._keep(self._starts, states, batch)
        batch.refine_names(..., "time")
        return batch, _like(root, keys, after)

    def _keep(self, starts: StartStates, states: list[_Tensors], batch: TensorDict) -> None:
        """Set the states that are kept in a batch."""
        sparse = SparseStates(starts, batch.batch_size, batch.device)
        for step, found in zip(range(0, self._count, starts.every), states, strict=True):
            for key, state in zip(self._states, found, strict=True):
                sparse.write(step, ..., key, state)
        sparse.finish(batch)

    def reset(self) -> None:
        """Forget the program, and free the graph."""
        self._run = self._recording = None

    def _prepare(self, root: Step, keys: list[_Key], names: list[str], given: _Tensors, setting: object) -> None:
        """Make the program of a step, unless there is one that still holds."""
        training = self._policy and [module.training for module in self._policy.modules()]
        now = (setting, training, type(root), keys)
        replaced = self._weights is not None and self._weights.replaced() is not None
        if self._run is not None and self._setting == now and not replaced:
            return

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            running = self._env.running
            self._env.running = dict(zip(names, tensors[len(keys) :], strict=True))
            try:
                written, after = self._step(_like(root, keys, tensors))
                state = self._env.running
            finally:
                self._env.running = running
            found = dict(leaves(written))
            states = {} if self._starts is None else self._starts.take(found)
            self._written, self._states = list(found), list(states)
            following = dict(leaves(after))
            return (
                *found.values(),
                *states.values(),
                *(following[key] for key in keys),
                *(state[name] for name in names),
            )

        rows = root.batch_size[0] if root.ndim else None
        self._run = Traced(run, given, [self._env.generator], rows) if self._compiled else run
        self._setting = now
        self._weights = None if self._policy is None else KeptTensors(self._policy)
        self._recording = None

    def _steps(self, given: _Tensors, time_dim: int) -> _Batch:
        assert self._run is not None
        written: list[_Tensors] = []
        states: list[_Tensors] = []
        current: _Tensors = [tensor.clone() for tensor in given]  # what is written may be these very tensors
        for step in range(self._count):
            result = self._run(*current)
            split, count = len(self._written), len(result) - len(given)
            written.append(result[:split])
            if self._starts is not None and self._starts.begin(step):
                states.append(result[split:count])
            current = result[count:]
        return [torch.stack(tensors, time_dim) for tensors in zip(*written, strict=True)], states, current

    def _replayed(self, given: _Tensors, time_dim: int) -> _Batch:
        recording = self._recording
        if recording is None:
            recording = self._recording = self._record(given)
        memory = {kept.untyped_storage().data_ptr() for kept in recording.memory}
        replaced = [(kept, new) for kept, new in zip(recording.memory, given, strict=True) if kept is not new]
        # All are read before the first is written: what was replaced may lie in memory that is overwritten here.
        values = [new.clone() if new.untyped_storage().data_ptr() in memory else new for _, new in replaced]
        for (kept, _), value in zip(replaced, values, strict=True):
            kept.copy_(value)
        recording.replay()
        # The graph puts one step after another, which is quicker, and the batch gets memory of its own here anyway.
        rows = [written.movedim(0, time_dim) for written in recording.written]
        batch = [written.clone(memory_format=torch.contiguous_format) for written in rows]
        return batch, recording.states, recording.memory

    def _record(self, given: _Tensors) -> _Recording:
        memory = [tensor.clone() for tensor in given]

        def steps() -> list[_Tensors]:
            written, states, after = self._steps(memory, 0)
            for kept, tensor in zip(memory, after, strict=True):
                kept.copy_(tensor)
            return [written, *states]

        replay, (written, *states) = recorded("steps", steps, self._env.generator)
        return _Recording(replay, written, states, memory)


def recorded(
    what: str, steps: Callable[[], list[_Tensors]], generator: Generator
) -> tuple[Callable[[], None], list[_Tensors]]:
    """Return what launches all that ``steps`` launches, and its result, which every launch overwrites.

    Args:
        what: what is recorded, for the message.
        steps: launches something; it is not run.
        generator: random generator that it draws from, besides that of the device.

    Raises:
        UsageError: it waits for the GPU.
    """
    try:
        return record(steps, generator)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        raise UsageError(
            f"The {what} can't be captured as a CUDA graph, as {_line(error)}: nothing may wait for the GPU "
            "(.item(), .cpu(), if on a tensor, a mask as an index), nor make tensors from Python numbers; or "
            "collect with cuda_graph=False."
        ) from error


def record(steps: Callable[[], list[_Tensors]], generator: Generator) -> tuple[Callable[[], None], list[_Tensors]]:
    """Record what ``steps`` launches, and return what launches it, and its result, which every launch overwrites."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with recording(), torch.cuda.graph(graph):
        result = steps()
    return graph.replay, result


def _like(root: Step, keys: list[_Key], tensors: _Tensors) -> Step:
    """Return a root of the kind of ``root`` with other tensors; those beyond its own are left over."""
    fresh: Any = Entries({}, root.batch_size, root.device)
    if not isinstance(root, Entries):
        fresh = TensorDict({}, root.batch_size, device=root.device)
    for key, tensor in zip(keys, tensors, strict=False):
        fresh.set(key, tensor)
    return fresh


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


def _line(error: BaseException) -> str:
    while error.__context__ is not None:  # the end of a failed capture fails too
        error = error.__context__
    return line_of(traceback.extract_tb(error.__traceback__)) or "an operation waits for it"


def why_not_captured(env: EnvBase, policy: Any, *, init_random_frames: int, graph: bool, compiled: bool) -> str | None:
    """Return the reason why a collector can't make a program of the steps of ``policy`` in ``env``, or None.

    Of an environment that steps on the host, the policy alone can be captured.

    Example:
        >>> from recurl.envs import GymEnv
        >>> why_not_captured(GymEnv("CartPole-v1"), None, init_random_frames=0, graph=False, compiled=True)
        'GymEnv steps on the host'
    """
    if tensor_env(env) is None and (compiled or policy is None):
        return f"{type(env).__name__} steps on the host{'' if compiled else ', and there is no policy'}"
    if graph and (env.device is None or env.device.type != _DEVICE):
        return f"the environment is on {env.device}"
    devices = {tensor.device for tensor in policy.parameters()} if isinstance(policy, nn.Module) else set()
    if devices - {env.device}:
        return f"the policy is on {', '.join(sorted(map(str, devices)))}, the environment on {env.device}"
    return f"the first {init_random_frames} frames have random actions" if init_random_frames else None
