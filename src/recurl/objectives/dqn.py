"""Q-learning from sequences: DQN, double DQN and R2D2."""

from __future__ import annotations

from typing import cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import IS_INIT, MASK, TRAJ_IDS, TRAJ_STEPS, NestedKey, normalize_key, path_of
from recurl.core.messages import without_arguments
from recurl.core.torch_compat import children_of
from recurl.execution.explain import Explanation
from recurl.execution.lowering import Network, explain
from recurl.objectives.action_values import ActionValueLoss
from recurl.objectives.common import check_network, entry, masked_mean, per_token, states_of
from recurl.objectives.sequences import Sequences, Unroll
from recurl.objectives.surrogate import DISTANCES
from recurl.objectives.targets import target_of
from recurl.sequences.entries import Step
from recurl.sequences.returns import inverse_value_rescaling, value_rescaling

__all__ = ["DQNLoss"]

_TARGET = "target"


@without_arguments(action_space="leave it out, integer and one-hot actions are distinguished by their shape")
class DQNLoss(ActionValueLoss):
    """Temporal-difference loss of action values over sequences.

    With ``Q`` the network, ``Q'`` its target copy (or itself, without gradient) and ``o'`` the true next observation::

        next value = max_a Q'(o', a),  or Q'(o', argmax_a Q(o', a)) with double_dqn
        target     = n-step return of the rewards and the next value (0 where terminated, or no action is allowed)
        loss       = mean(weight * distance(Q(o, action), target))

    With ``value_rescaling`` the networks' outputs are rescaled by h, :func:`~.value.functional.value_rescaling`::

        next value = h^-1(...),  target = h(n-step return)

    Sources: Mnih et al., "Human-level control through deep reinforcement learning" (2015); van Hasselt et al., "Deep
    reinforcement learning with double Q-learning" (2016); Kapturowski et al., "Recurrent experience replay in
    distributed reinforcement learning" (R2D2, 2019), section 2.3.

    With ``greedy_returns``, an n-step return ends before the first action that is not greedy for the network, like the
    traces of Watkins's Q(lambda) (Sutton and Barto, "Reinforcement learning", 2018, section 12.10). Actions of older
    policies and of exploration then don't count against the states in which they were taken.

    The batch is a set of sequences, ``[T]``, ``[*B, T]`` or flat slices of a replay buffer. Both networks run over them
    in recurrent mode, whatever the mode outside. Within a sequence, the values of the next observation are those of the
    next token. Where a trajectory, slice or row ends, each network takes one step with the true next observation from
    the state that it has just computed, so the end of a slice, like a truncation, bootstraps exactly. An n-step return
    never extends beyond its sequence: near the end it sums fewer rewards.

    Args:
        value_network: TensorDict module from observations to ``"action_value"``, ``[*B, T, n]``, such as a
            :class:`~recurl.modules.QValueActor` (whose ``action_value_key`` is used), including all encoders. With its
            ``action_mask_key``, the maxima are over the allowed actions.
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards summed before the bootstrap value, at least 1.
        double_dqn: choose the next action with the network and evaluate it with the target network.
        value_rescaling: learn rescaled values, for returns of widely varying magnitude.
        greedy_returns: end a return before the first action that is no longer greedy.
        delay_value: keep a copy of the network as ``target_value_network``, to be updated with a :class:`SoftUpdate` or
            :class:`HardUpdate`. After assigning another ``value_network``, also assign
            ``target_value_network = target_of(network)``. If False, the network itself computes the next values.
        loss_function: distance between values and targets: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.

    Reads the inputs of the network, at the root and (except states and ``"is_init"``) under ``"next"``; the action,
    as an integer ``[*B, T]`` or one-hot ``[*B, T, n]``; ``("next", "reward")``, ``("next", "done")``, ``("next",
    "terminated")``, ``[*B, T, 1]``; and if present ``"is_init"``, ``("collector", "traj_ids")``, ``("collector",
    "traj_steps")``, ``("collector", "mask")`` (False at padding) and ``"priority_weight"`` ``[*B, T]`` (importance
    weights). All are listed in ``in_keys``. If the batch has ``("target", key)`` for a state ``key`` of the network,
    sequences of the target network start from this entry, as after a burn-in of the target network. Never writes into
    the batch.

    Returns a TensorDict with the scalar ``loss`` and, without gradients, ``td_error``, ``[*B, T, 1]``, the distance
    ``|target - Q|`` of every token (0 at padding), and the means ``q_value`` and ``q_target`` of values and targets.

    Raises:
        ArgumentError: an option is out of range; the network writes no action values; or an action has another shape.
        MissingKeyError: an entry is missing, or the network reads an entry that doesn't exist under ``"next"``.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> loss = DQNLoss(net, gamma=0.9, n_steps=2, double_dqn=True)
        >>> ends = torch.tensor([[False], [False], [True]])
        >>> after = TensorDict({"observation": torch.zeros(3, 3), "reward": torch.ones(3, 1)}, [3])
        >>> after["done"] = after["terminated"] = ends
        >>> batch = TensorDict({"observation": torch.zeros(3, 3), "action": torch.zeros(3, dtype=torch.int64)}, [3])
        >>> batch["next"] = after
        >>> losses = loss(batch)
        >>> losses["loss"].requires_grad, losses["td_error"].shape
        (True, torch.Size([3, 1]))
    """

    accepted_keys = (*ActionValueLoss.accepted_keys, "action_value")
    target_value_network: TensorDictModuleBase

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        gamma: float = 0.99,
        n_steps: int = 1,
        double_dqn: bool = False,
        value_rescaling: bool = False,
        greedy_returns: bool = False,
        delay_value: bool = True,
        loss_function: str = "l2",
    ) -> None:
        super().__init__(gamma, n_steps)
        if loss_function not in DISTANCES:
            raise ArgumentError(f"loss_function must be one of {sorted(DISTANCES)}, got {loss_function!r}.")
        self.value_network = value_network
        self.double_dqn = double_dqn
        self.value_rescaling = value_rescaling
        self.greedy_returns = greedy_returns
        self._distance = DISTANCES[loss_function]
        check_network("The value network", value_network, "QValueActor")
        if delay_value:
            self.target_value_network = target_of(value_network)

    @property
    def delay_value(self) -> bool:
        """Whether there is a target network."""
        return "target_value_network" in children_of(self)

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the network
        """Keys of all entries that are read from a batch."""
        keys = self.tensor_keys
        own = [keys.action, *keys.of_sequences, IS_INIT, TRAJ_IDS, TRAJ_STEPS, MASK, keys.priority_weight]
        return list(dict.fromkeys([*self._unroll(self.value_network).in_keys, *own, *self.target_states.values()]))

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows set_keys
        """Names of the loss and of the errors and means."""
        return ["loss", self.tensor_keys.priority, "q_value", "q_target"]

    def network_keys(self) -> dict[str, NestedKey]:
        """Return the key of the action values, as the network names it."""
        key = getattr(self.value_network, "action_value_key", None)
        return {} if key is None else {"action_value": normalize_key(key)}

    @property
    def target_states(self) -> dict[NestedKey, NestedKey]:
        """Keys of the target network's states in a batch, by state key of the network."""
        return {key: (_TARGET, *path_of(key)) for key in states_of(self.value_network)}

    def networks(self) -> list[TensorDictModuleBase]:
        """Return the networks whose states a batch holds: the value network."""
        return [self.value_network]

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks, whose states a batch may hold under ``"target"``."""
        return [self.target_value_network] if self.delay_value else []

    def explain(self) -> Explanation:
        """Explain in which form the networks run."""
        return explain("losses", (Network([network]) for network in [*self.networks(), *self.target_networks()]))

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the loss; called in recurrent mode."""
        keys, shape = self.tensor_keys, batch.batch_size
        sequences, online = Sequences.read(batch, keys), self._unroll(self.value_network)
        run = online.run(batch, sequences)
        values = cast(Tensor, run.get(online.out_key))
        chosen = _chosen(values, entry(batch, keys.action, "The policy writes it during collection."))
        with torch.no_grad():
            next_value = self._next_value(batch, sequences, online, run)
            cut = _cut_before(chosen < values.amax(-1), sequences) if self.greedy_returns else sequences
            target = self._targets(next_value, cut)
            target = target.detach()  # also detach forward-mode tangents, which no_grad keeps
        weight = batch.get(keys.priority_weight, None)
        distance = self._distance(chosen, target, reduction="none")
        if weight is not None:
            distance = distance * per_token(keys.priority_weight, cast(Tensor, weight), shape)
        error = (target - chosen.detach()).abs()
        if sequences.mask is not None:
            error = error.masked_fill(~sequences.mask, 0.0)
        return {
            "loss": masked_mean(distance, sequences.mask),
            keys.priority: error.unsqueeze(-1),
            "q_value": masked_mean(chosen.detach(), sequences.mask),
            "q_target": masked_mean(target, sequences.mask),
        }

    def _targets(self, next_value: Tensor, sequences: Sequences) -> Tensor:
        """Return the targets of the actions taken, ``[*B, T]``, from the networks' raw ``next_value``."""
        next_value = next_value.masked_fill(next_value == -torch.inf, 0.0)  # no action is allowed there
        if self.value_rescaling:
            next_value = inverse_value_rescaling(next_value)
        target = self.returns(next_value, sequences)
        return value_rescaling(target) if self.value_rescaling else target

    def _next_value(self, batch: Step, sequences: Sequences, online: Unroll, run: Step) -> Tensor:
        """Return the value of every next observation, ``[*B, T]``; ``run`` holds the network's outputs on the batch."""
        if not self.delay_value:
            return online.next_output(batch, sequences, run).amax(-1)
        target_batch, target = self._target_batch(batch), self._unroll(self.target_value_network)
        values = target.next_output(target_batch, sequences, target.run(target_batch, sequences))
        if not self.double_dqn:
            return values.amax(-1)
        best = online.next_output(batch, sequences, run).argmax(-1, keepdim=True)
        return values.gather(-1, best).squeeze(-1)

    def _unroll(self, network: TensorDictModuleBase) -> Unroll:
        return Unroll(network, self.tensor_keys.action_value)

    def _target_batch(self, batch: Step) -> Step:
        """Return ``batch`` with the network's states replaced by those of the target network, where it holds them."""
        own = {key: value for key, at in self.target_states.items() if (value := batch.get(at, None)) is not None}
        if not own:
            return batch
        target_batch = batch.copy()
        for key, value in own.items():
            target_batch.set(key, value)
        return target_batch


def _cut_before(tokens: Tensor, sequences: Sequences) -> Sequences:
    """Return ``sequences`` with additional ends before each of ``tokens``, bool ``[*B, T]``."""
    before = tokens.reshape(-1).roll(-1).reshape(tokens.shape)  # the last tokens of rows are ends in any case
    return sequences._replace(ends=sequences.ends | before)


def _chosen(values: Tensor, action: Tensor) -> Tensor:
    """Return the values of the actions taken, ``[*B, T]``."""
    if action.shape == values.shape:
        return values.gather(-1, action.long().argmax(-1, keepdim=True)).squeeze(-1)
    if action.shape == values.shape[:-1] and not action.is_floating_point():
        return values.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
    raise ArgumentError(
        f"For action values of shape {list(values.shape)} the action must be integers {list(values.shape[:-1])} or "
        f"one-hot {list(values.shape)}, got {action.dtype} {list(action.shape)}."
    )
