"""Base class of actor-critic losses for replay: SAC, discrete SAC and TD3."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import ClassVar, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recurl.core.errors import ArgumentError
from recurl.core.keys import IS_INIT, MASK, TRAJ_IDS, TRAJ_STEPS, NestedKey, normalize_key, path_of
from recurl.core.messages import without_arguments
from recurl.execution.explain import Explanation
from recurl.execution.lowering import explain, modules_in_order, shared_state, why_whole
from recurl.objectives.action_values import ActionValueLoss
from recurl.objectives.common import check_network, check_writes, entry, masked_mean, per_token, states_of
from recurl.objectives.sequences import Sequences
from recurl.objectives.surrogate import DISTANCES
from recurl.objectives.targets import target_of
from recurl.objectives.trunks import BootstrapSteps, SequenceTrunk, TokenHead, UnrolledTrunk, depending_on
from recurl.sequences.entries import Step

__all__ = ["ActorCriticLoss", "Critic", "UnrolledCritic", "without_torchrl_arguments"]

_TARGET = "target"


without_torchrl_arguments = without_arguments(
    delay_actor="leave it out, TD3 has delayed copies of the actor, SAC none",
    delay_qvalue="leave it out, the critics have delayed copies, which a SoftUpdate moves",
    priority_key="write set_keys(priority=...)",
    separate_losses="leave it out, modules shared by actor and critics are trained by loss_qvalue only",
    reduction="leave it out, losses are means, and td_error is per token",
    skip_done_states="leave it out, nothing is bootstrapped where terminated",
    deactivate_vmap="leave it out, nothing is vmapped",
    use_prioritized_weights="leave it out, weights are used if the batch has priority_weight",
    scalar_output_mode="leave it out, losses are means",
)
"""Decorator of losses that rejects arguments that exist only in TorchRL."""


class Critic(NamedTuple):
    """A critic, split into a trunk that runs along sequences and a head that reads the action."""

    trunk: SequenceTrunk
    head: TokenHead


class UnrolledCritic(NamedTuple):
    """A critic after its trunk's pass along the sequences.

    Attributes:
        head: head that computes the values.
        inputs: the head's inputs except the action, flat ``[M, ...]``.
    """

    head: TokenHead
    inputs: dict[NestedKey, Tensor]

    def detached(self) -> UnrolledCritic:
        """Return a copy with detached inputs."""
        return UnrolledCritic(self.head, {key: value.detach() for key, value in self.inputs.items()})


class ActorCriticLoss(ActionValueLoss):
    """Base class of actor-critic losses for replay.

    A critic's memory reads observations, and the action enters after it, so one pass along the sequences serves the
    values of any action. Every network, including targets, computes its own states inside a sequence. Modules shared by
    the actor and a critic are trained by the critic's loss only: the actor's loss detaches their outputs.

    Args:
        actor_network: the actor.
        qvalue_network: the critics, or one critic to create ``num_qvalue_nets`` from; see :class:`SACLoss`.
        num_qvalue_nets: number of critics to create from a single one.
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards summed before the bootstrap value, at least 1.
        loss_function: distance between values and targets: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
    """

    accepted_keys = (*ActionValueLoss.accepted_keys, "state_action_value")
    reads_action: ClassVar[bool] = True
    """Whether the critics read the action. If False, they write the values of all actions."""

    qvalue_network: nn.ModuleList
    target_qvalue_network: nn.ModuleList

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        num_qvalue_nets: int,
        gamma: float,
        n_steps: int,
        loss_function: str,
    ) -> None:
        super().__init__(gamma, n_steps)
        if loss_function not in DISTANCES:
            raise ArgumentError(f"loss_function must be one of {sorted(DISTANCES)}, got {loss_function!r}.")
        several = isinstance(qvalue_network, Sequence | nn.ModuleList)
        critics = list(qvalue_network) if several else [qvalue_network]
        for network in (actor_network, *critics):
            check_network("An actor or critic", network, "TensorDictModule")
        self.actor_network = actor_network
        if isinstance(qvalue_network, TensorDictModuleBase):
            critics = self._make_critics(qvalue_network, num_qvalue_nets)
        if not critics:
            raise ArgumentError("qvalue_network must be a critic, or a list of one or more, got an empty list.")
        if len(set(map(id, critics))) < len(critics):
            raise ArgumentError(
                "qvalue_network must be a list of critics with separate weights, but contains the same critic twice: "
                "build each one, or give one critic and num_qvalue_nets."
            )
        self.qvalue_network = nn.ModuleList(critics)
        self.target_qvalue_network = target_of(self.qvalue_network)
        self._distance = DISTANCES[loss_function]
        self.split_critics(self.qvalue_network)
        _check_distinct(critics)
        shared = shared_state(m for network in (actor_network, *critics) for m in network.modules())
        if shared is not None:
            raise ArgumentError(
                f"Actor and critics must not share state keys, but each has a recurrent module with the state "
                f"{shared!r}, so one would start from the states of the other. Share the module, or give one of them "
                "other keys, in_keys=[value, 'its_state', ...] and out_keys=[features, ('next', 'its_state'), ...]."
            )

    # -- networks

    @property
    def value_key(self) -> NestedKey:
        """Key of the critics' output."""
        return self.tensor_keys.state_action_value

    @property
    def action_key(self) -> NestedKey:
        """Key of the action that the critics read, which also holds the actions taken in a batch."""
        return self.tensor_keys.action

    def networks(self) -> list[TensorDictModuleBase]:
        """Return the networks whose states a batch holds: critics and actor."""
        return [*cast("Iterable[TensorDictModuleBase]", self.qvalue_network), self.actor_network]

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks, whose states a batch may hold under ``"target"``."""
        return list(cast("Iterable[TensorDictModuleBase]", self.target_qvalue_network))

    def actor_trunk(self) -> SequenceTrunk:
        """Return the part of the actor that runs along sequences."""
        raise NotImplementedError

    def split_critics(self, networks: nn.ModuleList) -> list[Critic]:
        """Return the current critics, split into trunk and head.

        Raises:
            ArgumentError: a critic doesn't read the action, or reads it in its memory.
        """
        return [self._split_critic(cast(TensorDictModuleBase, network)) for network in networks]

    def _split_critic(self, network: TensorDictModuleBase) -> Critic:
        modules = modules_in_order(network, ignore_global_hooks=True)
        if not self.reads_action:
            return Critic(SequenceTrunk(modules), TokenHead(()))
        after = depending_on([self.action_key], modules)
        if not after:
            raise ArgumentError(
                f"A critic must read the action, {self.action_key!r}, after its memory, but its in_keys are "
                f"{network.in_keys}: concatenate features and action in its last layers."
            )
        whole = next((module for module in after if isinstance(module, TensorDictSequential)), None)
        if whole is not None and states_of(whole):
            raise ArgumentError(
                "A critic must be a sequence that can be split, as the action enters after the memory, but "
                f"{why_whole(whole)}."
            )
        if states_of(*after):
            raise ArgumentError(
                f"The memory of a critic must not read the action {self.action_key!r}, but the one with the states "
                f"{states_of(*after)} does: values of a new action would need another pass along the sequences. "
                "Let the memory read observations (and the previous action, which a transform provides), and the "
                "layers after it the action, as modules of one TensorDictSequential."
            )
        before = [module for module in modules if all(module is not other for other in after)]
        head = TokenHead(after, [self.action_key])
        written = {normalize_key(key) for module in before for key in module.out_keys}
        return Critic(SequenceTrunk(before, [key for key in head.reads if key not in written]), head)

    def _make_critics(self, network: TensorDictModuleBase, count: int) -> list[TensorDictModuleBase]:
        """Return ``count`` critics that share the memory of ``network`` and have separate layers after it."""
        if count < 1:
            raise ArgumentError(f"num_qvalue_nets must be at least 1, got {count}.")
        modules = modules_in_order(network, ignore_global_hooks=True)
        if self.reads_action:
            after = depending_on([self.action_key], modules)
        else:
            last = max((i for i, module in enumerate(modules) if states_of(module)), default=-1)
            after = modules[last + 1 :]
        before = [module for module in modules if all(module is not other for other in after)]
        return [network, *(TensorDictSequential(*before, *_reinitialized_copies(after)) for _ in range(count - 1))]

    # -- entries

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        trunks = [self.actor_trunk(), *(critic.trunk for critic in self.split_critics(self.qvalue_network))]
        keys = self.tensor_keys
        own = [keys.action, *keys.of_sequences, IS_INIT, TRAJ_IDS, TRAJ_STEPS, MASK, keys.priority_weight]
        return list(dict.fromkeys([*(k for t in trunks for k in t.in_keys), *own, *self.target_states.values()]))

    @property
    def target_states(self) -> dict[NestedKey, NestedKey]:
        """Keys of the target networks' states in a batch, by state key of the network."""
        states = states_of(*self.target_networks())
        return {key: (_TARGET, *path_of(key)) for key in states}

    def explain(self) -> Explanation:
        """Explain in which form the networks run."""
        critics = [*self.split_critics(self.qvalue_network), *self.split_critics(self.target_qvalue_network)]
        parts = [self.actor_trunk().network, *(n for c in critics for n in (c.trunk.network, c.head.network))]
        return explain("losses", parts)

    def target_batch(self, batch: Step) -> Step:
        """Return ``batch`` with the networks' states replaced by those of the target networks, where it holds them."""
        own = {key: value for key, at in self.target_states.items() if (value := batch.get(at, None)) is not None}
        if not own:
            return batch
        result = batch.copy()
        for key, value in own.items():
            result.set(key, value)
        return result

    # -- passes

    def unroll_critics(self, batch: Step, sequences: Sequences) -> tuple[list[UnrolledTrunk], list[UnrolledCritic]]:
        """Run the critics' trunks along the sequences; the inputs of their heads are ``[N, ...]``."""
        return self._unroll(self.qvalue_network, batch, sequences, None)

    @torch.no_grad()
    def unroll_target_critics(
        self, batch: Step, sequences: Sequences, bootstrap: BootstrapSteps
    ) -> tuple[list[UnrolledTrunk], list[UnrolledCritic]]:
        """Run the target critics along the sequences and past their ends; head inputs are ``[N + E, ...]``."""
        return self._unroll(self.target_qvalue_network, self.target_batch(batch), sequences, bootstrap)

    def _unroll(
        self, networks: nn.ModuleList, batch: Step, sequences: Sequences, bootstrap: BootstrapSteps | None
    ) -> tuple[list[UnrolledTrunk], list[UnrolledCritic]]:
        trunks, unrolled = list[UnrolledTrunk](), list[UnrolledCritic]()
        for network in networks:
            check_writes("A critic", cast(TensorDictModuleBase, network), self.value_key)
        for critic in self.split_critics(networks):
            trunks.append(critic.trunk.unroll(batch, sequences, trunks))
            reads = critic.head.reads if self.reads_action else [self.value_key]
            unrolled.append(UnrolledCritic(critic.head, trunks[-1].entries(reads, bootstrap)))
        return trunks, unrolled

    def values_of(self, critics: Iterable[UnrolledCritic], action: Tensor, *, frozen: bool = False) -> Tensor:
        """Return the critics' values of flat actions ``[M, ...]``, ``[K, M]``.

        Args:
            critics: the critics, unrolled over the same M tokens.
            action: the actions.
            frozen: compute gradients with respect to the action, but not the critics.
        """
        values = list[Tensor]()
        for critic in critics:
            used = critic.detached() if frozen else critic
            out = used.head({**used.inputs, self.action_key: action}, frozen=frozen)
            values.append(per_token(self.value_key, cast(Tensor, out.get(self.value_key)), action.shape[:1]))
        return torch.stack(values)

    def actions_taken(self, batch: Step) -> Tensor:
        """Return the actions of the batch, flat ``[N, ...]``."""
        action = entry(batch, self.action_key, "The actor writes it during collection.")
        return action.flatten(0, batch.ndim - 1)

    def targets(self, sequences: Sequences, bootstrap: BootstrapSteps, value: Tensor) -> Tensor:
        """Return the targets of the actions taken, ``[N]``.

        Args:
            sequences: sequences of the batch.
            bootstrap: the bootstrap steps past their ends.
            value: values of the tokens and of the bootstrap steps, ``[N + E]``.
        """
        next_value = value.index_select(0, bootstrap.successor).reshape(sequences.reward.shape)
        return self.returns(next_value, sequences).reshape(-1)

    def critic_losses(
        self, batch: Step, sequences: Sequences, values: Tensor, target: Tensor
    ) -> dict[NestedKey, Tensor]:
        """Return the loss of the critics, the TD errors, and the mean value and target.

        Args:
            batch: ``[*B, T]``.
            sequences: sequences of the batch.
            values: the critics' values of the actions taken, ``[K, N]``.
            target: their targets, ``[N]``.
        """
        mask = sequences.flat_mask
        distance = self._distance(values, target.expand_as(values), reduction="none").sum(0)
        keys = self.tensor_keys
        weight = cast(Tensor | None, batch.get(keys.priority_weight, None))
        if weight is not None:
            distance = distance * per_token(keys.priority_weight, weight, batch.batch_size).reshape(-1)
        detached = values.detach()
        error = (target - detached).abs().amax(0)
        if mask is not None:
            error = error.masked_fill(~mask, 0.0)
        return {
            "loss_qvalue": masked_mean(distance, mask),
            keys.priority: error.reshape(*batch.batch_size, 1),
            "q_value": masked_mean(detached.mean(0), mask),
            "q_target": masked_mean(target, mask),
        }


def _reinitialized_copies(modules: Sequence[TensorDictModuleBase]) -> list[TensorDictModuleBase]:
    """Return copies with parameters redrawn by ``reset_parameters()`` of each part, inner parts first.

    Raises:
        ArgumentError: a parameter is neither redrawn nor constant (as biases and scales are).
    """
    originals = nn.ModuleList(modules)
    copies = copy.deepcopy(originals).apply(_reset)
    for (name, old), new in zip(originals.named_parameters(), copies.parameters(), strict=True):
        if old.requires_grad and _equal_values(old, new) and bool((old != old.flatten()[:1]).any()):
            part = type(originals.get_submodule(name.rpartition(".")[0])).__name__
            raise ArgumentError(
                "Critics created from a single one need separate parameters, drawn by reset_parameters(), but that of "
                f"{part} doesn't exist or leaves {name.partition('.')[2]!r} unchanged: give a list of critics, each "
                "built separately."
            )
    return [cast(TensorDictModuleBase, module) for module in copies]


def _reset(part: nn.Module) -> None:
    reset = getattr(part, "reset_parameters", None)
    if reset is None and not isinstance(part, TensorDictModuleBase):
        reset = getattr(part, "_reset_parameters", None)  # of torch's attention
    if reset is not None:
        reset()


def _check_distinct(critics: Sequence[TensorDictModuleBase]) -> None:
    """Reject critics that would stay equal because they begin with the same parameters and learn from the same loss."""
    for first, second in combinations(critics, 2):
        pairs = list(zip(first.parameters(), second.parameters(), strict=False))
        if pairs and all(_equal_values(one, other) for one, other in pairs):
            raise ArgumentError(
                "Critics must begin with different parameters, but two have the same values and would stay identical. "
                "Build each one separately instead of copying it, or give one critic and num_qvalue_nets; such a "
                "critic needs layers with parameters after its memory."
            )


def _equal_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two parameters are the same object or have equal values; False if either has none yet."""
    if one is other:
        return True
    unlike = one.dtype != other.dtype or one.device != other.device
    return not (unlike or one.is_meta or is_lazy(one) or is_lazy(other)) and torch.equal(one, other)
