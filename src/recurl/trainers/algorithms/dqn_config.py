"""Options of DQN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from recurl.errors import ArgumentError
from recurl.ranges import Count, Exponent, Fraction, NoBound, Whole
from recurl.trainers.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class DQNConfig(RunConfig):
    """Options of DQN: Q-learning with a recurrent network, from a replay buffer.

    Raises:
        ArgumentError: see :class:`~recurl.trainers.RunConfig`; or a burn-in as long as a slice, a buffer smaller than a
            batch, or an exploration that grows.

    Example:
        >>> config = DQNConfig(env="recurl/TMaze-v0", cell="gru", n_steps=3)
        >>> DQNConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "dqn"
    fixed: ClassVar[tuple[str, ...]] = (*RunConfig.fixed, "buffer_size")

    normalize_observations: bool = False
    """Standardise observations with running statistics, which are saved with the policy."""
    num_envs: Count = 16
    """Environments stepped side by side."""
    rollout_steps: Count = 8
    """Steps of each environment between two updates."""
    max_grad_norm: NoBound = 10.0
    """Largest norm of the gradient; inf for no bound."""
    checkpoint_every: Count = 250
    """Updates between two checkpoints, which hold the replay buffer too."""

    buffer_size: Count = 100_000
    """Capacity of the replay buffer in environment steps."""
    learning_starts: Whole = 2_000
    """Environment steps before the first update."""
    gradient_steps: Count = 4
    """Gradient steps per update."""
    slices: Count = 32
    """Slices of trajectories per gradient step."""
    slice_length: Count = 32
    """Largest number of steps in a slice; a shorter trajectory is taken whole."""
    start_state: Literal["stored", "zero"] = "stored"
    """Hidden state at the start of a slice: the one stored during collection, or zero."""
    burn_in: Whole = 0
    """Steps at the start of a slice that only update its hidden state (none where its episode begins)."""

    n_steps: Count = 1
    """Rewards summed before the bootstrap."""
    double: bool = True
    """Choose actions by the network, and take their values from the target network (double DQN)."""
    value_rescaling: bool = False
    """Learn values on a compressed scale, for returns of different magnitudes."""
    target_interval: Count = 100
    """Gradient steps between two copies of the weights to the target network."""

    eps_init: Fraction = 1.0
    """Probability of a random action at the start."""
    eps_end: Fraction = 0.05
    """Probability of a random action at the end of the exploration."""
    exploration_fraction: Fraction = 0.3
    """Fraction of the run over which that probability decays linearly."""

    prioritized: bool = False
    """Draw slices in proportion to their temporal-difference errors instead of uniformly."""
    priority_exponent: Exponent = 0.9
    """Exponent of the priorities; 0 draws uniformly."""
    importance_exponent: Exponent = 0.6
    """Exponent of the importance weights, which correct for the priorities."""
    priority_eta: Fraction = 0.9
    """Weight of a slice's largest error, against its mean error, in its priority."""

    @property
    def replay_steps(self) -> int:
        """Environment steps that the replay buffer holds."""
        return self.buffer_size

    def check(self) -> None:
        """Refuse options that don't fit together."""
        if self.burn_in >= self.slice_length:
            raise ArgumentError(
                f"--burn-in must be below --slice-length, got {self.burn_in} and {self.slice_length}: nothing is left "
                "to learn from."
            )
        if self.buffer_size < self.frames_per_batch:
            raise ArgumentError(
                f"--buffer-size must hold one batch of {self.frames_per_batch} steps, got {self.buffer_size}."
            )
        if self.eps_end > self.eps_init:
            raise ArgumentError(f"--eps-end must not exceed --eps-init, got {self.eps_end} and {self.eps_init}.")
