"""Options of the algorithms that learn from a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from recurl.errors import ArgumentError
from recurl.ranges import Count, Exponent, Fraction, NoBound, Positive, Whole
from recurl.trainers.algorithms.programs_config import ProgramsConfig


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(ProgramsConfig):
    """Options of the algorithms that learn from slices of replayed trajectories.

    Raises:
        ArgumentError: see :class:`ProgramsConfig`; or a burn-in as long as a slice, a buffer smaller than a batch, or
            options that draws on the device don't have.
    """

    fixed: ClassVar[tuple[str, ...]] = (*ProgramsConfig.fixed, "buffer_size")
    usual_lag: ClassVar[int] = 1

    learning_rate: Positive = 5e-4
    """Step size of Adam, at the start."""
    num_envs: Count = 16
    """Environments stepped side by side."""
    rollout_steps: Count = 8
    """Steps of each environment between two updates."""
    head_width: Whole = 64
    """Width of a hidden layer between the memory and each output; 0 for none, but critics of real actions have one."""
    max_grad_norm: NoBound = 10.0
    """Largest norm of the gradient; inf for no bound."""
    checkpoint_every: Count = 250
    """Updates between two checkpoints, which hold the replay buffer too."""

    buffer_size: Count = 100_000
    """Capacity of the replay buffer in environment steps."""
    learning_starts: Whole = 2_000
    """Environment steps before the first update."""
    gradient_steps: Count = 16
    """Gradient steps per update."""
    slices: Count = 32
    """Slices of trajectories per gradient step."""
    slice_length: Count = 32
    """Largest number of steps in a slice; a shorter trajectory is taken whole."""
    drawn_by: Literal["step", "trajectory"] = "step"
    """How slices are drawn: a step, and a slice that holds it; or a trajectory, all alike, and a slice within it (with
    priorities: a slice by its first step), which makes the ends of long episodes rare."""
    drawn_on: Literal["auto", "host", "device"] = "auto"
    """Where slices are drawn and priorities kept: on the host, or on the device of the run, which then never waits for
    the host; shorter slices are padded there. auto takes the device with --cuda-graph or --compile."""
    start_state: Literal["stored", "zero"] = "stored"
    """Hidden state at the start of a slice: the one stored during collection, or zero."""
    burn_in: Whole | None = 0
    """Steps at the start of a slice that only update its hidden state (none where its episode begins); none
    stands for a quarter of the slice."""
    refresh_states: bool = False
    """Store the hidden states that the current networks compute along a slice, before they learn from it."""
    scale_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return, as it is when they are learnt from."""
    n_steps: Count = 1
    """Rewards summed before the bootstrap."""

    prioritized: bool = False
    """Draw slices in proportion to their temporal-difference errors instead of uniformly."""
    priority_exponent: Exponent = 0.6
    """Exponent of the priorities; 0 draws uniformly."""
    importance_exponent: Exponent = 1.0
    """Exponent of the importance weights, which correct for the priorities; 1 corrects them wholly."""
    priority_eta: Fraction = 0.9
    """Weight of a slice's largest error, against its mean error, in its priority."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`RunConfig.complete`."""
        of_old = "priority_eta" in values and "drawn_by" not in values
        return super().complete({"head_width": 0, "drawn_by": "trajectory", **values} if of_old else values)

    @property
    def replay_steps(self) -> int:
        """Environment steps that the replay buffer holds."""
        return self.buffer_size

    @property
    def burn_in_steps(self) -> int:
        """Steps at the start of a slice that only update its hidden state."""
        return self.slice_length // 4 if self.burn_in is None else self.burn_in

    @property
    def draws_on_device(self) -> bool:
        """Whether slices are drawn on the device of the run."""
        return self.drawn_on == "device" or (self.drawn_on == "auto" and (self.cuda_graph or self.compile))

    def check(self) -> None:
        """Refuse options that don't fit together."""
        super().check()
        if (self.cuda_graph or self.compile) and self.drawn_on == "host":
            raise ArgumentError(
                "--cuda-graph and --compile need slices of one length, which --drawn-on device gives: leave --drawn-on "
                "host out."
            )
        if self.refresh_states and self.draws_on_device:
            raise ArgumentError(
                "--refresh-states needs --drawn-on host, without --cuda-graph and --compile: slices overlap, and on a "
                "device the state that a step would get from them is not determined."
            )
        if self.burn_in_steps >= self.slice_length:
            raise ArgumentError(
                f"--burn-in must be below --slice-length, got {self.burn_in_steps} and {self.slice_length}: nothing is "
                "left to learn from."
            )
        if self.refresh_states and self.backend in ("auto", "pad"):
            raise ArgumentError(
                "--refresh-states needs the hidden state after every step, but --backend pad, which auto may choose, "
                f"returns it at segment ends only: take fastest or loop, got {self.backend}."
            )
        if self.refresh_states and self.start_state != "stored":
            raise ArgumentError(
                "--refresh-states stores hidden states for slices to start from: it needs --start-state stored, got "
                f"{self.start_state}."
            )
        if self.buffer_size < self.frames_per_batch:
            raise ArgumentError(
                f"--buffer-size must hold one batch of {self.frames_per_batch} steps, got {self.buffer_size}."
            )
