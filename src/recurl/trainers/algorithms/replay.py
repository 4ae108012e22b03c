"""Base class of the off-policy learners: replay buffer, slices, start states, burn-in, state refresh, priorities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl import execution
from recurl.core.devices import numbered
from recurl.core.keys import DONE, NEXT, REWARD, NestedKey
from recurl.core.spans import FORWARD, GRADIENT_GRAPH, REPLAY, span
from recurl.data import MidEpisodeBurnIn, ZeroStart, refresh_states, slice_priorities
from recurl.data.replay_buffers.device import ByPriority, ByStep, ByTrajectory, DeviceSliceBuffer
from recurl.distributed import average_, global_statistics
from recurl.modules import RewardScaler
from recurl.objectives import SoftUpdate
from recurl.trainers.algorithms.configs import ReplayConfig
from recurl.trainers.algorithms.learner import AgentT, Learner, Stateful
from recurl.trainers.config import NO_CELL
from recurl.trainers.networks.initial import Initial
from recurl.trainers.optim.cuda_graph import CudaGraphStep
from recurl.trainers.optim.gradient_step import GradientStep
from recurl.trainers.optim.reading import Reading

if TYPE_CHECKING:
    from recurl.collectors.captured import CaptureOptions

__all__ = ["ReplayLearner", "ReplayLoss"]


class ReplayLoss(Protocol):
    """A loss over replayed slices."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of the entries that the loss reads."""
        ...

    @property
    def target_states(self) -> dict[NestedKey, NestedKey]:
        """Keys of the target networks' states, by state key of the online network."""
        ...

    def networks(self) -> list[TensorDictModuleBase]:
        """Return the networks whose states are stored in a batch."""
        ...

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks."""
        ...

    def __call__(self, tensordict: Any, /) -> TensorDictBase:
        """Return the losses and the ``td_error`` of every token."""
        ...

    def gradients(self, batch: Any) -> dict[NestedKey, Tensor]:
        """Return the losses, and set the gradients of their sum."""
        ...


ReplayConfigT = TypeVar("ReplayConfigT", bound=ReplayConfig)

_Kinds = tuple[Hashable, ...]


class ReplayLearner(Learner[ReplayConfigT, AgentT]):
    """Base class of DQN, SAC and TD3, which learn from trajectory slices in a replay buffer.

    Under torchrun, each rank stores its own steps and samples its own slices; gradients are averaged.

    A subclass builds its loss over slices (:meth:`make_loss`) and makes gradient steps (:meth:`update`). The base
    class stores the entries that the loss reads, samples slices, scales rewards, starts all networks from stored states
    or from zeros, burns in each network separately, refreshes states, and updates priorities.

    With ``--cuda-graph``, the gradient steps of an update are captured and replayed without Python. A subclass must
    keep counters in :meth:`count` only; gradient steps of different kinds are captured separately.

    Args:
        config: the options, including the random seed.

    Attributes:
        buffer: the replay buffer.
        loss: the loss returned by :meth:`make_loss`.
    """

    averaged: ClassVar[tuple[str, ...]]
    """Metrics of a gradient step, returned by :meth:`update`: averaged over the update and checked to be finite."""
    collected = ("buffer", "collector")
    data_parallel = True

    def __init__(self, config: ReplayConfigT) -> None:
        super().__init__(config)
        self.loss = self.make_loss()
        self.buffer = _buffer(config)
        recurrent = config.cell != NO_CELL
        self._networks = TensorDictSequential(*self.loss.networks()) if recurrent else None
        self._zero = ZeroStart(self._networks) if self._networks is not None and config.start_state == "zero" else None
        burnt_in = (self.loss.networks(), self.loss.target_networks()) if recurrent and config.burn_in_steps else ()
        self._burn_ins = [MidEpisodeBurnIn(TensorDictSequential(*part), config.burn_in_steps) for part in burnt_in]
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        self._gradients: dict[Hashable, Callable[..., Mapping[Any, Tensor]]] = {}
        self._graphs: dict[_Kinds, CudaGraphStep] = {}
        self._metric_names: dict[_Kinds, list[str]] = {}

    @property
    def programs(self) -> CaptureOptions:
        """How the collector compiles or captures its steps."""
        return {"cuda_graph": self.config.cuda_graph, "compile_step": self.config.compile}

    @abstractmethod
    def make_loss(self) -> ReplayLoss:
        """Build the loss of the networks in ``self.agent``."""

    @abstractmethod
    def update(self, kind: Hashable) -> Mapping[str, Tensor]:
        """Make one gradient step: sample, compute gradients, step, update targets and priorities.

        Args:
            kind: kind of the step, as returned by :meth:`count`.

        Returns:
            The metrics named in ``averaged``, or a subset of them, as scalars without gradients.
        """

    def count(self) -> Hashable:
        """Count the upcoming gradient step and return its kind, which is passed to :meth:`update`.

        Steps of one kind must launch the same operations. A step with additional work, such as every hundredth, must be
        of another kind.
        """
        return None

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint."""
        return {**super().parts(), "buffer": self.buffer, "scaler": self.scaler}

    def load_state_dict(self, state: dict[str, Any], *, begin_anew: bool = False) -> None:
        """Load a state; see :meth:`Learner.load_state_dict`."""
        self._forget_graphs()  # the optimizers' states are replaced
        super().load_state_dict(state, begin_anew=begin_anew)

    def start_from(self, initial: Initial) -> str:
        """Start from the networks of another run, target networks equal to them; see :meth:`Learner.start_from`."""
        described = super().start_from(initial)
        if self.loss.target_networks():
            SoftUpdate(cast(nn.Module, self.loss), tau=1.0).init_()
        return described

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Add a batch to the replay buffer and make gradient steps on samples.

        Args:
            batch: batch returned by :meth:`collect`, ``[B, T]``.

        Returns:
            The metrics of :meth:`update`, averaged over the update and the ranks (nan before learning starts), and
            those of :meth:`others`. Gradient steps with a non-finite loss or norm are skipped; ``fault`` names the
            first.
        """
        return self._launch(batch)()

    @property
    def learns_ahead(self) -> bool:
        """Whether updates are asynchronous: not if ``learn`` is overridden."""
        return self.config.draws_on_device and getattr(self.learn, "__func__", None) is ReplayLearner.learn

    def learn_later(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        """Launch an update; see :meth:`Learner.learn_later`."""
        return self._launch(batch) if self.learns_ahead else super().learn_later(batch)

    @global_statistics()
    def _launch(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        stored = batch.select(*self.loss.in_keys, strict=False)
        self.agent.observe(batch)
        if self.scaler is not None:
            self.scaler.update(batch[NEXT, REWARD], batch[NEXT, DONE])
        learned: dict[str, float | Tensor] = {**dict.fromkeys(self.averaged, math.nan), **self.others()}
        found: list[str] = []
        if self.env_steps < self.config.learning_starts:
            with span(REPLAY):
                self.buffer.extend(stored)
        else:
            kinds = tuple(self.count() for _ in range(self.config.gradient_steps))
            values = self._run(stored, kinds)
            average_([values])
            found = self._metric_names[kinds]
            learned.update(zip(found, values.unbind(), strict=True))
        later = {name: value for name, value in learned.items() if isinstance(value, Tensor)}
        reading = Reading([torch.stack([value.detach().float() for value in later.values()])] if later else [])

        def read() -> dict[str, float]:
            numbers = [number for values in reading() for number in values.tolist()]
            return self.report(cast(dict[str, float], {**learned, **dict(zip(later, numbers, strict=True))}), found)

        return read

    def _run(self, stored: TensorDictBase, kinds: _Kinds) -> Tensor:
        """Store a batch and make gradient steps of these kinds; return the metrics named in ``_metric_names``."""
        if not self.config.cuda_graph:
            return self._store_and_learn(stored, kinds)
        if kinds not in self._graphs:
            optimizers = [part.optimizer for part in self.parts().values() if isinstance(part, GradientStep)]
            step = partial(self._store_and_learn, kinds=kinds)
            self._graphs[kinds] = CudaGraphStep(step, cast(nn.Module, self.loss), optimizers)
        with span(GRADIENT_GRAPH):
            return self._graphs[kinds](stored)

    def _store_and_learn(self, stored: TensorDictBase, kinds: _Kinds) -> Tensor:
        with span(REPLAY):
            self.buffer.extend(stored)
        steps = [self.update(kind) for kind in kinds]
        found = {name: [step[name] for step in steps if name in step] for name in self.averaged}
        means = {name: torch.stack(values).mean() for name, values in found.items() if values}
        self._metric_names[kinds] = list(means)
        return torch.stack(list(means.values()))

    def gradient_step(self, parameters: Iterable[nn.Parameter]) -> GradientStep:
        """Return an optimizer of ``parameters``, with the learning rate and gradient clipping of the options."""
        config = self.config
        return GradientStep(
            parameters,
            learning_rate=config.learning_rate,
            max_norm=config.max_grad_norm,
            capturable=config.cuda_graph,
        )

    def others(self) -> dict[str, float | Tensor]:
        """Return additional metrics of the update; tensors are read later."""
        return {}

    def sample(self) -> tuple[Any, Any]:
        """Return a sample of slices with scaled rewards, and its training steps: those after burn-in."""
        with span(REPLAY):
            sample = self.buffer.sample()
            if self._zero is not None:
                sample = self._zero(sample)
        if self.scaler is not None:
            sample.set((NEXT, REWARD), self.scaler(sample[NEXT, REWARD]))
        if self._networks is not None and self.config.refresh_states:
            with span(REPLAY):
                refresh_states(self.buffer, sample, self._networks)
        with span(FORWARD):
            return sample, self.burnt_in(sample)

    def gradients(self, trained: Any, kind: Hashable = None) -> Mapping[Any, Tensor]:
        """Return the losses of training steps, and set their gradients; see :func:`recurl.execution.compile`.

        Args:
            trained: training steps, from :meth:`sample`.
            kind: what the loss depends on besides its networks, for which it is compiled separately.
        """
        if not self.config.compile:
            return execution.compile(self.loss.gradients)(trained)
        if kind not in self._gradients:
            self._gradients[kind] = execution.compile(self.loss.gradients, backend="inductor")
        return self._gradients[kind](trained)

    def prioritize(self, sample: Any, trained: Any, error: Tensor, numbers: Mapping[str, Tensor]) -> None:
        """Update the priorities of a sample from its TD errors, if enabled and if all numbers are finite.

        Args:
            sample: the sample.
            trained: its training steps.
            error: TD error of every training step.
            numbers: metrics of the gradient step.
        """
        if self.config.prioritized:
            with span(REPLAY):
                finite = [value.isfinite().all() for value in (*numbers.values(), error)]
                priority = slice_priorities(sample, error, trained, eta=self.config.priority_eta)
                self.buffer.update_priority(sample, priority, torch.stack(finite).all())

    def restart(self, rows: Tensor) -> bool:
        """Reset some environments; see :meth:`Learner.restart`."""
        if self.scaler is not None:
            self.scaler.returns[rows] = 0
        return super().restart(rows)

    def burnt_in(self, sample: Any) -> Any:
        """Burn in a sample and return its training steps, with the states of each network computed by that network."""
        if not self._burn_ins:
            return sample
        rest, target_rest = (burn_in(sample) for burn_in in self._burn_ins)
        for key, at in self.loss.target_states.items():
            rest.set(at, target_rest.get(key))
        return rest

    def close(self) -> None:
        """Close the environments and free the CUDA graphs."""
        super().close()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


def _buffer(config: ReplayConfig) -> DeviceSliceBuffer:
    by_step = config.drawn_by == "step"
    if config.prioritized:
        drawing = ByPriority(config.priority_exponent, config.importance_exponent, by_step=by_step)
    else:
        drawing = ByStep() if by_step else ByTrajectory()
    return DeviceSliceBuffer(
        config.buffer_size,
        config.slices,
        config.slice_length,
        drawing,
        numbered(config.device),
        padded=config.draws_on_device,
    )
