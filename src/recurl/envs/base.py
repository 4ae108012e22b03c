"""Base class of environments: reset, step, carry, and rollout."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase

from recurl.core.devices import numbered
from recurl.core.errors import ArgumentError, MissingKeyError, UnsupportedError
from recurl.core.keys import ACTION, DONE, DONE_KEYS, NEXT, RESET, REWARD, TERMINATED, TRUNCATED
from recurl.core.ranges import checked_seed
from recurl.core.specs import Composite, TensorSpec
from recurl.envs.actions import check_choice, random_action
from recurl.envs.env_specs import EnvSpecs
from recurl.envs.in_place import InPlace
from recurl.envs.mdp import check_not_stale, check_reset, complete_done_flags, keep_policy_entries
from recurl.envs.parameters import Parameter, checked_parameters
from recurl.envs.rollout import Policy, rollout
from recurl.envs.wiring import policy_transforms
from recurl.execution.explain import Explanation, NotCompiled, reason_of
from recurl.sequences.entries import Entries, Step, StepT, leaves, like, takes_entries, unmarked
from recurl.transforms import Transform
from recurl.transforms.base import fill_reset, merge_reset, needs_copy, reset_mask

if TYPE_CHECKING:
    from recurl.envs.tensor_env import TensorEnv

_E = TypeVar("_E")


class _EnvMeta(ABCMeta):
    """Metaclass that adds ``policy=`` to every environment constructor and appends the transforms the policy needs."""

    def __call__(cls: type[_E], *args: Any, policy: Any = None, **kwargs: Any) -> _E:
        env: Any = super().__call__(*args, **kwargs)  # type: ignore[misc] # cls is the class being called
        for transform in policy_transforms(policy, env) if policy is not None else ():
            env = env.append_transform(transform)
        return env


class EnvBase(EnvSpecs, metaclass=_EnvMeta):
    """Base class of environments. :class:`~recurl.envs.EnvSpecs` provides the specs.

    A subclass passes its specs to this constructor and implements :meth:`_reset`, :meth:`_step`, and :meth:`_set_seed`.
    Every constructor also accepts ``policy=``, a module. The result is then a ``TransformedEnv`` with an
    ``InitTracker`` and the primers of the policy's recurrent modules.

    The results of ``_reset`` and ``_step`` are copied, so they may be buffers that are overwritten at every step. A
    subclass that returns new tensors from every call avoids the copies with :func:`~recurl.transforms.makes_memory`.

    Args:
        observation_spec: spec of the entries of the root and of ``next``, for one environment (no batch dimensions).
        action_spec: spec of the action, for one environment.
        reward_spec: spec of the reward, for one environment; float32 ``[1]`` when None.
        state_spec: spec of the entries other than the action that a step reads from the root, for one environment;
            empty when None.
        batch_size: number of environments stepped together: ``[]`` or ``[n]``.
        device: device of all tensors; torch's default when None.
    """

    _has_plain_reset: ClassVar[bool]  # whether maybe_reset only merges rows of _reset into the root
    full_resets = 0  # number of resets of all rows; lets a collector detect resets made elsewhere
    reads_root = True  # whether a step or a partial reset may read root entries other than action, states, and mask
    never_waits = False  # whether the device is never read; done rows are then reset without checking for any
    rows_per_env = 1  # number of consecutive rows that can only be reset together, such as the agents of an environment
    tensor_env: TensorEnv | None = None  # the environment, here or below transforms, whose state is tensors

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._has_plain_reset = cls._root is EnvBase._root and cls.maybe_reset is EnvBase.maybe_reset

    def __init__(
        self,
        *,
        observation_spec: Composite,
        action_spec: TensorSpec,
        reward_spec: TensorSpec | None = None,
        state_spec: Composite | None = None,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        size = torch.Size(batch_size)
        super().__init__(observation_spec, action_spec, reward_spec, state_spec, size, numbered(device))
        self.is_closed = False
        self._needs_copy = needs_copy(self)

    # -- for subclasses to implement; they receive TensorDicts, or any ``Step`` if marked with ``takes_entries``

    @abstractmethod
    def _reset(self, tensordict: Any) -> Any:
        """Reset the rows selected by ``tensordict["_reset"]`` (all rows if absent) and return the observations.

        The result covers all rows; rows that were not reset are ignored. ``done`` flags are not required.
        """

    @abstractmethod
    def _step(self, tensordict: Any) -> Any:
        """Execute the action and return observations, reward, ``terminated``, and ``truncated`` (or ``done``)."""

    @abstractmethod
    def _set_seed(self, seed: int) -> None:
        """Seed the environment; the seed takes effect at the next full reset."""

    def _close(self) -> None:
        """Release the environment's resources."""

    # -- interaction

    def reset(self, tensordict: TensorDictBase | None = None, seed: int | None = None) -> TensorDictBase:
        """Reset the environment and return the root of the next step: observations, states, and ``done`` flags.

        Args:
            tensordict: if it contains the mask ``"_reset"``, bool ``[*B, 1]`` or ``[*B]``, only those rows are reset;
                the other rows keep their values from ``tensordict``. Otherwise all rows are reset.
            seed: seed to set before the reset; requires a reset of all rows.

        Raises:
            ArgumentError: the mask has the wrong shape or dtype, or a seed is given along with a mask.
        """
        check_reset(tensordict, self.batch_size, seed)
        if seed is not None:
            self.set_seed(seed)
        return self._actionable(self._root(tensordict))

    @takes_entries
    def _root(self, tensordict: Step | None) -> Any:
        mask = reset_mask(tensordict)
        if tensordict is None or mask is None:
            self.full_resets += 1
            root = self._cloned_if_needed(self._reset(tensordict))
            for key in DONE_KEYS:
                root.set(key, torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device))
            return root
        # exclude() alone would share nested TensorDicts with the caller's, and they are written to below.
        root = (tensordict.copy() if self._nested else tensordict).exclude(RESET, NEXT)
        if self.never_waits or self.has_any(mask):
            fresh = self._cloned_if_needed(self._reset(tensordict))
            for key, value in leaves(fresh):
                root.set(key, merge_reset(mask, value, root, key))
        for key in DONE_KEYS:
            root.set(key, fill_reset(mask, False, root, key, (1,), torch.bool))
        return root

    def _cloned_if_needed(self, tensordict: StepT) -> StepT:
        """Return ``tensordict``, cloned if its tensors may be buffers that the next step overwrites."""
        return tensordict.clone() if self._needs_copy else tensordict

    @takes_entries
    def step(self, tensordict: StepT) -> StepT:
        """Take one step and return ``tensordict`` with ``"next"`` filled: observations, reward, done flags, and states.

        Entries that the policy has already written under ``"next"`` (its new states) are kept. ``next`` is not promoted
        to the root: continue with :func:`~recurl.envs.mdp.step_mdp` or :meth:`step_and_maybe_reset`.

        Args:
            tensordict: root of the environment's batch size, with the action.

        Raises:
            ArgumentError: the batch size doesn't match, or the action is invalid in this environment.
            MissingKeyError: the action is missing.
            UsageError: the root was already stepped and its recurrent states are stale, or a row is done.
        """
        if tensordict.batch_size != self.batch_size:
            sizes = f"{list(self.batch_size)}, the TensorDict to step has {list(tensordict.batch_size)}"
            raise ArgumentError(f"This environment has batch size {sizes}.")
        if ACTION not in tensordict:
            raise MissingKeyError("A step needs an 'action': call the policy, or env.rand_action, on the root.")
        given = tensordict.get(NEXT, None)
        if given is not None and REWARD in given:
            check_not_stale(given, self.observation_spec, self.state_spec)
        return tensordict.set(NEXT, self._next(tensordict))

    @property
    def groups(self) -> list[EnvBase]:
        """The environments that this one concatenates, in row order; they can be stepped in turn."""
        return [self]

    def begin_step(self, tensordict: Step) -> None:
        """Start a step, and the reset of the rows that it finishes, without waiting for the results.

        The next calls must be :meth:`step` with the same ``tensordict``, which waits, and :meth:`maybe_reset` on its
        :meth:`carry`. This is a no-op except in environments that run in worker processes.

        Args:
            tensordict: root of the environment's batch size, with the action.
        """

    @takes_entries
    def _next(self, tensordict: Step) -> Any:
        """Return ``next`` after the action, including the entries that the policy has already written there."""
        after = self._cloned_if_needed(self._step(tensordict))
        if DONE not in after or TERMINATED not in after or TRUNCATED not in after:
            complete_done_flags(after)
        given = tensordict.get(NEXT, None)
        if given is not None:
            keep_policy_entries(given, after)
        return after

    @takes_entries
    def carry(self, tensordict: StepT) -> StepT:
        """Return the root after a step: the observations, states, and done flags of ``next`` (shared, not copied)."""
        after: Any = tensordict[NEXT]
        if self._nested:
            return like(after, {key: after[key] for key in self._carried}, self.batch_size, self.device)
        if isinstance(after, Entries):
            kept = {key: value for key, value in after.items() if key in self._carried}
            return cast(Any, Entries(kept, self.batch_size, self.device))
        return after.exclude(*[key for key, _ in after.items() if key not in self._carried])

    @takes_entries
    def maybe_reset(self, tensordict: StepT) -> StepT:
        """Return the root ``tensordict`` with its done rows reset.

        Raises:
            UsageError: the action mask of a row allows no choice.
        """
        if not self.never_waits and not self.has_any(tensordict[DONE]):
            return self._actionable(tensordict)
        root = self._root(tensordict.set(RESET, tensordict[DONE]))
        tensordict.pop(RESET)
        return self._actionable(root)

    @takes_entries
    def advance(self, tensordict: Step) -> tuple[Any, Any]:
        """Take a step and reset the rows that are done afterwards.

        Returns:
            ``next`` after the action, and the root after the reset, valid only in the rows that were done; None if no
            row was done.
        """
        after = self._next(tensordict)
        done = after.get(DONE)
        if not self.has_any(done):
            return after, None
        root = self.carry(tensordict.set(NEXT, after))
        if self._masked or self.state_spec or not self._has_plain_reset:
            return after, self.maybe_reset(root)
        return after, self._cloned_if_needed(self._reset(root.set(RESET, done)))

    def has_any(self, rows: torch.Tensor) -> bool:
        """Return whether the mask ``rows`` selects any row, without reading it from the device if already known."""
        return bool(rows.any())

    def _actionable(self, root: StepT) -> StepT:
        """Return ``root``, from which an action will be taken; raise if its action mask allows no choice."""
        if self._masked:
            check_choice(self._action_unbatched, root)
        return root

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take a step and return ``tensordict`` with ``"next"`` filled, and the next root with its done rows reset."""
        tensordict = self.step(tensordict)
        return tensordict, self.maybe_reset(self.carry(tensordict))

    @takes_entries
    def rand_action(self, tensordict: Any = None) -> Any:
        """Write a random action, drawn from torch's global generator, to ``tensordict`` (a new one when None).

        Raises:
            MissingKeyError: the environment has action masks, and ``tensordict`` has none.
        """
        root = TensorDict({}, self.batch_size, device=self.device) if tensordict is None else tensordict
        action = random_action(self._action_unbatched, root) if self._masked else self.action_spec.rand()
        nested = isinstance(action, TensorDict) and isinstance(root, Entries)
        return root.set(ACTION, Entries.of(action) if nested else action)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Take a step with a random action, from ``tensordict`` or from a reset."""
        return self.step(self.rand_action(self.reset() if tensordict is None else tensordict))

    def rollout(
        self,
        max_steps: int,
        policy: Policy | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        auto_cast_to_device: bool = False,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
    ) -> TensorDict:
        """Run a rollout of up to ``max_steps`` steps, returned as ``[*B, T]`` with the last dimension named ``"time"``.

        Recurrent modules run in sequential mode, regardless of the current mode. ``("collector", "traj_ids")`` and
        ``("collector", "traj_steps")`` are written as by a Collector; every call uses new ids.

        Args:
            max_steps: maximum number of steps, at least 1.
            policy: maps a root to one with ``"action"``; random actions when None.
            callback: called with the environment and the TensorDict after every step.
            auto_reset: start from a reset; otherwise from ``tensordict``.
            break_when_any_done: stop as soon as a row is done. If False, done rows are reset and continue.
            break_when_all_done: (with ``break_when_any_done=False``) stop once every row has been done.
            auto_cast_to_device: call the policy on the device of its parameters.
            tensordict: root to start from if ``auto_reset`` is False.
            set_truncated: set ``truncated`` and ``done`` at the last step of rows that aren't done.

        Raises:
            ArgumentError: ``max_steps`` is below 1, both ``break_when`` flags are set, or ``tensordict`` and
                ``auto_reset`` contradict each other.
            WiringError: the policy has a state that the environment would not feed back (no primer).
            MissingKeyError: the policy reads ``is_init``, but the environment has no InitTracker.

        Example:
            >>> from recurl.envs import GymEnv
            >>> GymEnv("Pendulum-v1", num_envs=2).rollout(5)["next", "reward"].shape
            torch.Size([2, 5, 1])
        """
        if break_when_any_done and break_when_all_done:
            raise ArgumentError(
                "break_when_all_done=True needs break_when_any_done=False; otherwise the first done row stops it."
            )
        if auto_reset == (tensordict is not None):
            raise ArgumentError("A tensordict to start from and auto_reset=False must be given together, or neither.")
        return rollout(
            self,
            self.reset() if tensordict is None else tensordict,
            max_steps,
            policy,
            callback=callback,
            break_when=any if break_when_any_done else all if break_when_all_done else None,
            cast=auto_cast_to_device,
            set_truncated=set_truncated,
        )

    # -- transforms, seeds, saved states

    def explain(self) -> Explanation:
        """Explain how steps run: written into the memory of a batch, on plain tensors, or on TensorDicts.

        If neither the environment nor the policy needs a TensorDict, a collector creates none.
        """
        return Explanation("environment", {"in place": reason_of(self.in_place), "tensors": self._needs_tensordict()})

    def _needs_tensordict(self) -> str | None:
        """Return the reason why a TensorDict is needed at every step, or None."""
        return unmarked(self, "step", "carry", "maybe_reset", "rand_action", "_next", "_root", "_reset", "_step")

    def in_place(self) -> InPlace:
        """Return the in-place stepper, which writes steps into batch memory.

        A collector may use the stepper instead of :meth:`step` and :meth:`maybe_reset`.

        Raises:
            NotCompiled: there is none; the message is the reason.
        """
        raise NotCompiled(f"{type(self).__name__} makes new tensors at every step")

    def append_transform(self, transform: Transform) -> EnvBase:
        """Return this environment wrapped in a ``TransformedEnv`` with ``transform``."""
        from recurl.envs.transformed import TransformedEnv  # noqa: PLC0415 - its base class is this one

        return TransformedEnv(self, transform)

    def set_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Change parameters of the environment, such as its difficulty or the ranges of its randomization.

        Parameters of a Gymnasium environment or a simulator are the attributes of these names, or what its own method
        ``set_parameters(values)`` takes; those of a task are its dynamics' (:class:`~recurl.envs.tasks.Dynamics`).
        Running episodes go on; a parameter that is read when an episode begins counts from the next one. Parameters
        aren't part of :meth:`get_state`.

        Args:
            values: finite numbers, or lists or tuples of them, by name.

        Raises:
            ArgumentError: there is no such parameter, or a value isn't accepted.
            UnsupportedError: the environment has no parameters.
        """
        self._set_parameters(checked_parameters(values))

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        raise UnsupportedError(f"{self!r} has no parameters that can be set.")

    def set_seed(self, seed: int) -> None:
        """Seed the environment (row ``i`` of a batch with ``seed + i``); the seed takes effect at the next full reset.

        A Gymnasium environment gets the seed unchanged. A :class:`~recurl.envs.TensorEnv` derives the seed of its
        single generator (:func:`recurl.core.seeding.derive_seed`), so its draws differ from
        ``torch.manual_seed(seed)``.

        Raises:
            ArgumentError: ``seed`` is negative or not an integer.
        """
        self._set_seed(checked_seed(seed))

    @property
    def can_save_state(self) -> bool:
        """Whether :meth:`get_state` and :meth:`set_state` can save and restore the running episodes."""
        return False

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state can't be saved; None if it can."""
        return None if self.can_save_state else f"{type(self).__name__} has no get_state() and set_state()"

    def get_state(self) -> dict[str, Any]:
        """Return the state of the running episodes as tensors and plain Python values, suitable for ``torch.save``.

        Raises:
            UnsupportedError: the environment can't save its state (see :attr:`can_save_state`).
        """
        raise UnsupportedError(f"{self!r} can't save its state: {self.state_obstacle}. Reset it when resuming.")

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`, on an environment constructed the same way.

        Raises:
            UnsupportedError: the environment can't save its state.
        """
        raise UnsupportedError(f"{self!r} can't restore a state: reset it when resuming.")

    def close(self) -> None:
        """Release the environment's resources; closing twice is harmless."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def __enter__(self: _E) -> _E:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={list(self.batch_size)}, device={self.device})"
