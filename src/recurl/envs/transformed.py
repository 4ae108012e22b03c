"""Transformed environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.keys import NEXT, RESET, REWARD, normalize_key
from recurl.core.specs import Composite
from recurl.envs.base import EnvBase
from recurl.envs.in_place import InPlace
from recurl.envs.parameters import Parameter
from recurl.execution.explain import NotCompiled
from recurl.sequences.entries import Step, leaves, like, takes_entries, unmarked
from recurl.transforms import Compose, Transform
from recurl.transforms.base import HOOKS, merge_reset, needs_copy, reset_mask, rewrites

if TYPE_CHECKING:
    from recurl.envs.tensor_env import TensorEnv


class TransformedEnv(EnvBase):
    """Environment with transforms applied to its specs, resets and steps.

    Args:
        base_env: environment to transform.
        transform: a transform or a Compose; none when None. More can be appended.

    Raises:
        ArgumentTypeError: ``base_env`` is not an environment, or ``transform`` is not a transform.
        ArgumentError: an entry would overwrite another one, or a key of a transform is not an entry of a step.

    Example:
        >>> from recurl.envs import GymEnv, InitTracker
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
        >>> sorted(env.observation_spec.keys())
        ['is_init', 'observation']
    """

    def __init__(self, base_env: EnvBase, transform: Transform | None = None) -> None:
        if not isinstance(base_env, EnvBase):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentTypeError(f"TransformedEnv wraps an environment of recurl, got {type(base_env).__name__}.")
        super().__init__(
            observation_spec=Composite(),
            action_spec=base_env.action_spec_unbatched,
            batch_size=base_env.batch_size,
            device=base_env.device,
        )
        self.base_env = base_env
        self.transform = Compose()
        if transform is not None:
            self.transform.append(transform)
        self._update_specs()

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Append ``transform`` and return this environment."""
        parts = Compose(*self.transform, transform)
        previous, self.transform = self.transform, parts
        try:
            self._update_specs()
        except Exception:
            self.transform = previous
            self._update_specs()
            raise
        return self

    def _update_specs(self) -> None:
        base, parts = self.base_env, self.transform
        self._needs_copy = any(needs_copy(part) for part in parts)
        reward = Composite({REWARD: base.reward_spec}, shape=self.batch_size, device=self.device)
        observation = parts.transform_observation_spec(base.observation_spec)
        state, done = parts.transform_state_spec(base.state_spec), parts.transform_done_spec(base.done_spec)
        self._reward = parts.transform_reward_spec(reward)[REWARD]
        self._observation, self._state, self._done = observation, state, done
        self._plan_carry()
        self._rewrites = any(map(rewrites, parts))
        for part in parts:
            self._check_keys(part)

    def _check_keys(self, part: Transform) -> None:
        """Raise if a key of a transform is not an entry of a step."""
        if not rewrites(part) or type(part)._call is not Transform._call:  # pyright: ignore[reportPrivateUsage] - the hook
            return
        specs = (self.base_env.observation_spec, self._observation, self._state, self._done)
        for name, keys, known in (("in_keys", part.in_keys, specs), ("out_keys", part.out_keys, specs[1:])):
            for key in keys:
                if key != REWARD and not any(key in spec for spec in known):
                    entries = [REWARD, *dict.fromkeys(entry for spec in known for entry in spec.keys(True, True))]
                    raise ArgumentError(
                        f"The {name} of a transform must be entries of a step, but {part!r} has {key!r}; the entries "
                        f"are {entries}. To add an entry, declare it by overriding transform_observation_spec."
                    )

    @takes_entries
    def _root(self, tensordict: Step | None) -> Any:
        mask = reset_mask(tensordict) if self._rewrites else None
        if tensordict is not None and mask is not None:
            return self._cloned_if_needed(self._partial_root(tensordict, mask))
        return self._cloned_if_needed(self.transform._reset(tensordict, self.base_env._root(tensordict)))  # type: ignore[reportPrivateUsage] # the hook

    def _partial_root(self, tensordict: Step, mask: Tensor) -> Any:
        """Reset some rows if transforms rewrite entries; the other rows are already rewritten and stay unchanged."""
        if not self.never_waits and not self.has_any(mask):
            return tensordict.copy().exclude(RESET, NEXT)
        own, states = self.base_env.observation_spec, self.base_env.state_spec
        entries = ((normalize_key(path), value) for path, value in leaves(tensordict))
        given = {key: value for key, value in entries if key not in own or key in states}
        fresh = self.base_env._root(like(tensordict, given, self.batch_size, self.device))  # type: ignore[reportPrivateUsage] # the hook
        root = self.transform._reset(tensordict, fresh)  # type: ignore[reportPrivateUsage] # the hook
        for key, value in leaves(root):
            root.set(key, merge_reset(mask, value, tensordict, key))
        return root

    @takes_entries
    def _next(self, tensordict: Step) -> Any:
        return self._cloned_if_needed(self.transform._step(tensordict, self.base_env._next(tensordict)))  # type: ignore[reportPrivateUsage] # the hook

    @property
    def groups(self) -> list[EnvBase]:
        """The groups of the base environment, each with the transforms."""
        groups = self.base_env.groups
        return [self] if len(groups) == 1 else [TransformedEnv(group, self.transform) for group in groups]

    def begin_step(self, tensordict: Step) -> None:
        """Start a step of the base environment."""
        self.base_env.begin_step(tensordict)

    def has_any(self, rows: Tensor) -> bool:
        """Return whether the mask selects any row, as determined by the base environment."""
        return self.base_env.has_any(rows)

    @property
    def full_resets(self) -> int:  # type: ignore[override] # counted by the base environment
        """Number of full resets of the base environment."""
        return self.base_env.full_resets

    @property
    def tensor_env(self) -> TensorEnv | None:  # type: ignore[override] # delegated to the base environment
        """The environment of tensors below the transforms, or None."""
        return self.base_env.tensor_env

    @property
    def rows_per_env(self) -> int:  # type: ignore[override] # delegated to the base environment
        """Number of rows that can only be reset together."""
        return self.base_env.rows_per_env

    @property
    def never_waits(self) -> bool:  # type: ignore[override] # delegated to the base environment
        """Whether the base environment never reads from its device; recurl's transforms never do."""
        return self.base_env.never_waits

    @takes_entries
    def _reset(self, tensordict: Step | None) -> Step:
        return self._root(tensordict)

    @takes_entries
    def _step(self, tensordict: Step) -> Step:
        return self._next(tensordict)

    def _needs_tensordict(self) -> str | None:
        own = super()._needs_tensordict() or self.base_env.explain()["tensors"]
        reasons = [own, *(unmarked(transform, *HOOKS) for transform in self.transform)]
        return next((reason for reason in reasons if reason), None)

    def in_place(self) -> InPlace:
        """Return the base environment's in-place stepper, if the transforms set only constants."""
        if type(self) is not TransformedEnv:
            raise NotCompiled(f"{type(self).__name__} may do more than TransformedEnv")
        if self._masked:
            raise NotCompiled("actions are masked")
        found = self.base_env.in_place()
        for transform in self.transform:
            found.add(transform)
        return found

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        self.base_env.set_parameters(values)

    def _set_seed(self, seed: int) -> None:
        self.base_env.set_seed(seed)

    def _close(self) -> None:
        self.base_env.close()

    @property
    def can_save_state(self) -> bool:
        """Whether the base environment can save its state (transforms have no state)."""
        return self.base_env.can_save_state

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state of the base environment can't be saved; None if it can."""
        return self.base_env.state_obstacle

    def get_state(self) -> dict[str, Any]:
        """Return the base environment's state."""
        return self.base_env.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the base environment's state."""
        self.base_env.set_state(state)

    def __repr__(self) -> str:
        return f"TransformedEnv({self.base_env!r}, {self.transform!r})"
