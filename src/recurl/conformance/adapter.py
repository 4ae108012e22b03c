"""What the checks need of a library: a small adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recurl.conformance.script import ACTIONS, FEATURES, Script


class NotOffered(Exception):
    """A library doesn't offer what a check needs; the message says what."""


@dataclass(frozen=True)
class Setup:
    """How an agent collects and learns.

    Attributes:
        script: the environments.
        steps: steps per environment in a rollout.
        epochs: passes over a rollout in an update.
        minibatches: minibatches of a pass.
        learning_rate: step size; at 0 an update leaves the parameters unchanged.
        seed: seed of initial parameters and actions: equal seeds give equal parameters.
    """

    script: Script
    steps: int = 8
    epochs: int = 1
    minibatches: int = 1
    learning_rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Outputs:
    """What a policy returned for a batch of observations, as arrays or tensors ``[...]``, which are copied.

    Attributes:
        observations: the observations ``[..., 3]``, unaltered; zeros where an agent is absent, if it has samples.
        actions: the actions, 0 or 1.
        log_probs: log-probabilities of the actions; None if unknown, as for greedy actions.
        values: state values; None if unknown.
        advantages: advantages, of a rollout; None if unknown. Those of a minibatch, before normalization, must be those
            of its steps in the rollout.
        counted: whether a sample counts in the loss; by default all do.

    Raises:
        ValueError: an entry has another number of samples, observations don't have 3 numbers, or an action is neither 0
            nor 1.

    Example:
        >>> Outputs(observations=np.ones((4, 2, 3)), actions=np.zeros(8), values=np.zeros((4, 1)))
        Traceback (most recent call last):
        ValueError: Outputs.values must have a number for each of the 8 observations, got the shape (4, 1).
    """

    observations: Any
    actions: Any
    log_probs: Any = None
    values: Any = None
    advantages: Any = None
    counted: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _array(value))
        shape = self.observations.shape
        if shape[-1:] != (FEATURES,):
            raise ValueError(f"Outputs.observations must have the shape [..., {FEATURES}], got {shape}.")
        size = self.observations.size // FEATURES
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and value.size != size:
                raise ValueError(
                    f"Outputs.{field.name} must have a number for each of the {size} observations, got the shape "
                    f"{value.shape}."
                )
        taken = self.flat("actions")
        if not np.isin(taken, range(ACTIONS)).all():
            raise ValueError(f"Outputs.actions must be 0 or 1, got {np.unique(taken)[:5]}.")

    def flat(self, name: str) -> NDArray[np.float64]:
        """Return an entry as float64 numbers ``[N]``, without samples that don't count and those of absent agents."""
        values = np.asarray(getattr(self, name), np.float64).reshape(-1)
        return values[self.mask]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether each sample counts and isn't one of an absent agent, ``[M]``."""
        return self._counts & self._all_seen.any(-1)

    @property
    def absent(self) -> int:
        """Number of samples of absent agents that count."""
        return int((self._counts & ~self._all_seen.any(-1)).sum())

    @property
    def seen(self) -> NDArray[np.float32]:
        """Observations of the samples in :attr:`mask`, ``[N, 3]``."""
        return self._all_seen[self.mask]

    @property
    def _all_seen(self) -> NDArray[np.float32]:
        observations = np.asarray(self.observations, np.float32)
        return observations.reshape(-1, observations.shape[-1])

    @property
    def _counts(self) -> NDArray[np.bool_]:
        size = np.asarray(self.actions).size
        return np.ones(size, bool) if self.counted is None else np.asarray(self.counted).astype(bool).reshape(-1)


def _array(value: Any) -> NDArray[Any]:
    """Copy an array, or a tensor of PyTorch, also of another device or one that requires gradients."""
    return np.array(np.asarray(value.detach().cpu() if hasattr(value, "detach") else value))


class Play(Protocol):
    """Steps greedily in the environments of a script."""

    def __call__(self, script: Script, steps: int) -> Outputs:
        """Return observations and actions."""
        ...


class Agent(Protocol):
    """A recurrent actor-critic of a library with PPO, in its environments.

    Its network has a single LSTM or GRU, or what the library recommends, and sees only the observations. Its memory
    must show in its probabilities: scale the weights of the actor's last layer by 1 rather than by 0.01. Methods
    without counterpart in the library raise :exc:`NotOffered`.
    """

    def collect(self) -> Outputs:
        """Collect a rollout as the library does, continuing the previous one, and compute its advantages."""
        ...

    def learn(self) -> list[Outputs]:
        """Update from the last rollout as the library does.

        Returns:
            What the policy returned for each minibatch, in order, before its gradient step.
        """
        ...

    def play(self, script: Script, steps: int) -> Outputs:
        """Step greedily in other environments, one per row of ``script``, with the library's interface for evaluation.

        Raises:
            NotOffered: the library has none.
        """
        ...

    def save(self, path: Path) -> None:
        """Save the agent, in the library's format.

        Raises:
            NotOffered: the library has none.
        """
        ...

    def load(self, path: Path) -> None:
        """Load a saved agent into this one, with its own environments."""
        ...

    def export(self, path: Path) -> Play:
        """Export the greedy policy as a file that runs without the library, and return a function that plays with it.

        Raises:
            NotOffered: the library has no export of recurrent policies.
        """
        ...

    def close(self) -> None:
        """Release environments and processes."""
        ...


class Adapter(Protocol):
    """A library under test.

    Attributes:
        gamma: discount of its agents.
        lmbda: parameter of generalized advantage estimation.
        versions: versions of the packages under test.
        documented: failures that the library documents as its behavior: names of checks, and where it says so.
        no_agents: optional: why the library can't train in environments of several agents; ``""`` if it can.
    """

    gamma: float
    lmbda: float
    versions: Mapping[str, str]
    documented: Mapping[str, str]

    def make(self, setup: Setup) -> Agent:
        """Create an agent."""
        ...
