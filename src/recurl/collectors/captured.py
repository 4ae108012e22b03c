"""The steps of a batch as a program: one compiled step, all of them as one CUDA graph, or both."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from recurl._torch import foreach_copy_, has_global_hooks
from recurl.capture import KeptTensors, recording
from recurl.collectors.start_states import SparseStates, StartStates
from recurl.columns import Narrow, put_together, take_apart
from recurl.envs import EnvBase, TensorEnv
from recurl.envs.trajectories import Trajectories, followed
from recurl.envs.transformed import TransformedEnv
from recurl.errors import UsageError
from recurl.keys import DONE, NEXT, TRAJ_IDS, TRAJ_STEPS
from recurl.lowering import Entries, Step, leaves
from recurl.source_lines import line_of
from recurl.traced import Traced

__all__ = ["CapturedSteps", "Programs", "recorded", "tensor_env", "why_not_captured"]

_WARM_UP = 2  # batches before the one that is recorded: kernels are compiled and libraries make their memory
_DEVICE = "cuda"
_NUMBERED = 3  # tensors that the trajectories of a compiled step are

_Key = tuple[str, ...]
_Tensors = Sequence[Tensor]
_Batch = tuple[_Tensors, _Tensors, _Tensors]  # what was written, states where sequences start, what comes next


class Programs(TypedDict, total=False):
    """Options of a collector that runs steps as programs; see there."""

    cuda_graph: bool
    compile_step: bool


class _Program(NamedTuple):
    """A step, and how tensors enter it; how they leave it, all whole when None."""

    run: Callable[..., Sequence[Tensor]]
    entering: Sequence[Narrow | None]
    leaving: Sequence[Narrow | None] | None


class _Recording(NamedTuple):
    replay: Callable[[], None]
    written: _Tensors
    states: _Tensors
    memory: list[Tensor]


class CapturedSteps:
    """Runs the steps of a batch as a program of tensors.

    A compiled step is compiled at the first batch (see :class:`~recurl.traced.Traced`). A CUDA graph of all steps is
    recorded at the third batch and launched from then on: it reads weights and buffers in place, draws the random
    numbers that launching the kernels one by one would have drawn, and gives the same bits. The root and the states of
    the environment are in memory that every replay reads and overwrites; where somebody replaced them in between, by a
    reset or a restored state, they are copied there first. Where a module, parameter or buffer of the policy was
    replaced, or a module set to work in another way (see :class:`~recurl.capture.KeptTensors`), the program is made
    anew; other edits, and those of the environment, are not seen.

    Args:
        env: the environment, a :class:`~recurl.envs.TensorEnv` with any transforms.
        policy: what acts in it.
        step: makes a step from a root, and returns what is written of it, and the next root.
        trajectories: which go on from batch to batch.
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
        trajectories: Trajectories,
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
        self._trajectories = trajectories
        self._count = count
        self._starts = starts
        self._graph = graph
        self._compiled = compiled
        self._warm = 0
        self._setting: object = None
        self._root: object = None  # kind of the root that the program reads
        self._after: object = None  # what was returned last
        self._weights: KeptTensors | None = None
        self._program: _Program | None = None
        self._recording: _Recording | None = None
        self._written: list[_Key] = []
        self._states: list[_Key] = []

    def __call__(self, root: Step, setting: object, read: Callable[[Step], Step]) -> tuple[TensorDict, Step]:
        """Make the steps of a batch.

        Args:
            root: where they begin.
            setting: what else they depend on; the program is made anew where it differs.
            read: returns a root as the policy reads it; left out where a batch goes on from the last one, and the
                policy is as it was.

        Returns:
            The batch, in memory of its own, and the next root.
        """
        goes_on = root is self._after and self._holds(setting)
        root = root if goes_on else read(root)
        keys, running = [key for key, _ in leaves(root)], self._env.running
        names = sorted(running)  # a state that was restored may have another order
        given = [*(value for _, value in leaves(root)), *(running[name] for name in names)]
        if self._compiled:
            given += self._trajectories.ahead(self._count)
        program = self._program if goes_on else self._prepare(root, keys, names, given, setting)
        assert program is not None
        if self._warm < _WARM_UP or not self._graph:
            self._warm += 1
            found, states, current = self._steps(program, self._entering(program, given), root.ndim)
            written: _Tensors = [tensor.contiguous() for tensor in found]
            after: _Tensors = [tensor[0] for tensor in put_together(program.entering, [current], 0)]
        else:
            written, states, after = self._replayed(program, given, root.ndim)
        self._env.running = dict(zip(names, after[len(keys) :], strict=False))
        batch = TensorDict({}, [*root.batch_size, self._count], device=root.device)
        for key, tensor in zip(self._written, written, strict=True):
            batch.set(key, tensor)
        if self._starts is not None:
            self._keep(self._starts, states, batch)
        if self._compiled:
            self._trajectories.caught_up(after[-_NUMBERED:])
        else:
            self._trajectories.number(batch, batch.get((NEXT, DONE)).squeeze(-1))
        batch.refine_names(..., "time")
        after_root = self._after = _like(root, keys, after)
        return batch, after_root

    def _holds(self, setting: object) -> bool:
        """Return whether there is a program, of the policy as it is."""
        replaced = self._weights is not None and self._weights.replaced() is not None
        return self._program is not None and self._setting == (setting, has_global_hooks()) and not replaced

    def _keep(self, starts: StartStates, states: _Tensors, batch: TensorDict) -> None:
        """Set the states that are kept in a batch."""
        sparse = SparseStates(starts, batch.batch_size, batch.device)
        for key, found in zip(self._states, states, strict=True):
            for step, state in zip(range(0, self._count, starts.every), found, strict=True):
                sparse.write(step, ..., key, state)
        sparse.finish(batch)

    def reset(self) -> None:
        """Forget the program, and free the graph."""
        self._program = self._recording = None

    def _prepare(self, root: Step, keys: list[_Key], names: list[str], given: _Tensors, setting: object) -> _Program:
        """Return the program of a step, made anew unless there is one that still holds."""
        if self._program is not None and self._root == (type(root), keys) and self._holds(setting):
            return self._program

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            running = self._env.running
            self._env.running = dict(zip(names, tensors[len(keys) :], strict=False))
            try:
                written, after = self._step(_like(root, keys, tensors))
                state = self._env.running
            finally:
                self._env.running = running
            found, following = dict(leaves(written)), dict(leaves(after))
            current = [*(following[key] for key in keys), *(state[name] for name in names)]
            if self._compiled:  # a program takes tensors with the strides of those that it was made of
                before = tensors[-_NUMBERED:]
                found[TRAJ_IDS], found[TRAJ_STEPS], _ = before
                numbered = followed(before, found[NEXT, DONE].squeeze(-1))
                current = [*(tensor.contiguous() for tensor in current), *numbered]
            states = {} if self._starts is None else self._starts.take(found)
            self._written, self._states = list(found), list(states)
            return *found.values(), *states.values(), *current

        rows = root.batch_size[0] if root.ndim else None
        program = _Program(run, [None] * len(given), None)
        if self._compiled:
            traced = Traced(run, [tensor.contiguous() for tensor in given], [self._env.generator], rows)
            program = _Program(traced, traced.entering, traced.leaving)
        self._program, self._setting, self._root = program, (setting, has_global_hooks()), (type(root), keys)
        self._weights = self._kept()
        self._recording = None
        return program

    def _kept(self) -> KeptTensors | None:
        return None if self._policy is None else KeptTensors(self._policy, modes=True)

    def _entering(self, program: _Program, given: _Tensors) -> _Tensors:
        """Return what enters the first step, with the strides of what a compiled one was made of."""
        entering = take_apart(program.entering, given)
        return [tensor.contiguous() for tensor in entering] if self._compiled else entering

    def _steps(self, program: _Program, given: _Tensors, time_dim: int) -> _Batch:
        """Make the steps from what enters the first, which stays as it is; what comes next enters in the same way."""
        current: _Tensors = [torch.empty_like(tensor) for tensor in given]  # what is written may be these very tensors
        _copy(current, given)
        results: list[_Tensors] = []
        for _ in range(self._count):
            results.append(program.run(*current))
            current = results[-1][-len(given) :]
        forms = program.leaving or [None] * len(results[0])
        entries, states = forms[: len(self._written)], forms[len(self._written) :][: len(self._states)]
        written = put_together(entries, results, time_dim)
        first = sum(1 if form is None else form.width for form in entries)
        begun = [] if self._starts is None else [result[first:] for result in results[:: self._starts.every]]
        return written, put_together(states, begun, 0), current

    def _replayed(self, program: _Program, given: _Tensors, time_dim: int) -> _Batch:
        recording = self._recording
        if recording is None:
            recording = self._recording = self._record(program, given)
            self._weights = self._kept()  # a module may count its calls, of which there are no more
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

    def _record(self, program: _Program, given: _Tensors) -> _Recording:
        forms = program.entering
        memory = [tensor[0] for tensor in put_together(forms, [take_apart(forms, given)], 0)]
        entering = self._entering(program, memory)  # in the same memory

        def steps() -> list[_Tensors]:
            written, states, after = self._steps(program, entering, 0)
            _copy(entering, after)
            return [written, states]

        replay, (written, states) = recorded("steps", steps, self._env.generator)
        return _Recording(replay, written, states, memory)


def _copy(targets: _Tensors, sources: _Tensors) -> None:
    """Copy tensors into others of the same shapes and dtypes, the vectors in one launch for each dtype."""
    pairs = list(zip(targets, sources, strict=True))
    vectors = [pair for pair in pairs if pair[0].ndim == 1]
    for target, source in pairs:
        if target.ndim != 1:
            target.copy_(source)
    if vectors:
        foreach_copy_(*map(list, zip(*vectors, strict=True)))


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
