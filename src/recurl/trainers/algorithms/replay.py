"""Base of the learners from replay: buffer, slices, start states, burn-in, state refresh, priorities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl._torch import start_compilers
from recurl.collectors.captured import Programs
from recurl.distributed import average_, global_statistics
from recurl.errors import ArgumentError
from recurl.keys import DONE, NEXT, REWARD
from recurl.modules import RewardScaler
from recurl.spans import FORWARD, FORWARD_AND_BACKWARD, GRADIENT_GRAPH, OPTIMIZER, REPLAY, span
from recurl.trainers.algorithms.learner import AgentT, Learner, Stateful
from recurl.trainers.algorithms.replay_config import ReplayConfig
from recurl.trainers.algorithms.replay_slices import DeviceSlices, HostSlices, ReplayLoss
from recurl.trainers.optim.cuda_graph import CudaGraphStep
from recurl.trainers.optim.gradient_step import GradientStep
from recurl.trainers.optim.programs import GradientProgram
from recurl.trainers.optim.reading import Reading

ReplayConfigT = TypeVar("ReplayConfigT", bound=ReplayConfig)
_Kinds = tuple[Hashable, ...]


class ReplayLearner(Learner[ReplayConfigT, AgentT]):
    """Learns from slices of trajectories in a replay buffer; the base of DQN, SAC and TD3.

    Under torchrun each rank has a buffer of its own steps and draws its own slices; gradients are averaged.

    A subclass builds its loss over replayed slices (:meth:`make_loss`) and makes gradient steps (:meth:`improve`). The
    base stores what the loss reads, draws slices, scales rewards, starts all networks from the stored states or from
    zero, burns each network in by itself, refreshes states, and gives slices their priorities.

    With ``--cuda-graph`` the gradient steps of an update are recorded and repeated without Python. What a subclass
    counts, it counts in :meth:`count`; steps that are not alike are recorded apart.

    Args:
        config: the options; its seed decides everything random.

    Attributes:
        buffer: the replay buffer.
        loss: what :meth:`make_loss` returned.
        kind: what :meth:`count` returned of the present gradient step.
    """

    averaged: ClassVar[tuple[str, ...]]
    """Numbers of a gradient step, which :meth:`improve` returns; they are averaged over an update and checked."""
    collected = ("buffer", "collector")
    data_parallel = True

    def __init__(self, config: ReplayConfigT) -> None:
        if config.compile and torch.device(config.device).type == "cuda":
            start_compilers()
        super().__init__(config)
        self.loss = self.make_loss()
        self._slices: Any = (DeviceSlices if config.draws_on_device else HostSlices)(config, self.loss)
        self.buffer = self._slices.buffer
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        self.kind: Hashable = None
        self._gradients: dict[Hashable, GradientProgram] = {}
        self._graphs: dict[_Kinds, CudaGraphStep] = {}
        self._found: dict[_Kinds, list[str]] = {}

    @property
    def programs(self) -> Programs:
        """How a collector runs its steps; see :class:`Learner`."""
        return Programs(cuda_graph=self.config.cuda_graph, compile_step=self.config.compile)

    @abstractmethod
    def make_loss(self) -> ReplayLoss:
        """Build the loss of ``self.agent``."""

    @abstractmethod
    def improve(self, losses: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make a gradient step, by calling what :meth:`gradient_step` returned with the losses that it descends.

        Args:
            losses: what the loss returned.

        Returns:
            The numbers that ``averaged`` names, or those of them that there are, scalars without gradients.
        """

    def count(self) -> Hashable:
        """Count a gradient step that is about to be made, and return its kind, which then is ``self.kind``.

        Steps of one kind must launch the same operations: where a step does something besides, such as every hundredth,
        it is of another kind.
        """
        return None

    def parts(self) -> dict[str, Stateful | None]:
        """Return what a checkpoint holds."""
        return {**super().parts(), "buffer": self.buffer, "scaler": self.scaler}

    def load_state_dict(self, state: dict[str, Any], *, begin_anew: bool = False) -> None:
        """Restore what :meth:`state_dict` returned; see :meth:`Learner.load_state_dict`.

        Raises:
            ArgumentError: slices were drawn on the host, and are to be drawn on the device, or the other way round.
        """
        before, now = ("device" if on else "host" for on in ("ring" in state["buffer"], self.config.draws_on_device))
        if before != now:
            raise ArgumentError(
                f"The saved run must have drawn slices on the {now}, as this one does, but its buffer is one of the "
                f"{before}: go on with --drawn-on {before}."
            )
        self._forget_graphs()  # optimisers get other states
        super().load_state_dict(state, begin_anew=begin_anew)

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Put a batch into the buffer and improve the networks on samples of it.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``.

        Returns:
            What :meth:`improve` returned, averaged over the update and the ranks (nan before learning starts), and
            :meth:`others`.
            Steps whose loss or norm wasn't finite were not made; ``fault`` names the first of these.
        """
        return self._launch(batch)()

    @property
    def learns_ahead(self) -> bool:
        """See :class:`Learner`; who replaces ``learn`` is waited for."""
        return self.config.draws_on_device and getattr(self.learn, "__func__", None) is ReplayLearner.learn

    def learn_later(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        """See :meth:`Learner.learn_later`."""
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
                self._slices.extend(stored)
        else:
            kinds = tuple(self.count() for _ in range(self.config.gradient_steps))
            values = self._update(stored, kinds)
            average_([values])
            found = self._found[kinds]
            learned.update(zip(found, values.unbind(), strict=True))
        later = {name: value for name, value in learned.items() if isinstance(value, Tensor)}
        reading = Reading([torch.stack([value.detach().float() for value in later.values()])] if later else [])

        def read() -> dict[str, float]:
            numbers = [number for values in reading() for number in values.tolist()]
            return self.report(cast(dict[str, float], {**learned, **dict(zip(later, numbers, strict=True))}), found)

        return read

    def _update(self, stored: TensorDictBase, kinds: _Kinds) -> Tensor:
        """Store a batch and make gradient steps of these kinds; return the numbers that ``_found`` names."""
        if not self.config.cuda_graph:
            return self._learned(stored, kinds)
        if kinds not in self._graphs:
            optimizers = [part.optimizer for part in self.parts().values() if isinstance(part, GradientStep)]
            step = partial(self._learned, kinds=kinds)
            self._graphs[kinds] = CudaGraphStep(step, cast(nn.Module, self.loss), optimizers)
        with span(GRADIENT_GRAPH):
            return self._graphs[kinds](stored)

    def _learned(self, stored: TensorDictBase, kinds: _Kinds) -> Tensor:
        with span(REPLAY):
            self._slices.extend(stored)
        steps = [self._step(kind) for kind in kinds]
        found = {name: [step[name] for step in steps if name in step] for name in self.averaged}
        means = {name: torch.stack(values).mean() for name, values in found.items() if values}
        self._found[kinds] = list(means)
        return torch.stack(list(means.values()))

    def gradient_step(self, parameters: Iterable[nn.Parameter]) -> GradientStep:
        """Return an optimiser of ``parameters``, with the step size and the bound of the options."""
        config = self.config
        return GradientStep(
            parameters,
            learning_rate=config.learning_rate,
            max_norm=config.max_grad_norm,
            capturable=config.cuda_graph,
            programmed=config.compile,
        )

    def others(self) -> dict[str, float | Tensor]:
        """Return the numbers that are reported besides those of gradient steps; a tensor is read later."""
        return {}

    def losses(self, trained: Any) -> Mapping[str, Tensor]:
        """Return the losses of the steps to learn from."""
        return cast(Mapping[str, Tensor], dict(self.loss(trained).items()))

    def _step(self, kind: Hashable) -> Mapping[str, Tensor]:
        self.kind = kind
        with span(REPLAY):
            sample = self._slices.sample()
        if self.scaler is not None:
            sample.set((NEXT, REWARD), self.scaler(sample[NEXT, REWARD]))
        with span(REPLAY):
            self._slices.refresh(sample)
        with span(FORWARD):
            trained = self.burnt_in(sample)
        losses = self._computed(trained)
        error = losses["td_error"]
        with span(OPTIMIZER):
            numbers = self.improve(losses)
        with span(REPLAY):
            self._slices.prioritise(sample, trained, error, numbers)
        return numbers

    def _computed(self, trained: Any) -> Mapping[str, Tensor]:
        """Return the losses; of a program they come with gradients, which the parameters hold."""
        if not self.config.compile:
            with span(FORWARD):
                return self.losses(trained)
        if self.kind not in self._gradients:
            self._gradients[self.kind] = GradientProgram(self.losses, None, cast(nn.Module, self.loss))
        with span(FORWARD_AND_BACKWARD):
            return self._gradients[self.kind](trained)

    def restart(self, rows: Tensor) -> bool:
        """Begin new episodes in some environments; see :meth:`Learner.restart`."""
        if self.scaler is not None:
            self.scaler.returns[rows] = 0
        return super().restart(rows)

    def burnt_in(self, sample: Any) -> Any:
        """Return the steps of a sample to learn from, each network's states computed by that network."""
        return self._slices.burnt_in(sample)

    def close(self) -> None:
        """Close the environments, and free the CUDA graphs of the steps."""
        super().close()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
