"""The algorithms: which one the options of a run ask for."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.envs import EnvBase
from recurl.trainers.agent import FlatObservation
from recurl.trainers.config import RunConfig
from recurl.trainers.dqn import DQN
from recurl.trainers.footprint import check_machine
from recurl.trainers.ppo import PPO


class RunAgent(Protocol):
    """The networks of a run."""

    flat: FlatObservation
    """Turns observations into one vector."""
    actor: TensorDictModuleBase
    """The policy that is evaluated."""
    policy: TensorDictModuleBase
    """What acts while collecting, exploration included."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over saved weights."""
        ...


class Algorithm(Protocol):
    """A learner: collects batches and learns from them."""

    reported: ClassVar[tuple[str, ...]]
    """Names of the numbers that learning returns."""
    live: ClassVar[str]
    """Format of the numbers that are shown while it learns."""
    agent: RunAgent
    """The networks."""
    env_steps: int
    """Environment steps taken."""
    can_save_env: bool
    """Whether running episodes can be saved and restored."""
    fault: str | None
    """What wasn't finite in the latest update: the steps that it concerned were not made."""

    def collect(self) -> TensorDictBase:
        """Take some steps in every environment and return the batch, ``[B, T]``."""
        ...

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn, and return numbers about it, always the same ones."""
        ...

    def restart(self, rows: Tensor) -> bool:
        """Begin new episodes in some environments, ``rows`` bool ``[B]``.

        Returns:
            Whether the next batch began before that, so that only the one after it begins anew.
        """
        ...

    def close(self) -> None:
        """Close the environments."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on, the networks under ``"agent"``."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`."""
        ...


_ALGORITHMS: dict[str, type[PPO] | type[DQN]] = {"ppo": PPO, "dqn": DQN, "r2d2": DQN}


def make_algorithm(config: RunConfig) -> Algorithm:
    """Build the learner that ``config`` describes.

    Raises:
        ArgumentError: this machine lacks the device or the memory, or the environment can't be made.
    """
    check_machine(config)
    kind: Any = _ALGORITHMS[config.algorithm]
    return kind(config)


def make_agent(config: RunConfig, env: EnvBase) -> RunAgent:
    """Build the networks for an environment of the run, untrained.

    Raises:
        ArgumentError: this machine lacks the device or the memory.
    """
    check_machine(config, learning=False)
    kind: Any = _ALGORITHMS[config.algorithm].agent_class
    return kind(config, env.observation_spec, env.action_spec_unbatched).to(config.device)
