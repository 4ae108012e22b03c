"""The training loop: collect, learn, log, checkpoint, until the steps are used up, the task is solved or a stop."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from recurl.errors import MissingDependencyError
from recurl.trainers.algorithms import make_algorithm
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from recurl.trainers.config import RunConfig
from recurl.trainers.episodes import EpisodeStats
from recurl.trainers.log import Events, MetricsFile, make_display
from recurl.trainers.plots import plot_learning_curve
from recurl.trainers.run_folder import RunFolder
from recurl.trainers.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["solved", "finished", "stopped"]
    """The return asked for was reached; all steps were taken; the run was asked to stop."""
    env_steps: int
    """Environment steps taken, earlier processes included."""
    wall_s: float
    """Seconds of training, earlier processes included, set-up not."""
    cpu_s: float
    """Seconds of CPU time this process (and its predecessors) spent on training, set-up not."""
    return_mean: float
    """Mean return of the last 20 episodes."""


class _Clock:
    def __init__(self, wall_s: float = 0.0, cpu_s: float = 0.0) -> None:
        self._wall_start = time.perf_counter() - wall_s
        self._cpu_start = time.process_time() - cpu_s

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._wall_start

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu_start


class Trainer:
    """Runs an algorithm in a run folder.

    Args:
        config: the options.
        folder: where everything is written; see :meth:`RunFolder.create`.
        console: where progress is shown.

    A trainer starts anew; :meth:`resume` puts it where the folder's newest checkpoint was written.

    Raises:
        MissingDependencyError: a package that a run needs at its end is not installed; said before it begins.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, *, console: Console) -> None:
        for package in ("tensorboard", "matplotlib"):
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[train]'")
        self.config = config
        self.folder = folder
        self.console = console
        self.algorithm = make_algorithm(config)
        self.stats = EpisodeStats(config.num_envs)
        self._rows = 0
        self._times = (0.0, 0.0)
        self._rng: dict[str, Any] | None = None

    def resume(self) -> None:
        """Go on from the newest checkpoint: on the CPU bit for bit as if the run had never stopped.

        Environments that can't save their state start over, and a notice says so.

        Raises:
            ArgumentError: there is no checkpoint, or it can't be read or doesn't fit.
        """
        state = load_checkpoint(latest_checkpoint(self.folder.checkpoints))
        self.algorithm.load_state_dict(state["algorithm"])
        self.stats.load_state_dict(state["stats"])
        self._rows = state["rows"]
        self._times = (state["wall_s"], state["cpu_s"])
        self._rng = state["rng"]
        if not self.algorithm.can_save_env:
            self.console.print(
                f"Notice: {self.config.env} can't save its state: its episodes start over, the resumed run differs.",
                soft_wrap=True,
            )

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train until the end.

        Meanwhile Python's garbage collector leaves out what existed before (``gc.freeze``).

        Args:
            should_stop: asked after every update; true saves a checkpoint and returns.

        Returns:
            How the run ended; the folder holds metrics, a checkpoint and the learning curve in every case.
        """
        resumed = self._rows > 0
        metrics = MetricsFile(self.folder.metrics, keep_rows=self._rows)
        events = Events(self.folder.tensorboard, purge_step=self.algorithm.env_steps + 1 if resumed else None)
        display = make_display(
            self.console,
            total_steps=self.config.updates * self.config.frames_per_batch,
            done_steps=self.algorithm.env_steps,
            live=self.algorithm.live,
        )
        if self._rng is not None:
            set_rng_state(self._rng)
        clock = _Clock(*self._times)
        stopped = False
        gc.freeze()  # a full collection, every hundred updates or so, would walk all that was imported: 0.2 s
        try:
            while not (stopped or self._ended()):
                row = self._iterate(clock)
                for sink in (metrics.write, events.write, display.update):
                    sink(row)
                self._rows = metrics.rows
                stopped = should_stop()
                if stopped or self._ended() or self._rows % self.config.checkpoint_every == 0:
                    self._save(clock)
        finally:
            gc.unfreeze()
            for sink in (display, metrics, events):
                sink.close()
        outcome = self._outcome(clock, stopped=stopped)
        if self._rows:
            plot_learning_curve(self.folder.metrics, self.folder.curve, title=f"{self.config.env}, {self.config.cell}")
        return outcome

    def close(self) -> None:
        """Close the environments."""
        self.algorithm.close()

    def _iterate(self, clock: _Clock) -> dict[str, float]:
        steps, wall = self.algorithm.env_steps, clock.wall_s
        batch = self.algorithm.collect()
        self.stats.update(batch["next", "reward"][..., 0], batch["next", "done"][..., 0])
        learned = self.algorithm.learn(batch)
        taken = self.algorithm.env_steps
        return {
            "update": self._rows + 1,
            "env_steps": taken,
            "episodes": self.stats.episodes,
            "wall_s": round(clock.wall_s, 3),
            "cpu_s": round(clock.cpu_s, 3),
            "steps_per_s": round((taken - steps) / (clock.wall_s - wall), 1),
            "return_mean_20": self.stats.mean_return,
            "length_mean_20": self.stats.mean_length,
            **learned,
        }

    def _solved(self) -> bool:
        return self.stats.reached(self.config.stop_return)

    def _ended(self) -> bool:
        return self._solved() or self._rows >= self.config.updates

    def _save(self, clock: _Clock) -> None:
        self._times = (clock.wall_s, clock.cpu_s)
        state = {
            "algorithm": self.algorithm.state_dict(),
            "stats": self.stats.state_dict(),
            "rows": self._rows,
            "wall_s": self._times[0],
            "cpu_s": self._times[1],
            "rng": rng_state(),
        }
        save_checkpoint(self.folder.checkpoints, self.algorithm.env_steps, state)

    def _outcome(self, clock: _Clock, *, stopped: bool) -> Outcome:
        status = "solved" if self._solved() else "finished" if self._ended() else "stopped"
        return Outcome(status, self.algorithm.env_steps, clock.wall_s, clock.cpu_s, self.stats.mean_return)
