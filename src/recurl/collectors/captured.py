"""Compilation of a step and CUDA graph capture of all steps of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.start_states import SparseStates, StartStates
from recurl.core.keys import DONE, NEXT, TRAJ_IDS, TRAJ_STEPS
from recurl.core.torch_compat import foreach_copy_, has_global_hooks
from recurl.envs import EnvBase
from recurl.execution.background import is_later
from recurl.execution.capture import GraphedFunction, ModuleGuard
from recurl.execution.columns import ColumnLayout, join_columns, split_columns
from recurl.execution.explain import NotCompiled
from recurl.execution.traced import InductorFunction
from recurl.sequences.entries import Entries, Step, leaves
from recurl.sequences.trajectories import Trajectories, next_trajectories

__all__ = ["COLLECT_WITHOUT", "CaptureOptions", "CapturedSteps", "capture_obstacle"]

COLLECT_WITHOUT = "collect with cuda_graph=False"
"""What to do if the steps or the policy of a collector can't be captured."""
_DEVICE = "cuda"
_NUMBERED = 3  # number of tensors that represent the trajectories of a compiled step

_Key = tuple[str, ...]
_Tensors = Sequence[Tensor]
_Batch = tuple[_Tensors, _Tensors, _Tensors]  # written entries, states at sequence starts, inputs of the next step


class CaptureOptions(TypedDict, total=False):
    """Options of :class:`~recurl.collectors.Collector` for compiled and captured steps."""

    cuda_graph: bool
    compile_step: bool


class _TensorStep(NamedTuple):
    """A step as a function of tensors, with the column layouts of its inputs and outputs (None: unsplit)."""

    run: Callable[..., Sequence[Tensor]]
    input_layouts: Sequence[ColumnLayout | None]
    output_layouts: Sequence[ColumnLayout | None] | None


class CapturedSteps:
    """Runs the steps of a batch with a compiled step, as a CUDA graph, or both.

    The step is compiled at the first batch (see :class:`~recurl.execution.traced.InductorFunction`); inside
    :func:`~recurl.execution.background.compiled_later`, it is only traced. All steps are captured at the third batch
    (see :class:`~recurl.execution.capture.GraphedFunction`). The root and the states of the environment are in memory
    that every replay reads and overwrites; if they were replaced in between, by a reset or a restored state, they are
    first copied there. If a module, parameter or buffer of the policy was replaced, or the mode of a module changed
    (see :class:`~recurl.execution.capture.ModuleGuard`), the step is compiled and captured again. Other modifications,
    and those of the environment, are not detected.

    Args:
        env: the environment, a :class:`~recurl.envs.TensorEnv` with any transforms.
        policy: the policy.
        step: runs a step from a root, and returns the written entries and the next root.
        trajectories: trajectories, which continue across batches.
        count: number of steps of a batch.
        starts: which recurrent states are kept; all when None.
        graph: capture a CUDA graph.
        compiled: compile the step.

    Raises:
        UsageError: (when called) the steps can't be captured.
        UnsupportedError: (when called) the step can't be compiled.
        CompilerFailed: (when called) the compiler failed on the step. No step was made.
        NotCompiled: (when called) the step is compiled later. No step was made.
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
        found = env.tensor_env
        assert found is not None
        self._env = found
        self._policy = policy if isinstance(policy, nn.Module) else None
        self._step = step
        self._trajectories = trajectories
        self._count = count
        self._starts = starts
        self._compiled = compiled
        self._setting: object = None
        self._root: object = None  # type and keys of the root
        self._last_root: object = None  # the root returned last
        self._guard = ModuleGuard(
            self._policy, modes=True, settings=lambda: {"setting": self._setting, "hooks": has_global_hooks()}
        )
        self._tensor_step: _TensorStep | None = None
        self._traced: InductorFunction | None = None
        self._graphed: GraphedFunction[list[_Tensors]] | None = None
        if graph:
            generator = found.generator
            self._graphed = GraphedFunction(
                self._run_in_memory,
                generator.device,
                generator,
                name="steps",
                instead=COLLECT_WITHOUT,
                guard=self._guard,
            )
        self._written: list[_Key] = []
        self._states: list[_Key] = []

    def __call__(self, root: Step, setting: object, read: Callable[[Step], Step]) -> tuple[TensorDict, Step]:
        """Run the steps of a batch.

        Args:
            root: root of the first step.
            setting: further state that the steps depend on; if it has changed, they are compiled and captured again.
            read: converts a root to the form that the policy reads; not called if the batch continues the last one and
                the policy is unchanged.

        Returns:
            The batch, in newly allocated memory, and the next root.
        """
        self._setting = setting
        continues = root is self._last_root and self._is_valid() and not is_later()
        root = root if continues else read(root)
        entries, running = dict(leaves(root)), self._env.running
        keys = sorted(entries)  # roots of steps launched one after another may have another order
        names = sorted(running)  # a restored state may have another order
        given = [*(entries[key] for key in keys), *(running[name] for name in names)]
        # a step that can't be compiled uses no ids
        examples = [*given, *self._trajectories.reserve(0)] if self._compiled else given
        tensor_step = self._tensor_step if continues else self._prepare(root, keys, names, examples)
        assert tensor_step is not None
        if self._compiled:
            given += self._trajectories.reserve(self._count)
        if self._graphed is None:
            found, states, current = self._run_steps(tensor_step, self._step_inputs(tensor_step, given), root.ndim)
            written: _Tensors = [tensor.contiguous() for tensor in found]
            after: _Tensors = [tensor[0] for tensor in join_columns(tensor_step.input_layouts, [current], 0)]
        else:
            written, states, after = self._run_graphed(self._graphed, tensor_step, given, root.ndim)
        self._env.running = dict(zip(names, after[len(keys) :], strict=False))
        batch = TensorDict({}, [*root.batch_size, self._count], device=root.device)
        for key, tensor in zip(self._written, written, strict=True):
            batch.set(key, tensor)
        if self._starts is not None:
            self._store_states(self._starts, states, batch)
        if self._compiled:
            self._trajectories.advance_to(after[-_NUMBERED:])
        else:
            self._trajectories.number(batch, batch.get((NEXT, DONE)).squeeze(-1))
        batch.refine_names(..., "time")
        after_root = self._last_root = _like(root, keys, after)
        return batch, after_root

    def _is_valid(self) -> bool:
        """Return whether there is a tensor step for the current setting and policy."""
        return self._tensor_step is not None and self._guard.replaced() is None

    def _store_states(self, starts: StartStates, states: _Tensors, batch: TensorDict) -> None:
        """Store the kept states in a batch."""
        sparse = SparseStates(starts, batch.batch_size, batch.device)
        for key, found in zip(self._states, states, strict=True):
            for step, state in zip(range(0, self._count, starts.every), found, strict=True):
                sparse.write(step, ..., key, state)
        sparse.finish(batch)

    def reset(self) -> None:
        """Discard the compiled step, and free the graph."""
        self._tensor_step = self._traced = None
        if self._graphed is not None:
            self._graphed.discard()

    def _prepare(self, root: Step, keys: list[_Key], names: list[str], given: _Tensors) -> _TensorStep:
        """Return the tensor step, rebuilt unless the existing one is still valid."""
        known = self._root == (type(root), keys) and self._guard.replaced() is None
        if not known or (self._tensor_step is None and self._traced is None):
            self._begin(root, keys, names, given)
        if is_later() and self._compiled:
            raise NotCompiled("it is compiled later")
        if self._tensor_step is None:
            traced = self._traced
            assert traced is not None
            traced.compile()
            self._tensor_step = _TensorStep(traced, traced.entering, traced.leaving)
        return self._tensor_step

    def _begin(self, root: Step, keys: list[_Key], names: list[str], given: _Tensors) -> None:
        """Make the tensor step, or trace the one that is to be compiled."""

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
            if self._compiled:  # a compiled step takes tensors with the strides of those it was compiled for
                before = tensors[-_NUMBERED:]
                found[TRAJ_IDS], found[TRAJ_STEPS], _ = before
                numbered = next_trajectories(before, found[NEXT, DONE].squeeze(-1))
                current = [*(tensor.contiguous() for tensor in current), *numbered]
            states = {} if self._starts is None else self._starts.take(found)
            self._written, self._states = list(found), list(states)
            return *found.values(), *states.values(), *current

        self._tensor_step = self._traced = None
        if self._compiled:
            rows = root.batch_size[0] if root.ndim else None
            examples = [tensor.contiguous() for tensor in given]
            name = "the step of policy and environment"
            self._traced = InductorFunction(run, examples, [self._env.generator], rows, name=name)
        else:
            self._tensor_step = _TensorStep(run, [None] * len(given), None)
        self._root = type(root), keys
        self._guard.renew()
        if self._graphed is not None:
            self._graphed.discard()

    def _step_inputs(self, tensor_step: _TensorStep, given: _Tensors) -> _Tensors:
        """Return the inputs of the first step, with the strides that a compiled step expects."""
        entering = split_columns(tensor_step.input_layouts, given)
        return [tensor.contiguous() for tensor in entering] if self._compiled else entering

    def _run_steps(self, tensor_step: _TensorStep, given: _Tensors, time_dim: int) -> _Batch:
        """Run the steps from the inputs of the first one, which are not modified."""
        current: _Tensors = [torch.empty_like(tensor) for tensor in given]  # the results may alias the inputs
        _copy(current, given)
        results: list[_Tensors] = []
        for _ in range(self._count):
            results.append(tensor_step.run(*current))
            current = results[-1][-len(given) :]
        layouts = tensor_step.output_layouts or [None] * len(results[0])
        entries, states = layouts[: len(self._written)], layouts[len(self._written) :][: len(self._states)]
        written = join_columns(entries, results, time_dim)
        first = sum(1 if layout is None else layout.width for layout in entries)
        begun = [] if self._starts is None else [result[first:] for result in results[:: self._starts.every]]
        return written, join_columns(states, begun, 0), current

    def _run_graphed(
        self, graphed: GraphedFunction[list[_Tensors]], tensor_step: _TensorStep, given: _Tensors, time_dim: int
    ) -> _Batch:
        layouts = tensor_step.input_layouts
        if not graphed.captured:  # memory whose columns are contiguous
            given = [tensor[0] for tensor in join_columns(layouts, [split_columns(layouts, given)], 0)]
        written, states = graphed(*given)
        # The graph writes time-major, which is faster, and the batch is copied to separate memory here anyway.
        rows = [tensor.movedim(0, time_dim) for tensor in written]
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in rows], states, graphed.memory

    def _run_in_memory(self, *memory: Tensor) -> list[_Tensors]:
        """Run the steps from the inputs of the first one, and overwrite these with those of the next batch's first."""
        assert self._tensor_step is not None
        entering = self._step_inputs(self._tensor_step, memory)  # in the same memory
        written, states, after = self._run_steps(self._tensor_step, entering, 0)
        _copy(entering, after)
        return [written, states]


def _copy(targets: _Tensors, sources: _Tensors) -> None:
    """Copy tensors into others of the same shapes and dtypes; vectors take one launch per dtype."""
    pairs = list(zip(targets, sources, strict=True))
    vectors = [pair for pair in pairs if pair[0].ndim == 1]
    for target, source in pairs:
        if target.ndim != 1:
            target.copy_(source)
    if vectors:
        foreach_copy_(*map(list, zip(*vectors, strict=True)))


def _like(root: Step, keys: list[_Key], tensors: _Tensors) -> Step:
    """Return a root of the type of ``root`` with other tensors; surplus tensors are ignored."""
    fresh: Any = Entries({}, root.batch_size, root.device)
    if not isinstance(root, Entries):
        fresh = TensorDict({}, root.batch_size, device=root.device)
    for key, tensor in zip(keys, tensors, strict=False):
        fresh.set(key, tensor)
    return fresh


def capture_obstacle(env: EnvBase, policy: Any, *, init_random_frames: int, graph: bool, compiled: bool) -> str | None:
    """Return the reason why a collector can't compile or capture the steps of ``policy`` in ``env``, or None.

    If the environment steps on the host, only the policy can be captured.

    Example:
        >>> from recurl.envs import GymEnv
        >>> capture_obstacle(GymEnv("CartPole-v1"), None, init_random_frames=0, graph=False, compiled=True)
        'GymEnv steps on the host'
    """
    if env.tensor_env is None and (compiled or policy is None):
        return f"{type(env).__name__} steps on the host{'' if compiled else ', and there is no policy'}"
    if graph and (env.device is None or env.device.type != _DEVICE):
        return f"the environment is on {env.device}"
    devices = {tensor.device for tensor in policy.parameters()} if isinstance(policy, nn.Module) else set()
    if devices - {env.device}:
        return f"the policy is on {', '.join(sorted(map(str, devices)))}, the environment on {env.device}"
    return f"the first {init_random_frames} frames have random actions" if init_random_frames else None
