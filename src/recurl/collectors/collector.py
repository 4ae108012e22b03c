"""Collection in this process: an environment, a policy, and batches with the policy's states carried across them."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from recurl.collectors.batch import BatchWriter
from recurl.envs import EnvBase, StepCounter, interact
from recurl.envs.transformed import TransformedEnv
from recurl.envs.utils import check_policy_wiring, policy_transforms
from recurl.errors import ArgumentError, ArgumentTypeError, UsageError, WiringError
from recurl.keys import ACTION, DONE, NEXT, TRUNCATED
from recurl.mode import ExplorationType, set_exploration_type
from recurl.modules import recurrent_modules
from recurl.modules.actors import explain_missing_scale
from recurl.specs import OneHot
from recurl.transforms import TensorDictPrimer

Policy: TypeAlias = Callable[[TensorDictBase], TensorDictBase]


class _TrajectoryIds:
    """Hands out ids that no two trajectories of this process share."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def take(self, shape: torch.Size, device: torch.device | None) -> Tensor:
        """Return new ids, int64 of ``shape``."""
        count = shape.numel()
        with self._lock:
            first, self._next = self._next, self._next + count
        return torch.arange(first, first + count, device=device).reshape(shape)

    def skip(self, used: Tensor) -> None:
        """Never hand out ``used`` ids."""
        with self._lock:
            self._next = max(self._next, int(used.max()) + 1)


_IDS = _TrajectoryIds()


class Collector:
    """Steps a policy in an environment and yields batches ``[T]``, or ``[*B, T]`` for an environment of ``[*B]`` rows.

    A batch holds at the root what the policy saw and wrote, under ``"next"`` what came of it (with the true final
    observation and the reward, and ``done``, ``terminated``, ``truncated``), and ``("collector", "traj_ids")``: int64
    ``[*B, T]``, unique over all collectors of the process. Recurrent modules always step sequentially, whatever the
    mode outside. Their states are carried from step to step and, unless ``reset_at_each_iter``, from batch to batch.
    Every batch has memory of its own.

    Args:
        create_env_fn: an environment, or a callable that makes one.
        policy: maps a root to one with ``"action"``; random actions when None.
        frames_per_batch: steps per batch, summed over rows; rounded up (with a warning) to a multiple of the rows.
        total_frames: stop after this many; -1: never. Rounded up (with a warning) to whole batches.
        reset_at_each_iter: start every batch with a reset; the running trajectories are cut without being marked done.
        set_truncated: mark the last step of every batch truncated (and done) in rows that aren't done. The environment
            goes on; what follows gets new trajectory ids.
        max_frames_per_traj: truncate trajectories after this many steps (appends a StepCounter).
        init_random_frames: so many frames at first have random actions in the place of the policy's.
        postproc: called with every batch; what it returns is yielded.
        auto_register_policy_transforms: append the InitTracker and the primers that the policy needs and the
            environment lacks.
        device: where the policy runs; a policy elsewhere is copied there (see :meth:`update_policy_weights_`).
        storing_device: where batches are stored; by default where the environment is.
        exploration_type: how stochastic policies act.

    Raises:
        ArgumentError: a count is out of range, or random frames would contradict recorded log-probabilities.
        ArgumentTypeError: ``create_env_fn`` gives no environment.
        WiringError: a state of the policy would never be fed back, or would not start from zero.
        MissingKeyError: the policy reads ``is_init`` and nothing writes it.

    Example:
        >>> from recurl.envs import GymEnv
        >>> collector = Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=20, total_frames=40)
        >>> [batch.shape for batch in collector]
        [torch.Size([2, 10]), torch.Size([2, 10])]
        >>> collector.shutdown()
    """

    def __init__(  # noqa: PLR0913 - the field's arguments
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
        auto_register_policy_transforms: bool = True,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
    ) -> None:
        env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn()
        if not isinstance(env, EnvBase):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(f"create_env_fn must be, or make, an environment of recurl; got {env!r}.")
        if max_frames_per_traj is not None:
            env = env.append_transform(StepCounter(max_steps=max_frames_per_traj))
        if policy is not None and auto_register_policy_transforms:
            for transform in policy_transforms(policy, env):
                env = env.append_transform(transform)
        self.env = env
        self._original_policy = policy
        self._policy_device = None if device is None else torch.device(device)
        self.policy = policy if policy is None else _on_device(policy, self._policy_device)
        _check_policy(policy, env, init_random_frames)
        rows = env.batch_size.numel()
        self.steps_per_batch = _whole("frames_per_batch", frames_per_batch, rows, f"the environment's {rows} rows")
        self.frames_per_batch = self.steps_per_batch * rows
        if total_frames != -1:
            batch = f"batches of {self.frames_per_batch} frames"
            total_frames = _whole("total_frames", total_frames, self.frames_per_batch, batch) * self.frames_per_batch
        self.total_frames = total_frames
        self.reset_at_each_iter = reset_at_each_iter
        self.set_truncated = set_truncated
        self.init_random_frames = init_random_frames
        self.postproc = postproc
        self.exploration_type = exploration_type
        self.storing_device = env.device if storing_device is None else torch.device(storing_device)
        self.frames = 0
        self.closed = False
        self._root: TensorDictBase | None = None
        self._traj_ids = self._new_ids()

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are collected; iterating again goes on from there.

        Raises:
            UsageError: the collector was shut down.
        """
        self._check_open()
        while self.total_frames == -1 or self.frames < self.total_frames:
            batch = self.collect()
            yield batch if self.postproc is None else self.postproc(batch)

    def collect(self) -> TensorDict:
        """Collect and return one batch, whatever ``total_frames``.

        Raises:
            UsageError: the collector was shut down, or a step writes other entries than the first.
        """
        self._check_open()
        if self._root is None:
            self._root = self.env.reset()
        elif self.reset_at_each_iter:
            self._root, self._traj_ids = self.env.reset(), self._new_ids()
        writer = BatchWriter(self.env.batch_size, self.steps_per_batch, self.storing_device)

        def write(step: int, tensordict: TensorDictBase) -> None:
            writer.write(step, tensordict, self._traj_ids)
            done = tensordict.get(NEXT).get(DONE)
            if done.any():
                self._traj_ids = torch.where(done.squeeze(-1), self._new_ids(), self._traj_ids)
            self.frames += self._traj_ids.numel()

        policy = None if self.policy is None else self._act
        with set_exploration_type(self.exploration_type):
            try:
                self._root = interact(self.env, policy, self._root, self.steps_per_batch, write=write)
            except RuntimeError as error:
                explain_missing_scale(error)
                raise
        batch = writer.finish()
        if self.set_truncated:
            _truncate_last(batch.get(NEXT))
            self._traj_ids = self._new_ids()
        return batch

    def _act(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert self.policy is not None
        if self._policy_device is not None and self._policy_device != self.env.device:
            tensordict = self.policy(tensordict.to(self._policy_device))
            tensordict = tensordict.to(self.env.device or "cpu")
        else:
            tensordict = self.policy(tensordict)
        if self.frames < self.init_random_frames:
            tensordict.set(ACTION, self._random_action(tensordict.get(ACTION)))
        return tensordict

    def _random_action(self, like: Tensor) -> Tensor:
        """Draw an action in the encoding (one-hot or integer) that the policy uses."""
        spec, action = self.env.action_spec, self.env.action_spec.rand()
        if isinstance(spec, OneHot) and like.shape == self.env.batch_size:
            return action.argmax(-1).to(like.dtype)
        if action.shape != like.shape and like.shape[:-1] == action.shape:
            return F.one_hot(action, like.shape[-1]).to(like.dtype)
        return action

    def _new_ids(self) -> Tensor:
        return _IDS.take(self.env.batch_size, self.env.device)

    def update_policy_weights_(self, weights: nn.Module | TensorDictBase | dict[str, Tensor] | None = None) -> None:
        """Bring the collecting policy up to date.

        Args:
            weights: a module, a state dict, or a TensorDict of parameters to copy from. When None, the policy that
                was given to the constructor; this does nothing when collection uses that very object.

        Raises:
            UsageError: the policy is not a module, so it has no weights.
        """
        source = self._original_policy if weights is None else weights
        if source is self.policy:
            return
        if not isinstance(self.policy, nn.Module):
            raise UsageError("Weights can only be updated in a policy that is an nn.Module.")
        if isinstance(source, TensorDictBase):
            source = source.flatten_keys(".").to_dict()
        state = source.state_dict() if isinstance(source, nn.Module) else source
        self.policy.load_state_dict(state)  # pyright: ignore[reportArgumentType] - what is wrong raises there

    def set_seed(self, seed: int) -> None:
        """Seed the environment; takes effect at its next full reset."""
        self.env.set_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on exactly from here: carried states, trajectories, frames, environment.

        All is tensors and plain Python values. ``"env"`` is None when the environment can't save its state. Weights
        and torch's random generator are not in it.
        """
        saves = self._root is not None and self.env.can_save_state
        return {
            "frames": self.frames,
            "traj_ids": self._traj_ids.clone(),
            "root": self._root.to_dict() if saves and self._root is not None else None,
            "env": self.env.get_state() if saves else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from what :meth:`state_dict` returned.

        Returns:
            Whether the environment's state was restored. If not (it can't save its state), the next batch starts with
            a reset and new trajectories.
        """
        global _trajectories
        self.frames = state["frames"]
        restored = state["env"] is not None
        if restored:
            self.env.set_state(state["env"])
            self._root = TensorDict.from_dict(state["root"], batch_size=self.env.batch_size, device=self.env.device)
            self._traj_ids = state["traj_ids"].clone()
            _IDS.skip(self._traj_ids)
        else:
            self._root, self._traj_ids = None, self._new_ids()
        return restored

    def shutdown(self) -> None:
        """Close the environment; shutting down twice does no harm."""
        self.closed = True
        self.env.close()

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("This collector was shut down: make a new one to collect more.")

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _truncate_last(after: TensorDictBase) -> None:
    done = after.get(DONE)[..., -1, :]
    after.get(TRUNCATED)[..., -1, :].logical_or_(~done)
    done.fill_(True)


def _whole(name: str, frames: int, unit: int, of: str) -> int:
    """Return how many units ``frames`` are, rounded up with a warning."""
    if frames < 1:
        raise ArgumentError(f"{name} must be at least 1, got {frames}.")
    count = -(-frames // unit)
    if count * unit != frames:
        warnings.warn(f"{name}={frames} is no multiple of {of}: {count * unit} will be collected.", stacklevel=3)
    return count


def _on_device(policy: Policy, device: torch.device | None) -> Policy:
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = itertools.chain(policy.parameters(), policy.buffers())
    if all(tensor.device.type == device.type and device.index in (None, tensor.device.index) for tensor in tensors):
        return policy
    return copy.deepcopy(policy).to(device)


def _check_policy(policy: Policy | None, env: EnvBase, init_random_frames: int) -> None:
    if policy is None:
        return
    modules = recurrent_modules(policy) if isinstance(policy, nn.Module) else []
    if any(module.net.bidirectional for module in modules):
        raise WiringError("A bidirectional module can't step in an environment: use it on whole sequences only.")
    check_policy_wiring(policy, env)
    states = {key for module in modules for key in module.state_keys}
    for transform in env.transform if isinstance(env, TransformedEnv) else ():
        if isinstance(transform, TensorDictPrimer) and (transform.random or transform.default_value != 0.0):
            wrong = sorted(str(key) for key in states & set(transform.primers.keys(True, True)))
            if wrong:
                raise WiringError(
                    f"The primer of {', '.join(wrong)} must be zero: a step with is_init starts from zero, while a "
                    "replay starts from the stored state. Use make_tensordict_primer()."
                )
    if init_random_frames < 0:
        raise ArgumentError(f"init_random_frames must not be negative, got {init_random_frames}.")
    written = [str(key) for key in getattr(policy, "out_keys", ()) if str(key).endswith("log_prob")]
    if init_random_frames and written:
        raise ArgumentError(
            f"init_random_frames={init_random_frames} would pair random actions with the policy's {written[0]!r}: "
            "build the policy with return_log_prob=False."
        )
