"""Training loop: collect, learn, log and checkpoint until the run finishes, is solved or is stopped."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recurl.core.errors import ArgumentError, ExitError
from recurl.core.precision import torch_matmul_precision
from recurl.core.seeding import rng_state, set_rng_state
from recurl.distributed import Watch, broadcast, on_any_rank, rank, world_size
from recurl.envs.parameters import Parameter
from recurl.execution.capture import WARM_UP
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.config import RunConfig
from recurl.trainers.files.checkpoints import load_newest, restoring, save_checkpoint
from recurl.trainers.networks.initial import Initial
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.report.csv_logger import CsvLogger
from recurl.trainers.report.display import make_display
from recurl.trainers.report.loggers import LoggerContext, check_packages, make_loggers
from recurl.trainers.report.metrics import EVALUATION, MetricsFile
from recurl.trainers.report.plots import plot_learning_curve
from recurl.trainers.report.references import reference_returns
from recurl.trainers.run.callbacks import Callbacks, check_callback, load_callback
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.faults import FaultWatch
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.initial import read_networks
from recurl.trainers.run.motion import MOTION
from recurl.trainers.run.outcome import Clock, Outcome
from recurl.trainers.run.periodic import EVALUATED_MOTION, EVALUATION_COLUMNS, PeriodicEvaluation
from recurl.trainers.run.provenance import provenance
from recurl.trainers.run.ranks import check_same_options, for_this_rank, ranks_of, with_other_ranks
from recurl.trainers.run.updates import COLUMNS, Updates

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST = 1e9  # longest duration of a run in seconds


class Trainer:
    """Trains an algorithm in a run folder.

    Args:
        config: the options.
        folder: folder of the run; see :meth:`RunFolder.create`.
        console: console for progress and notices.
        callbacks: callbacks, called after those of ``--callback``; see :class:`Callback`.

    Processes started by torchrun (:func:`~recurl.distributed.joined`) train as one run. Each rank has its own
    environments; only rank 0 writes to the folder, evaluates, and calls callbacks.

    A trainer starts a new run; after :meth:`resume` it continues from the newest checkpoint. While it runs, no other
    process can write to the folder.

    Raises:
        ArgumentError: if a callback can't be created, the evaluation environment has other spaces, or the options
            differ between ranks.
        ArgumentTypeError: if a callback has none of the callback methods.
        MissingDependencyError: if a required package is not installed.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, *, console: Console, callbacks: Sequence[object] = ()
    ) -> None:
        check_packages(config.logger)
        check_same_options(config)
        self._is_leader = rank() == 0
        self._user_callbacks = (
            [*map(load_callback, config.callback), *map(check_callback, callbacks)] if self._is_leader else []
        )
        self._callbacks = Callbacks()
        self.config = config
        self.folder = folder
        self.console = console
        self.algorithm = make_algorithm(config)
        self._evaluation = PeriodicEvaluation(config, self.algorithm.agent, folder)
        self.stats = EpisodeStats(config.num_envs)
        self._watch = FaultWatch(self.algorithm, self.stats, skip=config.on_nonfinite == "skip")
        self._updates = 0
        self._has_begun = False
        self._stop_requested = False
        self._changed: dict[str, Parameter] = {}
        self._previous_times = (0.0, 0.0)
        self._rng: dict[str, Any] | None = None
        self._lock_stack = ExitStack()

    def begin(self) -> None:
        """Take the networks that a new run starts from, if the options name any.

        :meth:`run` does the same; call this first to find out about errors before the folder is created.

        Raises:
            ArgumentError: if there is no such run, it can't be read, or its actor doesn't fit.
            NonFiniteError: if a parameter of it isn't finite.
        """
        source = self.config.init_from
        if source is not None and not self._has_begun:
            read = read_networks(source, self._notify) if self._is_leader else Initial("", {}, "", {})
            initial = broadcast(read)
            with restoring(Path(initial.path)):
                described = self.algorithm.start_from(initial)
            self.console.print(described, soft_wrap=True, markup=False, highlight=False)
        self._has_begun = True

    def resume(self) -> None:
        """Restore the newest checkpoint. On the CPU, the run continues bit for bit as if it had never stopped.

        If the newest checkpoint is damaged, the previous one is used, with a notice. Environments that can't save their
        state start new episodes, also with a notice.

        Raises:
            ArgumentError: if there is no checkpoint, or it can't be read or doesn't fit.
            LockedError: if another process uses the folder.
            StorageError: if the folder can't be written.
        """
        with ExitStack() as stack:
            if self._is_leader:
                stack.enter_context(self.folder.hold())
            newest = load_newest(self.folder.checkpoints, self._notify) if self._is_leader else (Path(), {})
            path, state = broadcast(newest)
            with restoring(path):
                self._load(for_this_rank(state))
            self._has_begun = True
            self._lock_stack.close()
            self._lock_stack = stack.pop_all()

    def _load(self, state: Mapping[str, Any]) -> None:
        saved, options = state.get("config", {}), self.config.to_dict()
        for name in ("algorithm", *self.config.fixed):
            if name in saved and saved[name] != options.get(name):
                raise ArgumentError(
                    f"{self.folder.config} doesn't fit the checkpoint: {name} must stay {saved[name]!r}, got "
                    f"{options.get(name)!r}."
                )
        same = ranks_of(state) == world_size()
        self.algorithm.load_state_dict(state["algorithm"], **({} if same else {"begin_anew": True}))
        self.stats.load_state_dict(state["stats"])
        if not same:
            self.stats.clear_running()
            self._notify(
                f"The checkpoint is of {ranks_of(state)} ranks, but this run has {world_size()}: episodes start over, "
                "and the resumed run differs."
            )
        elif not self.algorithm.restored_episodes:
            later = state["algorithm"]["collector"].get("obstacle")
            reason = self.algorithm.state_obstacle or later or "the checkpoint has no matching state"
            self._notify(
                f"The state of {self.config.env_name} isn't restored: {reason}. Its episodes start over, and the "
                "resumed run differs."
            )
        self._updates = int(state["rows"])
        if "faults" in state:  # absent from runs of earlier versions
            self._watch.load_state_dict(state["faults"])
        if "evaluation" in state:  # absent from runs of earlier versions
            self._evaluation.load_state_dict(state["evaluation"])
        self._previous_times = _seconds(state, "wall_s"), _seconds(state, "cpu_s")
        if same:
            self._rng = state["rng"]
            set_rng_state(state["rng"])

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train until the run ends.

        During training, Python's garbage collector ignores objects that existed before (``gc.freeze``).

        Args:
            should_stop: called after every update; if it returns True, a checkpoint is saved and the run ends.

        Returns:
            The outcome. In every case the folder contains metrics, a checkpoint and the learning curve.

        Raises:
            ArgumentError: if the folder isn't that of a new run with these options, or see :meth:`begin`.
            LockedError: if another process uses the folder.
            CallbackError: if a callback failed; a checkpoint is saved first.
            ExitError: if the environment, or other code called by the run, calls ``sys.exit``.
            NonFiniteError: if a number isn't finite and is not skipped; no checkpoint is saved.
            StorageError: if the folder can't be written; the newest checkpoint stays intact.
        """
        with self._lock_stack, self._locked(), _frozen(), torch_matmul_precision(self.config.torch_precision):
            self._stop_requested, self._callbacks = False, Callbacks()
            clock = Clock(*self._previous_times)
            try:
                self.begin()
                self._open()
                clock = Clock(*self._previous_times)
                self._loop(clock, should_stop)
            except BaseException as error:
                self._callbacks.end(self._outcome(clock, "failed"))
                if isinstance(error, SystemExit | GeneratorExit):
                    raise ExitError.of(error) from error
                raise
            outcome = self._outcome(clock)
            self._callbacks.end(outcome)
        if self._callbacks.error is not None:
            raise self._callbacks.error
        return outcome

    def stop(self) -> None:
        """End the run with a checkpoint after the current update; to be called by callbacks."""
        self._stop_requested = True

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters of the training environments that were changed, by name, also those of a resumed run."""
        return dict(self.algorithm.parameters)

    def set_parameters(self, **values: Parameter) -> None:
        """Change parameters of the training environments from the next batch on; to be called by callbacks.

        They are saved in checkpoints. Evaluations keep the environment of the options.

        Args:
            **values: finite numbers, or lists or tuples of them, by name, such as ``randomization=0.5``; see
                :meth:`recurl.envs.EnvBase.set_parameters`.

        Raises:
            ArgumentError: there is no such parameter, or a value isn't accepted.
            UnsupportedError: the environments have no parameters, or collect in other processes.
        """
        self.algorithm.set_parameters(values)
        self._changed |= values

    def _share_parameters(self) -> None:
        """Change on all ranks the parameters that callbacks, which only rank 0 calls, have changed."""
        changed, self._changed = broadcast(self._changed), dict[str, Parameter]()
        if changed and not self._is_leader:
            self.algorithm.set_parameters(changed)

    def _loop(self, clock: Clock, should_stop: Callable[[], bool]) -> None:
        self._callbacks.call("on_start", self)
        if self._rng is not None:
            set_rng_state(self._rng)
        updates = Updates(self.algorithm, self.stats, self._watch, self._callbacks)
        done = 0
        while not (self._interrupted() or self._ended()):
            before = self.algorithm.env_steps
            self._share_parameters()
            updates.make(clock, self._updates + 1)
            self._updates, done = self._updates + 1, done + 1
            if self._evaluation.due(before, self.algorithm.env_steps, last=self._ended()):
                updates.finish()
                self.algorithm.settle()
                with Watch.exempt():
                    self._callbacks.call("on_evaluation", self._evaluation(self._updates, self.algorithm.env_steps))
            self._stop_requested = should_stop() or self._stop_requested
            if self._interrupted() or self._ended() or self._updates % self.config.checkpoint_every == 0:
                updates.finish()
                with Watch.exempt():
                    self._save(clock)
            if done == WARM_UP + 1:  # kernels are compiled and CUDA graphs captured
                Watch.arm(self.config.rank_timeout)
        if self._updates and self._is_leader:
            with Watch.exempt():
                self._plot()

    def _plot(self) -> None:
        config, folder = self.config, self.folder
        plot_learning_curve(
            folder.metrics,
            folder.curve,
            title=f"{config.env_name}, {config.cell}",
            evaluations=None if config.eval_every is None else folder.evaluations,
            references={} if config.trial_episodes else reference_returns(config.env_name, config.env_arguments),
        )

    def _interrupted(self) -> bool:
        return on_any_rank(self._stop_requested or self._callbacks.error is not None)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Lock the folder, and check that it is new or the one that was resumed."""
        folder = self.folder
        if not self._is_leader:
            yield
            return
        if not folder.path.is_dir():
            raise ArgumentError(f"There is no run in {folder.path}: create its folder first, folder.create(config).")
        with folder.hold():
            if self._updates == 0 and (not folder.holds(self.config) or folder.checkpoints.exists()):
                raise ArgumentError(
                    f"{folder.path} must be the folder of a new run with these options, as folder.create(config) "
                    "creates it; to resume the existing run, call trainer.resume() first."
                )
            yield

    def _open(self) -> None:
        """Set up the consumers of rows: files first, then the logger and the display, then the user's callbacks."""
        algorithm, folder, config = self.algorithm, self.folder, self.config
        if not self._is_leader:
            return
        folder.note_start({"env_steps": algorithm.env_steps, **provenance(config.device)})
        self._csv_logger = CsvLogger(self._metrics_file(), self._evaluations_file())
        self._callbacks.add(self._csv_logger)
        since = algorithm.env_steps if self._updates else None
        for logger in make_loggers(
            config.logger, LoggerContext(folder.path, folder.tensorboard, config.to_dict(), since)
        ):
            self._callbacks.add(logger)
        total = algorithm.total_steps
        display = make_display(self.console, total_steps=total, live=algorithm.live, done_steps=algorithm.env_steps)
        for callback in (display, *self._user_callbacks):
            self._callbacks.add(callback)

    def _metrics_file(self) -> MetricsFile:
        motion = MOTION if self.algorithm.real_actions else ()
        columns = (*COLUMNS, *motion, *self.config.scheduled, *self.algorithm.collection, *self.algorithm.reported)
        return MetricsFile(self.folder.metrics, columns, updates=self._updates, notify=self._notify)

    def _evaluations_file(self) -> MetricsFile | None:
        if self.config.eval_every is None:
            return None
        return MetricsFile(
            self.folder.evaluations,
            (*EVALUATION_COLUMNS, *(EVALUATED_MOTION if self.algorithm.real_actions else ())),
            updates=self._updates,
            expected=self._evaluation.count,
            score=EVALUATION,
            notify=self._notify,
        )

    def close(self) -> None:
        """Close the environments and unlock the folder."""
        self._lock_stack.close()
        self._evaluation.close()
        self.algorithm.close()

    def _notify(self, text: str) -> None:
        self.console.print(f"Notice: {text}", soft_wrap=True, markup=False, highlight=False)

    def _solved(self) -> bool:
        return self.stats.reached(self.config.stop_return) or self._evaluation.solved

    def _ended(self) -> bool:
        algorithm = self.algorithm
        return self._solved() or algorithm.env_steps + algorithm.frames_per_update > self.config.total_steps

    def _save(self, clock: Clock) -> None:
        self._previous_times = (clock.wall_s, clock.cpu_s)
        algorithm = self.algorithm.state_dict()
        check_finite(
            {name: part for name, part in algorithm.items() if name not in self.algorithm.collected}, "the run"
        )
        state = {
            "config": self.config.to_dict(),
            "algorithm": algorithm,
            "stats": self.stats.state_dict(),
            "rows": self._updates,
            "faults": self._watch.state_dict(),
            "evaluation": self._evaluation.state_dict(),
            "wall_s": self._previous_times[0],
            "cpu_s": self._previous_times[1],
            "rng": rng_state(),
        }
        state = with_other_ranks(state, self.algorithm.own)
        if not self._is_leader:
            return
        self._csv_logger.sync()  # before the checkpoint, which stores their number
        path = save_checkpoint(self.folder.checkpoints, self.algorithm.env_steps, state)
        self._callbacks.call("on_checkpoint", path)

    def _outcome(self, clock: Clock, status: Literal["failed"] | None = None) -> Outcome:
        failed = status or ("failed" if self._callbacks.error else None)
        ended = failed or ("solved" if self._solved() else "finished" if self._ended() else "stopped")
        return Outcome(ended, self.algorithm.env_steps, clock.wall_s, clock.cpu_s, self.stats.mean_return)


def _seconds(state: Mapping[str, Any], name: str) -> float:
    """Read a duration from a checkpoint."""
    value = float(state[name])
    if not 0 <= value <= _LONGEST:
        raise ValueError(f"{name} must be between 0 and {_LONGEST:g} seconds, got {value:g}.")
    return value


@contextmanager
def _frozen() -> Generator[None]:
    gc.freeze()  # a full collection, about every hundred updates, would scan all imported objects: 0.2 s
    try:
        yield
    finally:
        gc.unfreeze()
