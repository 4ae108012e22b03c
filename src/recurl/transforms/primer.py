"""Transform that declares the entries a policy carries from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.keys import NestedKey
from recurl.core.specs import Composite, TensorSpec, declare
from recurl.sequences.entries import Step, takes_entries
from recurl.transforms.base import Constant, Transform, fill_reset, makes_memory, merge_reset, reset_mask


class TensorDictPrimer(Transform):
    """Transform that declares entries such as recurrent states, which are carried from ``next`` to the next root.

    At a reset, the entries get their default (or a random) value in the rows that are reset. At a step, an entry that
    the policy wrote under ``next`` is kept; any other is copied from the root. Appending a primer twice is harmless.

    Args:
        primers: mapping from keys to specs of one environment, without batch dimensions (with them if
            ``expand_specs=False``).
        random: draw values from the specs at resets instead of using ``default_value``.
        default_value: value at resets.
        expand_specs: prepend the environment's batch dimensions to the specs.
        **kwargs: further entries.

    Raises:
        ArgumentError: ``random`` and ``default_value`` are both given, no entry is given, or the environment already
            declares an entry of the same name with another shape or dtype.
        ArgumentTypeError: an entry is not a spec.

    Example:
        >>> from recurl.envs import GymEnv, TransformedEnv
        >>> from recurl.core.specs import Unbounded
        >>> env = TransformedEnv(GymEnv("CartPole-v1", num_envs=2), TensorDictPrimer(hidden=Unbounded(1, 16)))
        >>> env.reset()["hidden"].shape
        torch.Size([2, 1, 16])
    """

    def __init__(
        self,
        primers: Mapping[Any, Any] | Composite | None = None,
        random: bool = False,
        default_value: float = 0.0,
        expand_specs: bool = True,
        **kwargs: TensorSpec,
    ) -> None:
        if random and default_value != 0.0:
            raise ArgumentError(f"random=True can't be used with default_value={default_value}: give one of them.")
        self.primers = primers.clone() if isinstance(primers, Composite) else _as_composite(primers)
        for key, spec in kwargs.items():
            self.primers.set(key, spec)
        if not len(self.primers):
            raise ArgumentError("A TensorDictPrimer needs at least one entry: TensorDictPrimer({key: spec}).")
        self.random = random
        self.default_value = default_value
        self.expand_specs = expand_specs
        self._specs: list[tuple[NestedKey, TensorSpec]] = list(self.primers.items(True, True))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the declared entries."""
        return self._declare(observation_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Return the spec with the declared entries."""
        return self._declare(state_spec)

    def _declare(self, target: Composite) -> Composite:
        target = target.clone()
        for key, spec in self._specs:
            if self.expand_specs:
                spec = spec.expand(*target.shape, *spec.shape)
            elif spec.shape[: len(target.shape)] != target.shape:
                raise ArgumentError(
                    f"With expand_specs=False the primer {key!r} must start with the environment's batch size "
                    f"{list(target.shape)}, got shape {list(spec.shape)}."
                )
            declare(target, key, spec)
        return target

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask = reset_mask(tensordict)
        batch = tensordict_reset.batch_size
        for key, spec in self._specs:
            shape = spec.shape if self.expand_specs else spec.shape[len(batch) :]
            if self.random:
                drawn = (spec.expand(*batch, *shape) if self.expand_specs else spec).rand().to(tensordict_reset.device)
                value = merge_reset(mask, drawn, tensordict_reset, key)
            else:
                value = fill_reset(mask, self.default_value, tensordict_reset, key, shape, spec.dtype)
            tensordict_reset.set(key, value)
        return tensordict_reset

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        for key, _ in self._specs:
            if key not in next_tensordict:
                if key not in tensordict:
                    raise MissingKeyError(
                        f"The root to step lacks the entry {key!r}, which a TensorDictPrimer declares: pass a root "
                        "returned by env.reset() or step_mdp."
                    )
                next_tensordict.set(key, tensordict[key])
        return next_tensordict

    def constants(self) -> list[Constant] | None:
        """Return the declared entries, or None if they are drawn at random."""
        return None if self.random else [Constant(key, self.default_value, None) for key, _ in self._specs]

    def __repr__(self) -> str:
        return f"TensorDictPrimer({', '.join(str(key) for key, _ in self._specs)})"


def _as_composite(primers: Mapping[Any, Any] | None) -> Composite:
    if primers is not None and not isinstance(primers, Mapping):  # type: ignore[reportUnnecessaryIsInstance] # users
        raise ArgumentTypeError(f"primers must map keys to specs, got {type(primers).__name__}.")
    return Composite(primers)
