"""Collection in this process, with recurrent states carried across batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.acting import act_on_tensordict, explain, lowered, on_cpu, on_device
from recurl.collectors.background import CollectorBase, Extendable, units_of
from recurl.collectors.batch import BatchWriter, truncate_last
from recurl.collectors.exploring import check_thread_explores_alone, exploring
from recurl.collectors.groups import Groups, plain
from recurl.collectors.in_place import interact_and_write
from recurl.collectors.policy_checks import check_policy
from recurl.collectors.start_states import SparseStates, start_states
from recurl.collectors.weights import Weights, state_of
from recurl.core.devices import numbered
from recurl.core.errors import ArgumentTypeError, RecurlWarning, UnfitStateError, UnsupportedError, UsageError
from recurl.core.keys import NEXT
from recurl.core.spans import COLLECTION_GRAPH, span
from recurl.envs import Act, EnvBase, interact
from recurl.envs.rollout import Policy
from recurl.envs.wiring import policy_transforms
from recurl.execution.compiled import CompiledNetwork
from recurl.execution.explain import CompilerFailed, Explanation, NotCompiled
from recurl.execution.lowering import Network
from recurl.modules.actors import explain_missing_scale
from recurl.sequences.entries import Entries, Step
from recurl.sequences.mode import ExplorationType
from recurl.sequences.trajectories import TRAJECTORY_IDS, Trajectories

if TYPE_CHECKING:
    from recurl.collectors.captured import CapturedSteps
    from recurl.collectors.captured_policy import CapturedPolicy


class Collector(CollectorBase):
    """Runs a policy in an environment and yields batches ``[T]``, or ``[*B, T]`` for an environment with ``[*B]`` rows.

    A batch contains

    * at the root, the inputs and outputs of the policy,
    * under ``"next"``, the true next observation, the reward, ``done``, ``terminated`` and ``truncated``,
    * ``("collector", "traj_ids")``, int64 ``[*B, T]``: trajectory ids, unique across all collectors of the process and
      its workers (not across programs),
    * ``("collector", "traj_steps")``, int64 ``[*B, T]``: the index of the step within its trajectory, from 0.

    A token continues the previous one only if the id is the same and the index is one higher, so a batch can be indexed
    arbitrarily, or shuffled, and is still replayed correctly. Recurrent modules run in sequential mode, regardless of
    the mode outside. Their states are carried from step to step and, unless ``reset_at_each_iter``, from batch to
    batch. Every batch has its own memory.

    If environment and policy allow it, steps run on plain tensors instead of TensorDicts, which is faster and bitwise
    equal. On a CPU, supported parts of the policy run in recurl's
    C++ library, ideally with one call per step: linear layers, activations, normalization, LSTM, GRU, and the sampling
    of an action with its log-probability, from the same random numbers as torch. Results are equal up to rounding (1e-6
    in float32). If the policy is a single call, and all transforms of a ``GymEnv`` only set constants, steps run in the
    memory of the batch. :meth:`explain` says what runs, and why not something faster.

    With a replay buffer, batches are added to it instead, optionally from a background thread (:meth:`start`,
    :meth:`async_shutdown`).

    Args:
        create_env_fn: an environment, or a function that creates one.
        policy: maps a root to one with ``"action"``; random actions when None.
        frames_per_batch: number of frames per batch, summed over rows; rounded up (with a warning) to a multiple of the
            number of rows.
        total_frames: number of frames after which collection stops, rounded up (with a warning) to whole batches; -1
            for no limit.
        reset_at_each_iter: start every batch with a reset; running trajectories are cut without being marked done.
        set_truncated: set ``truncated`` and ``done`` at the last step of every batch, in rows that aren't done. The
            environment is not reset; the following steps get new trajectory ids.
        max_frames_per_traj: number of steps after which trajectories are truncated (by a StepCounter); None for no
            limit.
        init_random_frames: number of initial frames with random actions instead of the policy's.
        postproc: function applied to every batch; its result is yielded.
        replay_buffer: object whose ``extend(batch)`` receives the batches; None is yielded for each. Batches
            with more dimensions than its storage are flattened to its number of dimensions.
        auto_register_policy_transforms: append the InitTracker and the primers that the policy needs and the
            environment lacks.
        device: device of the policy, which is copied if it is on another device (see :meth:`update_policy_weights_`);
            the policy's own device when None.
        storing_device: device of the batches; that of the environment when None.
        exploration_type: exploration type of stochastic policies.
        cuda_graph: run all steps of a batch as one CUDA graph, with bitwise equal results. The first two batches are
            launched step by step, and the third is captured. Environment (a :class:`~recurl.envs.TensorEnv` with any
            transforms) and policy must be on one CUDA device and must not wait for it. With any other environment, the
            policy's step alone is captured.
        compile_step: compile the step of policy and environment (a :class:`~recurl.envs.TensorEnv` with any transforms)
            as one function, at the first batch: a few kernels instead of one per operation, with different rounding.
            Best combined with ``cuda_graph``.
        sequence_length: store recurrent states only at the starts of sequences of this many steps, to save memory; it
            must divide the steps of a row. Such a batch can be cut only into these sequences or multiples of them. All
            states are stored when None.

    Raises:
        ArgumentError: a number is out of range, or random frames would contradict stored log-probabilities.
        ArgumentTypeError: ``create_env_fn`` neither is nor creates an environment, or ``replay_buffer`` has no
            ``extend``.
        WiringError: a state of the policy would not be fed back or would not start from zero.
        MissingKeyError: the policy reads ``is_init``, but the environment does not write it.
        UnsupportedError: ``cuda_graph`` or ``compile_step`` is not possible; the message gives the reason.
        UsageError: (at the third batch) a step waits for the GPU; the message names the line.

    Example:
        >>> from recurl.envs import GymEnv
        >>> collector = Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=20, total_frames=40)
        >>> [batch.shape for batch in collector]
        [torch.Size([2, 10]), torch.Size([2, 10])]
        >>> collector.shutdown()
    """

    def __init__(  # noqa: PLR0913 - the customary arguments
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        reset_at_each_iter: bool = False,
        set_truncated: bool = False,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        postproc: Callable[[TensorDict], Any] | None = None,
        replay_buffer: Extendable | None = None,
        auto_register_policy_transforms: bool = True,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        cuda_graph: bool = False,
        compile_step: bool = False,
        sequence_length: int | None = None,
    ) -> None:
        given: Any = create_env_fn
        env: Any = given() if callable(given) and not isinstance(given, EnvBase) else given
        if not isinstance(env, EnvBase):
            raise ArgumentTypeError(
                f"create_env_fn must be an environment of recurl, or a function that creates one, got {env!r}. Use "
                "GymEnv(id) for an id, or GymWrapper(env) for a Gymnasium environment."
            )
        if max_frames_per_traj is not None:
            from recurl.transforms import StepCounter  # noqa: PLC0415 - imported where it is used

            env = env.append_transform(StepCounter(max_steps=max_frames_per_traj))
        if policy is not None and auto_register_policy_transforms:
            for transform in policy_transforms(policy, env):
                env = env.append_transform(transform)
        self.env = env
        self._original_policy = policy
        self._policy_device = numbered(device)
        self.policy = policy if policy is None else on_device(policy, self._policy_device)
        check_policy(policy, env, init_random_frames)
        rows = env.batch_size.numel()
        self.steps_per_batch = units_of("frames_per_batch", frames_per_batch, rows, f"the environment's {rows} rows")
        super().__init__(self.steps_per_batch * rows, total_frames, postproc, replay_buffer)
        self.reset_at_each_iter = reset_at_each_iter
        self.set_truncated = set_truncated
        self.init_random_frames = init_random_frames
        self.exploration_type = exploration_type
        self.storing_device = env.device if storing_device is None else numbered(storing_device)
        self._pending_weights: dict[str, Tensor] | None = None
        self._groups = Groups(env)
        self._roots: list[Step] | None = None  # one per group
        self._resets = 0
        self._trajectories = Trajectories(env.batch_size, env.device)
        self._starts = start_states(policy, sequence_length, self.steps_per_batch)
        self._capture_options = {"graph": cuda_graph, "compiled": compile_step}
        self._captured = self._make_captured()
        self._uncompiled: str | None = None  # why the step is not compiled, contrary to compile_step
        self._example: dict[tuple[str, ...], Tensor] = {}  # entries of a step of an earlier batch
        self._in_place_obstacle: str | None = ""  # no batch was collected yet

    def _make_captured(self) -> CapturedSteps | list[CapturedPolicy]:
        """Return the captured or compiled steps, or else the captured policy of each group, if any."""
        env, policy, options, steps = self.env, self.policy, self._capture_options, self.steps_per_batch
        if not any(options.values()):
            return []
        from recurl.collectors.captured import CapturedSteps, capture_obstacle  # noqa: PLC0415 - as above
        from recurl.collectors.captured_policy import CapturedPolicy, generator_of  # noqa: PLC0415 - as above

        reason = capture_obstacle(env, policy, init_random_frames=self.init_random_frames, **options)
        if reason is not None:
            compiled = options["compiled"] and not (options["graph"] and env.tensor_env)
            what, option = ("compiled", "compile_step") if compiled else ("a CUDA graph", "cuda_graph")
            raise UnsupportedError(f"Steps can't be {what}: {reason}. Collect without {option}.")
        if env.tensor_env is None:
            return [CapturedPolicy(policy, generator_of(env.device)) for _ in self._groups.envs]
        return CapturedSteps(env, policy, self._step, self._trajectories, steps, self._starts, **options)

    def _collect(self) -> TensorDict:
        pending, self._pending_weights = self._pending_weights, None
        if pending is not None:
            self._load_weights(pending)
        if self._roots is None:
            self._roots = self._groups.reset()
        elif self.reset_at_each_iter:
            self._roots = self._groups.reset()
            self._trajectories.start_new()
        elif self.env.full_resets != self._resets:
            raise UsageError(
                "The collector's environment was reset elsewhere since the last batch, for instance by a rollout, so "
                "its episodes can't continue: use another environment there, or reset_at_each_iter=True here."
            )
        self._resets = self.env.full_resets
        frames = self.frames
        with exploring(self.exploration_type):
            try:
                found = self._batch(self._roots) or self._batch(self._roots)
                assert found is not None  # the second time, nothing is compiled
                batch, self._roots = found
            except BaseException as error:
                # The environment has advanced past the old roots, and its steps since then are lost.
                self._roots, self.frames = None, frames
                self._trajectories.start_new()
                if isinstance(error, RuntimeError):
                    explain_missing_scale(error)
                raise
        self.frames = frames + self.frames_per_batch
        if self.set_truncated:
            truncate_last(batch.get(NEXT))
            self._trajectories.start_new()
        return batch

    def _batch(self, roots: list[Step]) -> tuple[TensorDict, list[Step]] | None:
        """Return a batch of steps from ``roots``, with trajectories, and the next roots.

        Where the compiler fails, which it does before the first step, return None; later batches aren't compiled.
        """
        if isinstance(self._captured, list):
            return self._launched(roots)
        try:
            with span(COLLECTION_GRAPH):
                batch, *after = self._captured(
                    roots[0], self.exploration_type, lambda root: self._policy_and_root(root)[1]
                )
        except CompilerFailed as reason:
            self._uncompiled, self._capture_options["compiled"] = str(reason), False
            self._captured = self._make_captured()
            return None
        except NotCompiled:  # yet
            return self._launched(roots)
        return batch if self.storing_device == self.env.device else batch.to(self.storing_device), after

    def _launched(self, roots: list[Step]) -> tuple[TensorDict, list[Step]]:
        """Return a batch of steps that are launched one after another, with trajectories, and the next roots."""
        batch, done, after = self._steps(roots, self.storing_device)
        self._trajectories.number(batch, done)
        return batch, after

    def _steps(
        self, roots: Sequence[Step], storing_device: torch.device | None = None
    ) -> tuple[TensorDict, Tensor, list[Step]]:
        """Return a batch of steps from ``roots``, their ``done`` on the environment's device, and the next roots."""
        network, reason = self._prepared()
        groups = self._groups
        roots = [plain(root) if reason is not None else Entries.of(root) for root in roots]
        batch = TensorDict({}, [*self.env.batch_size, self.steps_per_batch], device=storing_device)
        parts = zip(groups.envs, groups.rows, strict=True)
        states = None if self._starts is None else SparseStates(self._starts, batch.batch_size, storing_device)
        writers = [BatchWriter(batch, rows, group.batch_size, states) for group, rows in parts]
        done: list[list[Tensor]] = [[] for _ in writers]
        policies = self._policies(network, done)
        found = interact_and_write(groups.envs, policies, roots, writers, done, self._stepped, self._example)
        ended, after, self._in_place_obstacle = found
        batch.refine_names(..., "time")
        return batch, ended, after

    def _policies(self, network: Network | None, past: list[list[Tensor]]) -> list[Act | None]:
        """Return the policy of each group; ``past`` has an item for each of its completed steps."""
        groups, act = self._groups.envs, network or self.policy
        if isinstance(self._captured, list) and self._captured and act is not None:
            return [captured.begin(act, self.exploration_type) for captured in self._captured]
        if network is not None and on_cpu(self.env):
            return [CompiledNetwork(network) for _ in groups]  # each with its own memory
        if network is not None or self.policy is None:
            return [network] * len(groups)
        return [self._tensordict_policy(self.policy, group, steps) for group, steps in zip(groups, past, strict=True)]

    def _tensordict_policy(self, policy: Policy, env: EnvBase, past: list[Tensor]) -> Act:
        """Return the policy on TensorDicts, for a group that has completed ``len(past)`` steps of a batch."""
        random_steps = (self.init_random_frames - self.frames) / self.env.batch_size.numel()
        return partial(act_on_tensordict, policy, self._policy_device, env, random_steps, past)

    def _step(self, root: Step) -> tuple[Step, Step]:
        """Run a step from ``root``, and return the written entries and the next root."""
        act, root = self._policy_and_root(root)
        written: list[Step] = []
        after = interact(self.env, act, root, 1, write=lambda _, tensordict: written.append(tensordict))
        return written[0], after

    def _stepped(self, rows: int) -> None:
        """Count a step of ``rows`` rows."""
        self.frames += rows

    def explain(self) -> Explanation:
        """Explain how steps run: in place in the memory of the batch, in C++, on tensors, or on TensorDicts.

        On a CUDA device, and with ``compile_step``, also whether they are captured or compiled by Inductor.
        """
        with exploring(self.exploration_type):
            reason = self._prepared()[1]
            forms = dict(explain(self.policy, self._groups.envs[0], None if self._roots is None else self._roots[0]))
        if reason is not None:
            forms = dict.fromkeys(forms, reason)
        elif self._captured:
            forms["cpp"] = "steps are captured or compiled"
        in_place = self._in_place_obstacle
        if in_place == "":
            in_place = self.env.explain()["in place"] or forms["cpp"] or "no batch was collected yet"
        forms = {"in place": in_place, **forms}
        if self._captured:
            steps = not isinstance(self._captured, list)
            name = "CUDA graph" if self._capture_options["graph"] else "Inductor"
            forms = {f"{name} of {'all steps' if steps else 'the policy'}": None, **forms}
        if self._uncompiled is not None:
            forms = {"Inductor of all steps": self._uncompiled, **forms}
        return Explanation("steps", forms)

    def _prepared(self) -> tuple[Network | None, str | None]:
        """Return the lowered policy for the next batch, and the reason why it needs TensorDicts, or None."""
        if self._policy_device is not None and self._policy_device != self.env.device:
            reason = f"the policy is on {self._policy_device}, the environment on {self.env.device}"
        elif self.frames < self.init_random_frames:
            reason = f"the first {self.init_random_frames} frames have random actions"
        else:
            network, reason = lowered(self.policy, self._groups.envs[0])
            if reason is None:
                return network, None
        return None, reason

    def _policy_and_root(self, root: Step) -> tuple[Act | None, Step]:
        """Return the policy of a step, and ``root`` in the form that it reads."""
        network, reason = self._prepared()
        if reason is None:
            return network, Entries.of(root)
        return None if self.policy is None else self._tensordict_policy(self.policy, self.env, []), plain(root)

    def _prepare_background(self) -> None:
        check_thread_explores_alone()
        if self.policy is self._original_policy and isinstance(self.policy, nn.Module):
            self.policy = copy.deepcopy(self.policy)
            self._captured = self._make_captured()

    def update_policy_weights_(self, weights: Weights | None = None) -> None:
        """Update the weights of the collecting policy; in the background, starting with its next batch.

        Args:
            weights: module, state dict, or TensorDict of parameters to copy from; when None, the policy passed to the
                constructor (no effect if the collector uses that object itself).

        Raises:
            UsageError: the policy is not a module and has no weights.
        """
        self._raise_background_error()
        source = self._original_policy if weights is None else weights
        if source is self.policy:
            return
        if not isinstance(self.policy, nn.Module):
            raise UsageError(f"Only an nn.Module has weights to update, got a policy {type(self.policy).__name__}.")
        state = state_of(source)
        if self.running:
            self._pending_weights = {name: value.detach().clone() for name, value in state.items()}
        else:
            self._load_weights(state)

    def _load_weights(self, state: dict[str, Tensor]) -> None:
        assert isinstance(self.policy, nn.Module)
        self.policy.load_state_dict(state)

    def reset_rows(self, rows: Tensor) -> None:
        """Begin new episodes in some rows, with new trajectory ids and zero states.

        The running episodes are cut without being marked done.

        Args:
            rows: mask of the rows to reset, bool ``[*B]``.
        """
        self._check_idle()
        if self._roots is not None:
            self._roots = self._groups.reset_rows(self._roots, rows)
        self._trajectories.start_new_rows(rows)

    def set_seed(self, seed: int) -> None:
        """Seed the environment; takes effect at its next full reset."""
        self._between_batches(lambda: self.env.set_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for exact continuation: carried states, trajectories, frames, environment.

        It consists of tensors and plain Python values. If the environment can't save its state, ``"env"`` is None and
        ``"obstacle"`` is the reason. Weights and torch's random generator are not included. In the background, it is
        taken between two batches.
        """
        return self._between_batches(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        env, obstacle = self._env_state() if self._roots is not None else (None, None)
        return {
            "frames": self.frames,
            **self._trajectories.state_dict(),
            "root": self._groups.joined(self._roots).to_dict() if env is not None and self._roots is not None else None,
            "env": env,
            "obstacle": obstacle,
        }

    def _env_state(self) -> tuple[dict[str, Any] | None, str | None]:
        """Return the environment's state, or the reason why it can't be saved, which may appear only during a run."""
        if not self.env.can_save_state:
            return None, self.env.state_obstacle
        try:
            return self.env.get_state(), None
        except UnsupportedError as error:
            warnings.warn(f"{error} A run that resumes from here begins new episodes.", RecurlWarning, stacklevel=4)
            return None, str(error)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the environment's state was restored. If not (it wasn't saved, or is incompatible, with a warning
            that gives the reason), the next batch starts with a reset and new trajectories.
        """
        self._check_idle()
        self.frames = state["frames"]
        restored = self._restore_env(state["env"])
        TRAJECTORY_IDS.skip(state["traj_ids"])
        self._roots = None
        if restored:
            root = TensorDict.from_dict(state["root"], batch_size=self.env.batch_size, device=self.env.device)
            self._roots = self._groups.split(root)
            self._resets = self.env.full_resets
            self._trajectories.load_state_dict(state)
        else:
            self._trajectories.start_new()
        return restored

    def _restore_env(self, state: dict[str, Any] | None) -> bool:
        if state is None:
            return False
        try:
            self.env.set_state(state)
        except UnfitStateError as error:
            warnings.warn(f"The state of the environment can't be restored: {error}", RecurlWarning, stacklevel=3)
            return False
        return True

    def _close(self) -> None:
        for captured in self._captured if isinstance(self._captured, list) else [self._captured]:
            captured.reset()
        self.env.close()
