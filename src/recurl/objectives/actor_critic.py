"""Base of the actor-critic losses that learn from replay: SAC, discrete SAC and TD3."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import ClassVar, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recurl.absent import without_arguments
from recurl.errors import ArgumentError
from recurl.keys import IS_INIT, MASK, TRAJ_IDS, TRAJ_STEPS, NestedKey, normalize_key, path_of
from recurl.lowering import Step, modules_in_order, shared_state, why_not_lowered, why_whole
from recurl.objectives.action_values import ActionValueLoss
from recurl.objectives.common import check_network, check_writes, entry, masked_mean, per_token, states_of
from recurl.objectives.sequences import Sequences
from recurl.objectives.surrogate import DISTANCES
from recurl.objectives.targets import target_of
from recurl.objectives.trunks import Ahead, Head, Trunk, TrunkRun, depending_on

__all__ = ["ActorCriticLoss", "Critic", "CriticRun", "without_torchrl_arguments"]

_TARGET = "target"


without_torchrl_arguments = without_arguments(
    delay_actor="leave it out, TD3 has delayed copies of the actor, SAC none",
    delay_qvalue="leave it out, the critics have delayed copies, which a SoftUpdate moves",
    priority_key="write set_keys(priority=...)",
    separate_losses="leave it out, what actor and critics share is trained by loss_qvalue alone",
    reduction="leave it out, losses are means, and td_error is of every token",
    skip_done_states="leave it out, nothing is bootstrapped where terminated",
    deactivate_vmap="leave it out, nothing is vmapped",
    use_prioritized_weights="leave it out, weights count where the batch has priority_weight",
    scalar_output_mode="leave it out, losses are means",
)
"""Decorator of losses, which refuses arguments that only TorchRL's have."""


class Critic(NamedTuple):
    """A critic as it runs in one call: what runs along sequences, and what reads the action."""

    trunk: Trunk
    head: Head


class CriticRun(NamedTuple):
    """A critic after its pass along the sequences.

    Attributes:
        head: what gives the values.
        entries: what it reads, flat ``[M, ...]``, without the action.
    """

    head: Head
    entries: dict[NestedKey, Tensor]

    def detached(self) -> CriticRun:
        """Return the same pass without gradients."""
        return CriticRun(self.head, {key: value.detach() for key, value in self.entries.items()})


class ActorCriticLoss(ActionValueLoss):
    """Base of the actor-critic losses that learn from replay.

    A critic's memory reads observations; the action enters after it, so that one pass along the sequences gives the
    values of any action. Every network, targets included, computes its own states inside a sequence. Modules that the
    actor shares with a critic are trained by the critic's loss: the actor's loss sees their outputs detached.

    Args:
        actor_network: the actor.
        qvalue_network: the critics, or one of which ``num_qvalue_nets`` are made; see :class:`SACLoss`.
        num_qvalue_nets: number of critics that are made of one.
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards that are summed before the next value, at least 1.
        loss_function: distance of values and targets: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
    """

    accepted_keys = (*ActionValueLoss.accepted_keys, "state_action_value")
    reads_action: ClassVar[bool] = True
    """Whether the critics read the action; if not, they write the values of all actions."""

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
        given = list(qvalue_network) if several else [qvalue_network]
        for network in (actor_network, *given):
            check_network("An actor or critic", network, "TensorDictModule")
        self.actor_network = actor_network
        if isinstance(qvalue_network, TensorDictModuleBase):
            given = self._twins(qvalue_network, num_qvalue_nets)
        if not given:
            raise ArgumentError("qvalue_network must be a critic, or a list of one or more, got an empty list.")
        if len(set(map(id, given))) < len(given):
            raise ArgumentError(
                "qvalue_network must be a list of critics with weights of their own, but holds the same one twice: "
                "build each one, or give one critic and num_qvalue_nets."
            )
        self.qvalue_network = nn.ModuleList(given)
        self.target_qvalue_network = target_of(self.qvalue_network)
        self._distance = DISTANCES[loss_function]
        self.critics(self.qvalue_network)
        _check_different(given)
        shared = shared_state(m for network in (actor_network, *given) for m in network.modules())
        if shared is not None:
            raise ArgumentError(
                f"Actor and critics must not share state keys, but each has a recurrent module with the state "
                f"{shared!r}, so one would start from the states of the other. Share the module, or give one other "
                "keys, in_keys=[value, 'its_state', ...] and out_keys=[features, ('next', 'its_state'), ...]."
            )

    # -- networks

    @property
    def value_key(self) -> NestedKey:
        """Entry that the critics write."""
        return self.tensor_keys.state_action_value

    @property
    def action_key(self) -> NestedKey:
        """Entry that the critics read as the action, and that holds the actions taken."""
        return self.tensor_keys.action

    def networks(self) -> list[TensorDictModuleBase]:
        """Return the networks whose states a batch holds: critics and actor."""
        return [*cast("Iterable[TensorDictModuleBase]", self.qvalue_network), self.actor_network]

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks, whose states a batch may hold under ``"target"``."""
        return list(cast("Iterable[TensorDictModuleBase]", self.target_qvalue_network))

    def actor_trunk(self) -> Trunk:
        """Return the part of the actor that runs along sequences."""
        raise NotImplementedError

    def critics(self, networks: nn.ModuleList) -> list[Critic]:
        """Return critics as they are now, taken apart.

        Raises:
            ArgumentError: one doesn't read the action, or reads it in its memory.
        """
        return [self._taken_apart(cast(TensorDictModuleBase, network)) for network in networks]

    def _taken_apart(self, network: TensorDictModuleBase) -> Critic:
        modules = modules_in_order(network, apart=True)
        if not self.reads_action:
            return Critic(Trunk(modules), Head(()))
        after = depending_on([self.action_key], modules)
        if not after:
            raise ArgumentError(
                f"A critic must read the action, {self.action_key!r}, after its memory, but its in_keys are "
                f"{network.in_keys}: concatenate features and action in its last layers."
            )
        whole = next((module for module in after if isinstance(module, TensorDictSequential)), None)
        if whole is not None and states_of(whole):
            raise ArgumentError(
                "A critic must be a sequence that can be taken apart, as the action enters after the memory, but "
                f"{why_whole(whole)}."
            )
        if states_of(*after):
            raise ArgumentError(
                f"The memory of a critic must not read the action {self.action_key!r}, got one with the states "
                f"{states_of(*after)} that does: values of a new action would need another pass along the sequences. "
                "Let the memory read observations (and the previous action, a transform gives it), and the layers "
                "after it the action, as modules of one TensorDictSequential."
            )
        before = [module for module in modules if all(module is not other for other in after)]
        head = Head(after, [self.action_key])
        written = {normalize_key(key) for module in before for key in module.out_keys}
        return Critic(Trunk(before, [key for key in head.reads if key not in written]), head)

    def _twins(self, network: TensorDictModuleBase, count: int) -> list[TensorDictModuleBase]:
        """Return ``count`` critics with the memory of ``network`` in common, and layers of their own after it."""
        if count < 1:
            raise ArgumentError(f"num_qvalue_nets must be at least 1, got {count}.")
        modules = modules_in_order(network, apart=True)
        if self.reads_action:
            after = depending_on([self.action_key], modules)
        else:
            last = max((i for i, module in enumerate(modules) if states_of(module)), default=-1)
            after = modules[last + 1 :]
        before = [module for module in modules if all(module is not other for other in after)]
        return [network, *(TensorDictSequential(*before, *_renewed(after)) for _ in range(count - 1))]

    # -- entries

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        trunks = [self.actor_trunk(), *(critic.trunk for critic in self.critics(self.qvalue_network))]
        keys = self.tensor_keys
        own = [keys.action, *keys.of_sequences, IS_INIT, TRAJ_IDS, TRAJ_STEPS, MASK, keys.priority_weight]
        return list(dict.fromkeys([*(k for t in trunks for k in t.in_keys), *own, *self.target_states.values()]))

    @property
    def target_states(self) -> dict[NestedKey, NestedKey]:
        """Keys at which the states of target networks are read, by state of the network."""
        states = states_of(*self.target_networks())
        return {key: (_TARGET, *path_of(key)) for key in states}

    def why_not_lowered(self) -> str | None:
        """Return the reason why the networks need TensorDicts, or None if they are lowered."""
        critics = [*self.critics(self.qvalue_network), *self.critics(self.target_qvalue_network)]
        parts = [self.actor_trunk().network, *(n for c in critics for n in (c.trunk.network, c.head.network))]
        return why_not_lowered(parts)

    def target_batch(self, batch: Step) -> Step:
        """Return ``batch`` with the target networks' own states in place of the networks', where it has them."""
        own = {key: value for key, at in self.target_states.items() if (value := batch.get(at, None)) is not None}
        if not own:
            return batch
        result = batch.copy()
        for key, value in own.items():
            result.set(key, value)
        return result

    # -- passes

    def online(self, batch: Step, sequences: Sequences) -> tuple[list[TrunkRun], list[CriticRun]]:
        """Run the critics along the sequences: their trunks, and what their heads read, ``[N, ...]``."""
        return self._along(self.qvalue_network, batch, sequences, None)

    @torch.no_grad()
    def delayed(self, batch: Step, sequences: Sequences, ahead: Ahead) -> tuple[list[TrunkRun], list[CriticRun]]:
        """Run the target critics along the sequences and past their ends: what their heads read, ``[N + E, ...]``."""
        return self._along(self.target_qvalue_network, self.target_batch(batch), sequences, ahead)

    def _along(
        self, networks: nn.ModuleList, batch: Step, sequences: Sequences, ahead: Ahead | None
    ) -> tuple[list[TrunkRun], list[CriticRun]]:
        trunks, runs = list[TrunkRun](), list[CriticRun]()
        for network in networks:
            check_writes("A critic", cast(TensorDictModuleBase, network), self.value_key)
        for critic in self.critics(networks):
            trunks.append(critic.trunk.along(batch, sequences, trunks))
            reads = critic.head.reads if self.reads_action else [self.value_key]
            runs.append(CriticRun(critic.head, trunks[-1].entries(reads, ahead)))
        return trunks, runs

    def values_of(self, critics: Iterable[CriticRun], action: Tensor, *, frozen: bool = False) -> Tensor:
        """Return the critics' values of flat actions ``[M, ...]``, ``[K, M]``.

        Args:
            critics: the critics' passes over the same M tokens.
            action: the actions.
            frozen: let no gradient reach the critics, while it passes to the action.
        """
        values = list[Tensor]()
        for critic in critics:
            used = critic.detached() if frozen else critic
            out = used.head({**used.entries, self.action_key: action}, frozen=frozen)
            values.append(per_token(self.value_key, cast(Tensor, out.get(self.value_key)), action.shape[:1]))
        return torch.stack(values)

    def taken(self, batch: Step) -> Tensor:
        """Return the actions of the batch, flat ``[N, ...]``."""
        action = entry(batch, self.action_key, "The actor writes it during collection.")
        return action.flatten(0, batch.ndim - 1)

    def targets(self, sequences: Sequences, ahead: Ahead, value: Tensor) -> Tensor:
        """Return the targets of the actions taken, ``[N]``.

        Args:
            sequences: those of the batch.
            ahead: the steps past their ends.
            value: values of the tokens and those steps, ``[N + E]``.
        """
        next_value = value.index_select(0, ahead.following).reshape(sequences.reward.shape)
        return self.returns(next_value, sequences).reshape(-1)

    def critic_losses(
        self, batch: Step, sequences: Sequences, values: Tensor, target: Tensor
    ) -> dict[NestedKey, Tensor]:
        """Return the loss of the critics, and what is reported of it.

        Args:
            batch: ``[*B, T]``.
            sequences: those of the batch.
            values: the critics' values of the actions taken, ``[K, N]``.
            target: their targets, ``[N]``.
        """
        mask = sequences.flat_mask
        distance = self._distance(values, target.expand_as(values), reduction="none").sum(0)
        keys = self.tensor_keys
        weight = cast(Tensor | None, batch.get(keys.priority_weight, None))
        if weight is not None:
            distance = distance * per_token(keys.priority_weight, weight, batch.batch_size).reshape(-1)
        found = values.detach()
        error = (target - found).abs().amax(0)
        if mask is not None:
            error = error.masked_fill(~mask, 0.0)
        return {
            "loss_qvalue": masked_mean(distance, mask),
            keys.priority: error.reshape(*batch.batch_size, 1),
            "q_value": masked_mean(found.mean(0), mask),
            "q_target": masked_mean(target, mask),
        }


def _renewed(modules: Sequence[TensorDictModuleBase]) -> list[TensorDictModuleBase]:
    """Return copies with new parameters, drawn by ``reset_parameters()`` of each part, inner parts first.

    Raises:
        ArgumentError: a parameter isn't drawn by it, and isn't constant, as biases and scales are.
    """
    originals = nn.ModuleList(modules)
    copies = copy.deepcopy(originals).apply(_reset)
    for (name, old), new in zip(originals.named_parameters(), copies.parameters(), strict=True):
        if old.requires_grad and _same(old, new) and bool((old != old.flatten()[:1]).any()):
            part = type(originals.get_submodule(name.rpartition(".")[0])).__name__
            raise ArgumentError(
                "Critics that are made of one must have parameters of their own, drawn by reset_parameters(), but that "
                f"of {part} doesn't exist or leaves {name.partition('.')[2]!r} as it is: give a list of critics, each "
                "built by itself."
            )
    return [cast(TensorDictModuleBase, module) for module in copies]


def _reset(part: nn.Module) -> None:
    reset = getattr(part, "reset_parameters", None)
    if reset is None and not isinstance(part, TensorDictModuleBase):
        reset = getattr(part, "_reset_parameters", None)  # of torch's attention
    if reset is not None:
        reset()


def _check_different(critics: Sequence[TensorDictModuleBase]) -> None:
    """Refuse critics that would stay equal, as they begin with the same parameters and learn from the same losses."""
    for first, second in combinations(critics, 2):
        pairs = list(zip(first.parameters(), second.parameters(), strict=False))
        if pairs and all(_same(one, other) for one, other in pairs):
            raise ArgumentError(
                "Critics must begin with different parameters, but two have the same values, so that they would stay "
                "one critic. Build each one by itself instead of copying it, or give one critic and num_qvalue_nets; "
                "such a critic needs layers with parameters after its memory."
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two parameters are one or have the same values; False where there are none yet."""
    if one is other:
        return True
    unlike = one.dtype != other.dtype or one.device != other.device
    return not (unlike or one.is_meta or is_lazy(one) or is_lazy(other)) and torch.equal(one, other)
