"""Base class of the on-policy learners: advantage estimator, loss, gradient steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl import execution
from recurl.core.errors import ArgumentError
from recurl.core.keys import DONE, NEXT, REWARD, NestedKey
from recurl.core.seeding import GeneratorState, derive_seed
from recurl.core.spans import ADVANTAGES, GRADIENT_GRAPH, span
from recurl.core.specs import Composite, TensorSpec
from recurl.core.symmetry import Symmetry
from recurl.data import SequenceMinibatches
from recurl.distributed import average_, global_statistics, rank, world_size
from recurl.execution.background import compiled_later
from recurl.modules import RewardScaler
from recurl.objectives.policy_gradient import PolicyGradientLoss, explained_variance, mask_of
from recurl.objectives.sequences import bootstraps_at_ends_only
from recurl.objectives.symmetry import MirroredStates, SymmetryLoss
from recurl.objectives.value.estimator import ValueEstimator
from recurl.sequences.entries import Entries, Step
from recurl.trainers.algorithms.configs import OnPolicyConfig
from recurl.trainers.algorithms.footprint import large_states, rows_at_once
from recurl.trainers.algorithms.learner import Learner, Stateful
from recurl.trainers.algorithms.symmetries import load_symmetries
from recurl.trainers.networks.actor_critic import ActorCritic
from recurl.trainers.optim.gradient_step import GradientStep
from recurl.trainers.optim.reading import Reading

if TYPE_CHECKING:
    from recurl.collectors import Collector
    from recurl.collectors.captured import CaptureOptions
    from recurl.trainers.optim.cuda_graph import CudaGraphStep

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
CHECKED = (*LOSSES, "grad_norm")
OnPolicyT = TypeVar("OnPolicyT", bound=OnPolicyConfig)


class UpdateSchedule(NamedTuple):
    """Passes over a batch in an update.

    Attributes:
        epochs: number of passes over the batch.
        minibatches: gradient steps per pass.
        sequence_length: length of the sequences that rows are split into; None for whole rows.
    """

    epochs: int = 1
    minibatches: int = 1
    sequence_length: int | None = None


class OnPolicy(Learner[OnPolicyT, ActorCritic]):
    """Base class of PPO, A2C and IMPALA, which train on each batch over sequences that start from stored states.

    A subclass builds an advantage estimator and a loss, and declares which metrics of the loss to report.
    :meth:`update` makes one gradient step; a subclass that makes more overrides it.

    Args:
        config: the options, including the random seed.
        overlap: see :class:`Learner`.

    Attributes:
        estimator: estimator that writes advantages and value targets into each batch.
        loss: the loss.
        scaler: reward scaler, or None.
        symmetry: symmetry loss, whose gradients are added to those of ``loss``, or None.
    """

    reported = CHECKED
    live = "loss {loss_objective:+.3f} (policy) {loss_critic:.3f} (value)  entropy {entropy:.2f}"
    diagnostics: tuple[str, ...] = ("entropy",)
    """Metrics of the loss to report. In ``reported`` they precede ``"explained_variance"``, the last one."""
    data_parallel = True
    masks_agents = True
    scheduled_in_loss: ClassVar[tuple[str, ...]] = ("entropy_coeff",)
    """Scheduled options that are attributes of the loss."""

    def __init__(self, config: OnPolicyT, *, overlap: bool = False) -> None:
        super().__init__(config, overlap=overlap)
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        self._shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches"))  # the same on all ranks
        self.estimator = self.make_estimator()
        self.loss = self.make_loss()
        self.symmetry: SymmetryLoss | None = None
        self._mirrored: MirroredStates | None = None
        if config.symmetry:
            self._begin_symmetry()
        self._normalizes_over_ranks = world_size() > 1 and getattr(self.loss, "normalize_advantage", False)
        if self._normalizes_over_ranks:  # done before the gradient steps, which then exchange gradients only
            cast(Any, self.loss).normalize_advantage = False
        self.optimizer = GradientStep(
            self.agent.parameters(),
            learning_rate=config.learning_rate,
            max_norm=config.max_grad_norm,
            eps=config.adam_eps,
            capturable=config.cuda_graph or "learning_rate" not in config.scheduled,  # adaptive, on the device
        )
        self._run: Callable[..., Tensor] = self.update
        if config.compile or config.cuda_graph:
            self._keep_schedules_on_device()
        # compiled code can neither read the number of ends nor exchange statistics
        ends = bootstraps_at_ends_only(torch.device(config.device))
        apart = config.compile and not ends and not (world_size() > 1 and self.estimator.average)
        self._results = execution.compile(self.estimator.results, backend="inductor" if apart else "eager")
        self._large_states = large_states(config)
        self._compiled = self._gradients("inductor") if config.compile else None
        if config.cuda_graph:
            from recurl.trainers.optim.cuda_graph import CudaGraphStep  # noqa: PLC0415 - imported where it is used

            self._run = CudaGraphStep(self.update, self.agent, self.optimizer.optimizer)

    @property
    def programs(self) -> CaptureOptions:
        """How the collector compiles or captures its steps."""
        return {"cuda_graph": self.config.cuda_graph, "compile_step": self.config.compile}

    @abstractmethod
    def make_estimator(self) -> ValueEstimator:
        """Build the advantage estimator for the networks in ``agent``.

        Unless it averages, rows must not depend on each other: parts of a batch may be passed to it one by one.
        """

    @abstractmethod
    def make_loss(self) -> PolicyGradientLoss:
        """Build the loss of the networks in ``agent``."""

    @classmethod
    def make_agent(cls, config: OnPolicyT, observation_spec: Composite, action_spec: TensorSpec) -> ActorCritic:
        """Build the actor and the critic; see :meth:`Learner.make_agent`."""
        return ActorCritic(config, observation_spec, action_spec, shared_trunk=config.shared_trunk)

    @property
    def passes(self) -> UpdateSchedule:
        """Epochs, minibatches and sequence length of an update; by default one gradient step over whole rows."""
        return UpdateSchedule()

    def check_ranks(self) -> None:
        """Check that minibatches can be shared by the ranks; see :meth:`Learner.check_ranks`."""
        super().check_ranks()
        config, passes = self.config, self.passes
        length = min(passes.sequence_length or config.rollout_steps, config.rollout_steps)
        sequences = config.num_envs * (config.rollout_steps // length)
        if config.rollout_steps % length or sequences % passes.minibatches:
            raise ArgumentError(
                "With several ranks, all minibatches must have the same size: --sequence-length must divide "
                f"--rollout-steps, and --minibatches the {sequences} sequences of a rank's batch; got {length} for "
                f"{config.rollout_steps}, and {passes.minibatches}."
            )

    def _begin_symmetry(self) -> None:
        """Build the symmetry loss and the memory of mirrored episodes."""
        config, env, actor = self.config, cast("Collector", self.collector).env, self.agent.actor
        symmetries = [symmetry.without(config.drop_observations) for symmetry in load_symmetries(config.symmetry)]
        action_spec = env.action_spec_unbatched
        for symmetry in symmetries:
            symmetry.check(env.observation_spec, action_spec)
        self.symmetry = SymmetryLoss(actor, symmetries, action_spec, coeff=config.symmetry_coeff).to(config.device)
        self._mirrored = MirroredStates(actor, symmetries, sequence_length=config.sequence_steps)
        self.diagnostics = (*self.diagnostics, "asymmetry")
        self.reported = (*self.reported[:-1], "asymmetry", self.reported[-1])

    def collect(self) -> TensorDictBase:
        """Collect a batch; see :meth:`Learner.collect`. With symmetries, it has the states of the mirrored episodes."""
        batch = super().collect()
        return batch if self._mirrored is None else self._mirrored(batch)

    def measured(self, batch: TensorDictBase) -> Sequence[Tensor]:
        """Return additional metrics of a batch. In ``reported`` they follow the losses and precede ``diagnostics``.

        Args:
            batch: batch returned by the estimator, ``[B, T]``.
        """
        del batch
        return ()

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint."""
        return {
            **super().parts(),
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "shuffle": GeneratorState(self._shuffle),
            "mirrored": self._mirrored,
        }

    @property
    def own(self) -> tuple[str, ...]:
        """Parts of a checkpoint that differ between ranks."""
        return (*super().own, "mirrored")

    def load_state_dict(self, state: dict[str, Any], *, begin_anew: bool = False) -> None:
        """Load a state; see :meth:`Learner.load_state_dict`."""
        shuffle = GeneratorState(self._shuffle).state_dict()  # absent from runs of earlier versions
        super().load_state_dict({"shuffle": shuffle, **state}, begin_anew=begin_anew)

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Train the networks on a batch.

        Args:
            batch: batch returned by :meth:`collect`, ``[B, T]``; its rewards are replaced by scaled rewards.

        Returns:
            Losses and gradient norm, averaged over the update; diagnostics, averaged over its last epoch; and the
            explained variance of the critic before the update. All are averaged over the ranks. Gradient steps with a
            non-finite loss or norm are skipped; ``fault`` names the first.
        """
        return self._launch(batch)()

    @property
    def learns_ahead(self) -> bool:
        """Whether updates are asynchronous: not if ``learn`` is overridden."""
        return getattr(self.learn, "__func__", None) is OnPolicy.learn

    def learn_later(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        """Launch an update; see :meth:`Learner.learn_later`."""
        return self._launch(batch) if self.learns_ahead else super().learn_later(batch)

    def _launch(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        if self.scaler is not None:
            with global_statistics():
                self.scaler.update(batch[NEXT, REWARD], batch[NEXT, DONE], mask_of(batch))
            batch[NEXT, REWARD] = self.scaler(batch[NEXT, REWARD])
        with compiled_later(self.env_steps == self.frames_per_update):
            if self.config.cuda_graph:
                with span(GRADIENT_GRAPH):
                    values = self._run(batch.select(*self._update_keys, strict=False), self._orders(batch))
            else:
                values = self._run(batch)
        with global_statistics():
            self.agent.observe(batch)
            for symmetry in [] if self.symmetry is None else self.symmetry.symmetries:
                self.agent.observe(self._image(batch, symmetry))  # so that the normalization is symmetric, too
        average_([values])
        reading = Reading([values])
        return lambda: self.report(dict(zip(self.reported, reading()[0].tolist(), strict=True)), CHECKED)

    def _image(self, batch: TensorDictBase, symmetry: Symmetry) -> TensorDictBase:
        """Return the observations of a batch under a symmetry."""
        image = batch.select(*self.agent.all_observations.keys)
        for key in self.agent.all_observations.keys:
            image.set(key, symmetry.transform(key, batch.get(key)))
        return image

    def update(self, batch: TensorDictBase, orders: Tensor | None = None) -> Tensor:
        """Make one gradient step over whole rows, and return the metrics of :meth:`summary`.

        Args:
            batch: ``[B, T]``; advantages and value targets are written into it.
            orders: order of the sequences in each epoch, on the device of the batch; drawn here if None.
        """
        explained = self.write_advantages(batch)
        self.loss.metrics = self.diagnostics
        gradients, ((minibatch,),) = self.gradients(), self.epochs(batch, orders)
        losses = gradients(minibatch)
        return self.summary(batch, explained, [[(losses, self.optimizer.descend(self.total(losses)))]])

    def write_advantages(self, batch: TensorDictBase) -> Tensor:
        """Write advantages and value targets into a batch, and return the explained variance of the critic.

        Rows with large recurrent states are processed in parts; see
        :func:`~recurl.trainers.algorithms.footprint.rows_at_once`.
        """
        keys, rows = self.estimator.tensor_keys, rows_at_once(self.config, self._large_states)
        with span(ADVANTAGES), global_statistics(), torch.no_grad():
            if self.estimator.average or rows >= batch.batch_size[0]:
                results = self._results(batch)
            else:
                parts = [self._results(part) for part in batch.split(rows)]
                results = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            for key, result in results.items():
                batch.set(key, result.unsqueeze(-1))
            mask = mask_of(batch)
            mask = None if mask is None else mask.unsqueeze(-1)
            return explained_variance(batch[keys.value], batch[keys.value_target], mask)

    def gradients(self) -> Callable[[Step], Mapping[Any, Tensor]]:
        """Return the losses' gradients for an update in their fastest form; see :func:`recurl.execution.compile`."""
        return self._compiled or self._gradients("auto")

    def _gradients(self, backend: execution.Backend) -> Callable[[Step], Mapping[Any, Tensor]]:
        gradients = execution.compile(self.loss.gradients, backend=backend)
        if self.symmetry is None:
            return gradients
        mirrored = execution.compile(self.symmetry.gradients, backend=backend)
        return partial(_sum_gradients, gradients, mirrored, list(self.symmetry.parameters()))

    def total(self, losses: Mapping[Any, Tensor]) -> Tensor:
        """Return the sum of the losses."""
        more = () if self.symmetry is None else ("loss_symmetry",)
        return cast(Tensor, sum(losses[name] for name in (*LOSSES, *more)))

    def summary(
        self, batch: TensorDictBase, explained: Tensor, epochs: Sequence[Sequence[tuple[Mapping[Any, Tensor], Tensor]]]
    ) -> Tensor:
        """Return the metrics named in ``reported``.

        Args:
            batch: the batch with advantages.
            explained: result of :meth:`write_advantages`.
            epochs: losses and gradient norm of every gradient step of each epoch; the last ones have the diagnostics.
        """
        self.loss.metrics = True  # as outside of updates
        steps = [step for epoch in epochs for step in epoch]
        checked = _means([[*(losses[name] for name in LOSSES), norm] for losses, norm in steps])
        diagnostics = _means([[losses[name] for name in self.diagnostics] for losses, _ in epochs[-1]])
        return torch.cat([checked, *(value.reshape(1) for value in (*self.measured(batch), *diagnostics, explained))])

    def epochs(self, batch: TensorDictBase, orders: Tensor | None = None) -> Iterator[Iterable[Entries]]:
        """Yield the minibatches of each epoch: rows of sequences of equal length if their orders are given."""
        minibatches = self._minibatches(batch.select(*self._loss_keys, strict=False))
        deal = cast(Callable[[Any], Iterable[Entries]], minibatches.entries if orders is None else minibatches.rows)
        if not self._normalizes_over_ranks:
            yield from (deal(None if orders is None else orders[epoch]) for epoch in range(self.passes.epochs))
            return
        from recurl.trainers.optim.rank_advantages import RankAdvantages  # noqa: PLC0415 - for several ranks only

        orders = self._draw_orders(minibatches) if orders is None else orders
        key = self.loss.tensor_keys.advantage
        advantages = RankAdvantages(batch.get(key), key, orders.to(self.config.device), len(minibatches))
        for epoch, order in enumerate(orders):
            yield advantages.normalized(epoch, deal(order))

    def _draw_orders(self, minibatches: SequenceMinibatches) -> Tensor:
        return torch.stack([minibatches.deal() for _ in range(self.passes.epochs)])

    def _minibatches(self, data: TensorDictBase) -> SequenceMinibatches:
        passes = self.passes
        return SequenceMinibatches(
            data, passes.minibatches, passes.sequence_length, self._shuffle, rank=rank(), ranks=world_size()
        )

    @property
    def _update_keys(self) -> list[NestedKey]:
        """Keys of the batch entries that an update reads."""
        return list(dict.fromkeys([*self.estimator.in_keys, *self._loss_keys]))

    @property
    def _loss_keys(self) -> list[NestedKey]:
        """Keys of the batch entries that the losses read."""
        return [*self.loss.in_keys, *([] if self.symmetry is None else self.symmetry.in_keys)]

    def _orders(self, batch: TensorDictBase) -> Tensor:
        """Draw the order of the sequences in each epoch, ``[epochs, S]``, on the device of the batch."""
        orders = self._draw_orders(self._minibatches(batch.select()))
        device = torch.device(self.config.device)
        return orders.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else orders.to(device)

    def _keep_schedules_on_device(self) -> None:
        """Turn scheduled options of the loss into tensors: compiled code and CUDA graphs read Python numbers once."""
        for name in self.scheduled_in_loss:
            value = getattr(self.config, name)
            if value and self.config.scheduled[name] != "constant":
                setattr(self.loss, name, torch.tensor(value, device=self.config.device))

    def schedules(self) -> dict[str, Callable[[float], None]]:
        """Return the setters of the learning rate and of the loss's options; see :meth:`Learner.schedules`."""
        return {**super().schedules(), **{name: partial(self._set_in_loss, name) for name in self.scheduled_in_loss}}

    def _set_in_loss(self, name: str, value: float) -> None:
        present = getattr(self.loss, name)
        if isinstance(present, Tensor):
            present.fill_(value)
        else:
            setattr(self.loss, name, value)

    def restart(self, rows: Tensor) -> bool:
        """Reset some environments; see :meth:`Learner.restart`."""
        if self.scaler is not None:
            self.scaler.returns[rows] = 0
        return super().restart(rows)

    def close(self) -> None:
        """Close the environments and free the CUDA graph of the update."""
        super().close()
        if self.config.cuda_graph:
            cast("CudaGraphStep", self._run).reset()


def _sum_gradients(
    first: Callable[[Step], Mapping[Any, Tensor]],
    second: Callable[[Step], Mapping[Any, Tensor]],
    parameters: list[nn.Parameter],
    batch: Step,
) -> dict[Any, Tensor]:
    """Return the losses of two functions that set gradients, and set the sums of their gradients.

    Args:
        first: function of a batch.
        second: function of a batch.
        parameters: the parameters that ``second`` sets gradients of.
        batch: the batch.
    """
    losses = second(batch)
    added = [parameter.grad for parameter in parameters]
    losses = {**first(batch), **losses}
    for parameter, gradient in zip(parameters, added, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return losses


def _means(rows: list[Any]) -> Tensor:
    """Return the column means of rows of scalars."""
    return torch.stack([value for row in rows for value in row]).reshape(len(rows), -1).mean(0)
