"""What the checks need of a library: a small adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recurl.conformance.script import Script


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
    """What a policy returned for a batch of observations, in arrays of one shape ``[...]``.

    Attributes:
        observations: the observations ``[..., 3]``, unaltered; zeros where an agent is absent, if it has samples.
        actions: the actions, 0 or 1.
        log_probs: log-probabilities of the actions; None if unknown, as for greedy actions.
        values: state values; None if unknown.
        advantages: advantages, of a rollout; None if unknown.
        counted: whether a sample counts in the loss; by default all do.
    """

    observations: Any
    actions: Any
    log_probs: Any = None
    values: Any = None
    advantages: Any = None
    counted: Any = None

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


class Play(Protocol):
    """Steps greedily in the environments of a script."""

    def __call__(self, script: Script, steps: int) -> Outputs:
        """Return observations and actions."""
        ...


class Agent(Protocol):
    """A recurrent actor-critic of a library with PPO, in its environments.

    Its network has a single LSTM or GRU, or what the library recommends, and sees only the observations.
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
