"""Options of the off-policy algorithms, which learn from a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count, Exponent, Fraction, NonNegativeInt, Positive, PositiveOrInf
from recurl.trainers.algorithms.programs_config import ExecutionConfig


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(ExecutionConfig):
    """Options of the algorithms that learn from trajectory slices in a replay buffer.

    Raises:
        ArgumentError: see :class:`ExecutionConfig`; or if the burn-in is as long as a slice, the buffer is smaller than
            a batch, or an option isn't supported when slices are sampled on the device.
    """

    fixed: ClassVar[tuple[str, ...]] = (*ExecutionConfig.fixed, "buffer_size")
    usual_lag: ClassVar[int] = 1

    learning_rate: Positive = 5e-4
    """Initial learning rate of Adam."""
    num_envs: Count = 16
    """Number of environments stepped in parallel."""
    rollout_steps: Count = 8
    """Steps per environment between updates."""
    head_width: NonNegativeInt = 64
    """Width of a hidden layer between the recurrent layers and each output; 0 for none (critics of continuous actions
    always have one)."""
    max_grad_norm: PositiveOrInf = 10.0
    """Maximum gradient norm; inf disables clipping."""
    checkpoint_every: Count = 250
    """Updates between checkpoints, which include the replay buffer."""

    buffer_size: Count = 100_000
    """Capacity of the replay buffer in environment steps."""
    learning_starts: NonNegativeInt = 2_000
    """Environment steps to collect before learning starts."""
    gradient_steps: Count = 16
    """Gradient steps per update."""
    slices: Count = 32
    """Number of trajectory slices per gradient step."""
    slice_length: Count = 32
    """Maximum length of a slice in steps; a shorter trajectory is used whole."""
    drawn_by: Literal["step", "trajectory"] = "step"
    """How slices are sampled. step: sample a step and a slice that contains it. trajectory: sample a trajectory
    uniformly and a slice within it (with priorities, a slice by its first step), so that the ends of long episodes are
    rare."""
    drawn_on: Literal["auto", "host", "device"] = "auto"
    """Where slices are sampled and priorities are kept: on the host, or on --device, which then never waits for the
    host but pads shorter slices. auto picks device with --cuda-graph or --compile."""
    start_state: Literal["stored", "zero"] = "stored"
    """Hidden state at the start of a slice: the state stored during collection, or zeros."""
    burn_in: NonNegativeInt | None = 0
    """Steps at the start of a slice that only warm up its hidden state and aren't trained on (none if the slice starts
    an episode); the value none means a quarter of the slice."""
    refresh_states: bool = False
    """Before training on a slice, write the hidden states of the current networks back to the replay buffer."""
    scale_rewards: bool = False
    """Divide rewards by the current running standard deviation of the discounted return when they are sampled."""
    n_steps: Count = 1
    """Number of rewards summed before bootstrapping (n-step return)."""

    prioritized: bool = False
    """Sample slices in proportion to their TD errors instead of uniformly (prioritized replay)."""
    priority_exponent: Exponent = 0.6
    """Exponent alpha of the priorities; 0 samples uniformly."""
    importance_exponent: Exponent = 1.0
    """Exponent beta of the importance weights; 1 fully corrects for non-uniform sampling."""
    priority_eta: Fraction = 0.9
    """Weight eta of the maximum TD error in a slice's priority; the mean TD error has weight 1 - eta."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options of any version; see :meth:`RunConfig.complete`."""
        legacy = "priority_eta" in values and "drawn_by" not in values
        return super().complete({"head_width": 0, "drawn_by": "trajectory", **values} if legacy else values)

    @property
    def replay_steps(self) -> int:
        """Capacity of the replay buffer in environment steps."""
        return self.buffer_size

    @property
    def burn_in_steps(self) -> int:
        """Number of burn-in steps at the start of a slice."""
        return self.slice_length // 4 if self.burn_in is None else self.burn_in

    @property
    def draws_on_device(self) -> bool:
        """Whether slices are sampled on the device of the run."""
        return self.drawn_on == "device" or (self.drawn_on == "auto" and (self.cuda_graph or self.compile))

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if (self.cuda_graph or self.compile) and self.drawn_on == "host":
            raise ArgumentError(
                "--cuda-graph and --compile need slices of equal length, which --drawn-on device provides: leave out "
                "--drawn-on host."
            )
        if self.refresh_states and self.draws_on_device:
            raise ArgumentError(
                "--refresh-states needs --drawn-on host, without --cuda-graph and --compile: slices overlap, and on a "
                "device it is undefined which of them a step gets its state from."
            )
        if self.burn_in_steps >= self.slice_length:
            raise ArgumentError(
                f"--burn-in must be less than --slice-length, got {self.burn_in_steps} and {self.slice_length}: no "
                "steps would be left to train on."
            )
        if self.refresh_states and self.backend in ("auto", "pad"):
            raise ArgumentError(
                "--refresh-states needs the hidden state after every step, but --backend pad, which auto may choose, "
                f"returns it at segment ends only: use fastest or loop, got {self.backend}."
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
