"""Transforms that imitate sensors: observations with noise, and observations that arrive late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.keys import OBSERVATION, NestedKey, normalize_key, path_of
from recurl.core.specs import Bounded, Composite, TensorSpec, Unbounded, declare
from recurl.sequences.entries import Step, takes_entries
from recurl.transforms.base import Transform, makes_memory, merge_reset, reset_mask

_DISTRIBUTIONS = ("normal", "uniform")


class ObservationNoise(Transform):
    """Transform that adds noise to observations, drawn from torch's global generator of their device.

    The observation under ``next`` and the root of the following step are the same, and the last observation of an
    episode has noise too. All components and rows are independent.

    Args:
        scale: standard deviation of normal noise, or bound of uniform noise in ``[-scale, scale]``: a number, or a
            tensor that broadcasts to an entry of one environment, for instance one number per component.
        keys: floating-point entries.
        distribution: ``"normal"`` or ``"uniform"``.

    Raises:
        ArgumentError: ``scale`` is negative or not finite, ``keys`` is empty, there is no such distribution; or, in an
            environment, an entry is missing, isn't floating-point, or doesn't fit the shape of ``scale``.

    Example:
        >>> from recurl.envs import GymEnv
        >>> plain = GymEnv("Pendulum-v1").reset(seed=0)["observation"]
        >>> env = GymEnv("Pendulum-v1").append_transform(ObservationNoise(0.1, distribution="uniform"))
        >>> noise = env.reset(seed=0)["observation"] - plain
        >>> bool(noise.all()), bool((noise.abs() <= 0.1).all())
        (True, True)
    """

    def __init__(
        self,
        scale: float | Tensor,
        keys: Sequence[NestedKey] = (OBSERVATION,),
        distribution: Literal["normal", "uniform"] = "normal",
    ) -> None:
        super().__init__(in_keys=keys)
        if not self.in_keys:
            raise ArgumentError("ObservationNoise needs at least one entry: keys=['observation'].")
        if distribution not in _DISTRIBUTIONS:
            raise ArgumentError(f"The distribution of noise must be one of {_DISTRIBUTIONS}, got {distribution!r}.")
        self.scale = torch.as_tensor(scale)
        if not bool((self.scale.isfinite() & (self.scale >= 0)).all()):
            raise ArgumentError(f"The scale of noise must be finite and at least 0, got {scale}.")
        self.distribution = distribution
        self._scales: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # a copy at every step would wait

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the entries ``Unbounded``, or within wider bounds if the noise is uniform."""
        spec = observation_spec.clone()
        for key in self.in_keys:
            entry = _entry(spec, key, self)
            if not cast(torch.dtype, entry.dtype).is_floating_point:
                raise ArgumentError(
                    f"ObservationNoise needs floating-point entries, but {key!r} is {entry.dtype}: leave it out."
                )
            shape = entry.shape[len(spec.shape) :]
            try:
                scale = self.scale.expand(shape)
            except RuntimeError as error:
                raise ArgumentError(
                    f"The scale of noise must broadcast to each entry, but it has shape {list(self.scale.shape)} and "
                    f"{key!r} has {list(shape)}: use one ObservationNoise for each."
                ) from error
            spec.set(key, self._noisy(entry, scale))
        return spec

    def _noisy(self, entry: TensorSpec, scale: Tensor) -> TensorSpec:
        if self.distribution == "uniform" and isinstance(entry, Bounded):
            margin = scale.to(entry.low.device, entry.dtype)
            low, high = entry.low - margin, entry.high + margin
            return Bounded(low, high, entry.shape, entry.device, entry.dtype)
        return Unbounded(*entry.shape, device=entry.device, dtype=entry.dtype)

    @takes_entries
    @makes_memory
    def _apply_transform(self, value: Tensor) -> Tensor:
        kind = value.device, value.dtype
        if kind not in self._scales:
            self._scales[kind] = self.scale.to(*kind)
        noise = torch.randn_like(value) if self.distribution == "normal" else torch.rand_like(value) * 2 - 1
        return value + noise * self._scales[kind]

    def __repr__(self) -> str:
        return f"ObservationNoise(scale={self.scale.tolist()}, keys={self.in_keys}, distribution={self.distribution!r})"


class ObservationDelay(Transform):
    """Transform that replaces observations by those of some steps ago; an episode's first one is repeated until then.

    The root of step ``t`` of an episode has the observation of step ``max(t - steps, 0)``, and so has ``next``; the
    last ``steps`` observations of an episode are never seen. The observations on their way are in the state of the
    environment, as an entry ``"observation_window"``, ``[*B, steps, ...]``, for each entry ``"observation"``. They are
    in a batch, too, and saved with a collector.

    Args:
        steps: the delay in steps, at least 1; or ``(low, high)``, both included, between which each episode draws its
            own from torch's global generator: the int64 entry ``"observation_delay"``, ``[*B, 1]``.
        keys: the entries, which have the same delay.

    Raises:
        ArgumentError: the delay isn't positive, or the range is empty; ``keys`` is empty; or, in an environment, an
            entry is missing or delayed already.
        ArgumentTypeError: ``steps`` is neither an integer nor a pair of integers.
        MissingKeyError: the root to step has no window (it does not originate from a reset).

    Example:
        >>> from recurl.envs import GymEnv
        >>> env = GymEnv("Pendulum-v1").append_transform(ObservationDelay(2))
        >>> seen = env.rollout(5)["observation"]
        >>> bool((seen[0] == seen[1]).all()), bool((seen[0] == seen[2]).all()), bool((seen[2] == seen[3]).any())
        (True, True, False)
    """

    def __init__(self, steps: int | tuple[int, int], keys: Sequence[NestedKey] = (OBSERVATION,)) -> None:
        if isinstance(keys, str):
            raise ArgumentTypeError(f"keys must be a list of keys, got {keys!r}: write [{keys!r}].")
        bounds: Any = tuple(steps) if isinstance(steps, tuple | list) else (steps, steps)
        if len(bounds) != 2 or any(type(bound) is not int for bound in bounds):
            raise ArgumentTypeError(f"A delay must be a number of steps or a pair (low, high) of them, got {steps!r}.")
        self._low, self._high = bounds
        if not 0 <= self._low <= self._high or self._high < 1:
            raise ArgumentError(f"A delay must be at least 1 step, or a range from 0 or more, got {steps!r}.")
        self.keys = [normalize_key(key) for key in keys]
        if not self.keys:
            raise ArgumentError("ObservationDelay needs at least one entry: keys=['observation'].")
        self._delay_key = None if self._low == self._high else _named(self.keys[0], "delay")
        self._windows = {key: _named(key, "window") for key in self.keys}
        self._specs: dict[NestedKey, TensorSpec] = {}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec, which is unchanged."""
        # The spec of the state, which an environment asks for next, follows from those of the observations.
        self._specs = {key: _entry(observation_spec, key, self) for key in self.keys}
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Return the spec with the windows, and with the delay if each episode draws its own."""
        spec, batch = state_spec.clone(), state_spec.shape
        for key, window in self._windows.items():
            if window in spec:
                raise ArgumentError(f"The environment already has an entry {window!r}, so {key!r} is delayed already.")
            entry = self._specs[key]
            shape = (*batch, self._high, *entry.shape[len(batch) :])
            declare(spec, window, Unbounded(*shape, device=spec.device, dtype=entry.dtype))
        if self._delay_key is not None:
            declare(spec, self._delay_key, Bounded(self._low, self._high, (*batch, 1), spec.device, torch.int64))
        return spec

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask, dim = reset_mask(tensordict), len(tensordict_reset.batch_size)
        for key, window in self._windows.items():
            first = tensordict_reset[key]
            fresh = torch.stack([first] * self._high, dim)
            tensordict_reset.set(window, merge_reset(mask, fresh, tensordict_reset, window))
        if self._delay_key is not None:
            shape, device = (*tensordict_reset.batch_size, 1), tensordict_reset[self.keys[0]].device
            drawn = torch.randint(self._low, self._high + 1, shape, device=device)
            tensordict_reset.set(self._delay_key, merge_reset(mask, drawn, tensordict_reset, self._delay_key))
        return tensordict_reset

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        dim = len(tensordict.batch_size)
        for key, window in self._windows.items():
            if window not in tensordict:
                raise MissingKeyError(
                    f"The root to step lacks {window!r}: pass a root returned by env.reset() or step_mdp."
                )
            known = torch.cat((tensordict[window], next_tensordict[key].unsqueeze(dim)), dim)
            next_tensordict.set(window, known.narrow(dim, 1, self._high))
            next_tensordict.set(key, self._seen(known, dim, tensordict))
        if self._delay_key is not None:
            next_tensordict.set(self._delay_key, tensordict[self._delay_key])
        return next_tensordict

    def _seen(self, known: Tensor, dim: int, tensordict: Step) -> Tensor:
        """Return what a policy sees of the last observations ``known``, ``[*B, high + 1, ...]``, oldest first."""
        if self._delay_key is None:
            return known.select(dim, 0)
        index = self._high - tensordict[self._delay_key]
        index = index.view(*index.shape, *(1,) * (known.ndim - dim - 1)).expand(
            *known.shape[:dim], 1, *known.shape[dim + 1 :]
        )
        return known.gather(dim, index).squeeze(dim)

    def __repr__(self) -> str:
        steps = self._low if self._delay_key is None else (self._low, self._high)
        return f"ObservationDelay({steps}, keys={self.keys})"


def _entry(observation_spec: Composite, key: NestedKey, transform: Transform) -> TensorSpec:
    """Return the spec of an observation."""
    entry = observation_spec.get(key)
    if entry is None or isinstance(entry, Composite):
        entries = list(observation_spec.keys(True, True))
        raise ArgumentError(
            f"The keys of {type(transform).__name__} must be observations, but {key!r} is none; they are {entries}."
        )
    return entry


def _named(key: NestedKey, what: str) -> NestedKey:
    """Return the key next to ``key`` whose name ends with what it is."""
    *parents, name = path_of(key)
    return normalize_key((*parents, f"{name}_{what}"))
