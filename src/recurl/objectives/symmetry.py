"""Symmetry loss of recurrent policies, and the mirrored recurrent states that it starts from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch import distributions as d

from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.core.keys import IS_INIT, TRAJ_IDS, TRAJ_STEPS, NestedKey, next_key, path_of
from recurl.core.specs import Bounded, TensorSpec
from recurl.core.symmetry import SignedPermutation, Symmetry, number_of_choices
from recurl.execution.explain import Explanation
from recurl.execution.lowering import (
    Network,
    explain,
    inputs_from,
    inputs_of,
    leaves_by_path,
    modules_in_order,
    modules_leading_to,
)
from recurl.objectives.common import LossModule, entry, masked_mean, states_of
from recurl.objectives.policy import ActorCritic
from recurl.objectives.policy_gradient import mask_of
from recurl.objectives.sequences import external_inputs
from recurl.sequences.continuity import check_order, check_starts
from recurl.sequences.entries import Step
from recurl.sequences.mode import set_recurrent_mode
from recurl.sequences.start_states import allocate

__all__ = ["MirroredStates", "SignedPermutation", "Symmetry", "SymmetryLoss", "mirrored_key"]

_ROOT = ("collector", "mirrored")
_ADVICE = "Call MirroredStates(actor, symmetries) with every batch of the collector, before it is cut."


def mirrored_key(number: int, state: NestedKey) -> NestedKey:
    """Return the key, in a batch, of a recurrent state of the episodes under the symmetry of this number."""
    return (*_ROOT, str(number), *path_of(state))


class MirroredStates:
    """Recurrent states of a policy in mirrored episodes, carried from batch to batch.

    What a recurrent policy does in a mirrored episode depends on what it saw since that episode began, so it needs
    hidden states of its own: no function of the original ones gives them, unless the policy is symmetric already.
    Called with every batch, before the policy is trained on it, this runs the policy's memory along the mirrored
    observations of whole rows, from where the last batch ended and from zero where episodes begin, and writes the
    states at the starts of sequences into the batch. The states are those that the policy would have had if it had
    walked through the mirrored episodes beside the original ones: from the same weights, and exactly as old as the
    stored states of the originals. It costs one pass per batch and symmetry, in which all rows run at once, instead of
    a second policy step at every step of the environments; nothing is approximated by zero states or burn-in.

    Args:
        actor_network: the policy that collects.
        symmetries: the symmetries.
        sequence_length: length of the sequences that rows are cut into for training; whole rows when None. A batch that
            is cut elsewhere is refused.

    Raises:
        UsageError: when called, if a batch doesn't follow the last one: its rows go on in other episodes (checked on a
            CPU), or the first batch begins inside episodes.

    Example:
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from recurl.collectors import Collector
        >>> from recurl.envs import GymEnv
        >>> from recurl.modules import GRUModule, NormalParamExtractor, ProbabilisticActor, TanhNormal
        >>> from recurl.objectives import SignedPermutation, Symmetry, SymmetryLoss
        >>> env = GymEnv("Pendulum-v1")
        >>> gru = GRUModule(3, 4, in_key="observation", out_key="features")
        >>> head = torch.nn.Sequential(torch.nn.Linear(4, 2), NormalParamExtractor())
        >>> head = TensorDictModule(head, in_keys=["features"], out_keys=["loc", "scale"])
        >>> actor = ProbabilisticActor(
        ...     TensorDictSequential(gru, head), in_keys=["loc", "scale"], distribution_class=TanhNormal
        ... )
        >>> mirror = Symmetry({"observation": SignedPermutation([1, -1, -1])}, action=torch.neg)
        >>> states = MirroredStates(actor, [mirror])
        >>> loss = SymmetryLoss(actor, [mirror], env.action_spec_unbatched)
        >>> for batch in Collector(env, actor, frames_per_batch=8, total_frames=16):
        ...     print(loss(states(batch))["loss_symmetry"].shape)
        torch.Size([])
        torch.Size([])
    """

    def __init__(
        self, actor_network: TensorDictModuleBase, symmetries: Sequence[Symmetry], *, sequence_length: int | None = None
    ) -> None:
        self.symmetries = _checked(symmetries)
        self.sequence_length = sequence_length
        self._actor = actor_network
        self._states = states_of(*modules_in_order(actor_network))
        self._carried: list[dict[NestedKey, Tensor]] | None = None
        self._last: Tensor | None = None

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the mirrored states into a batch ``[*B, T]``, and return it."""
        if not self._states:
            return batch
        lead, steps = batch.ndim - 1, batch.batch_size[-1]
        every = math.gcd(steps, self.sequence_length or steps)
        begins = entry(batch, IS_INIT, "Collect with an environment of recurl.").reshape(batch.batch_size)
        self._check_follows(batch, begins)
        network = Network(modules_leading_to(self._actor, map(next_key, self._states)))
        keys = [*external_inputs(network.modules), TRAJ_IDS, TRAJ_STEPS]
        keys = [key for key in keys if key not in self._states]
        carried: list[dict[NestedKey, Tensor]] = []
        for number, symmetry in enumerate(self.symmetries):
            inputs = leaves_by_path(_mirrored(batch, keys, [network], symmetry, {}))
            states = {} if self._carried is None else self._carried[number]  # all begin at zero if there are none
            memories: dict[NestedKey, Tensor] = {}
            for start in range(0, steps, every):  # backends return states at the ends of segments at least
                run = inputs_from({}, torch.Size([*batch.batch_size[:-1], every]), batch.device, [network])
                for key, value in inputs.items():
                    run.set(key, value.narrow(lead, start, every))
                states = {key: _where_not(begins.select(lead, start), state) for key, state in states.items()}
                for key, state in states.items():
                    run.set(key, _at_start(state, run.batch_size))
                with set_recurrent_mode(True):
                    run = network(run)
                for key in self._states:
                    after = cast(Tensor, run.get(next_key(key))).select(lead, -1).clone()
                    if key not in memories:
                        found, memories[key] = allocate(
                            batch.batch_size, after.shape[lead:], every, dtype=after.dtype, device=after.device
                        )
                        batch.set(mirrored_key(number, key), found)
                    if key in states:
                        memories[key].select(lead, start // every).copy_(states[key].flatten(lead))
                    states[key] = after
            carried.append(states)
        self._carried = carried
        return batch

    def _check_follows(self, batch: TensorDictBase, begins: Tensor) -> None:
        first = begins[..., 0]
        if self._carried is None:
            if not bool(first.all()):
                raise UsageError(
                    "The first batch must begin where episodes begin, as its mirrored episodes have no states yet: "
                    "call MirroredStates with every batch of a collector."
                )
        elif (rows := self._carried[0][self._states[0]].shape[: first.ndim]) != first.shape:
            raise UsageError(f"A batch must have the rows of the last one, {list(rows)}, got {list(first.shape)}.")
        steps = batch.get(TRAJ_STEPS, None)
        if steps is None or steps.device.type != "cpu":  # reading would wait for the device
            return
        steps = steps.reshape(batch.batch_size)
        if self._last is not None and not bool((first | (steps[..., 0] == self._last + 1)).all()):
            raise UsageError(
                "A batch must go on where the last one ended: call MirroredStates with every batch of a collector, in "
                "order."
            )
        self._last = steps[..., -1].clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the states after the last batch."""
        carried = None if self._carried is None else [[part[key] for key in self._states] for part in self._carried]
        return {"carried": carried, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by :meth:`state_dict`.

        Raises:
            ArgumentError: it is of other symmetries or another policy.
        """
        carried, last = state["carried"], state["last"]
        wanted = [len(self._states)] * len(self.symmetries)
        if carried is not None and [len(states) for states in carried] != wanted:
            raise ArgumentError(
                f"The mirrored states must be those of {len(self.symmetries)} symmetries with {len(self._states)} "
                f"states each, got {[len(states) for states in carried]}."
            )
        self._carried = None
        if carried is not None:
            self._carried = [{k: v.clone() for k, v in zip(self._states, part, strict=True)} for part in carried]
        self._last = None if last is None else last.clone()


class SymmetryLoss(LossModule):
    """Distance of what a policy does in mirrored episodes from the mirror image of what it does in the originals.

    Real-valued actions: the squared distance of the greedy actions, averaged over their components and in units of half
    their range if they are bounded. Choices: the Kullback-Leibler divergence of their probabilities. The mirror image
    has no gradient. The loss is zero for a policy that is symmetric, and averaged over tokens and symmetries.

    Sources: Yu et al., "Learning symmetric and low-energy locomotion" (2018), equation 3; with gradients as in rsl_rl
    (Mittal et al., "Symmetry considerations for learning task symmetric robot policies", 2024).

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor``.
        symmetries: the symmetries.
        action_spec: spec of its action for one environment.
        coeff: coefficient of the loss.

    Reads the inputs of the policy, and for each of its recurrent states those that :class:`MirroredStates` writes.

    Returns ``"loss_symmetry"``, a scalar, and without gradients and coefficient ``"asymmetry"``.

    Raises:
        ArgumentError: ``coeff`` is negative, there are no symmetries, or the policy reads nothing that one of them
            transforms.
        UnsupportedError: the action is neither a tensor of real numbers nor one choice.
        MissingKeyError: when called, if a mirrored state is missing.
    """

    half_range: Tensor

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        symmetries: Sequence[Symmetry],
        action_spec: TensorSpec,
        *,
        coeff: float = 1.0,
    ) -> None:
        super().__init__()
        if not coeff >= 0:
            raise ArgumentError(f"coeff must be at least 0, got {coeff}.")
        self.actor_network = actor_network
        self.symmetries = _checked(symmetries)
        self.coeff = coeff
        self.choices = number_of_choices(action_spec)
        half = (action_spec.high - action_spec.low) / 2 if isinstance(action_spec, Bounded) else torch.ones(())
        self.register_buffer("half_range", half.float(), persistent=False)
        plan = self._plan()
        for symmetry in self.symmetries:
            if not any(key in plan.keys for key in symmetry.observations):
                raise ArgumentError(
                    f"A symmetry must transform an entry that the policy reads, {plan.keys}, but it transforms "
                    f"{list(symmetry.observations)}."
                )

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        plan = self._plan()
        mirrored = [mirrored_key(number, key) for number in range(len(self.symmetries)) for key in plan.states]
        return list(dict.fromkeys([*plan.keys, *mirrored]))

    @property
    def out_keys(self) -> list[str]:  # type: ignore[override] # as that of other losses
        """Names of the loss and the metric."""
        return ["loss_symmetry", "asymmetry"]

    def explain(self) -> Explanation:
        """Explain in which form the networks run."""
        return explain("losses", self._plan().networks)

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the loss; called in recurrent mode."""
        plan = self._plan()
        if batch.get(IS_INIT, None) is not None:
            check_order(batch)
            check_starts(batch, plan.states)
        with torch.no_grad():
            original, _ = plan.run(inputs_of(batch, plan.keys, plan.networks))
            images = [self._image(symmetry, original) for symmetry in self.symmetries]
        mask, distances = mask_of(batch), list[Tensor]()
        for number, (symmetry, image) in enumerate(zip(self.symmetries, images, strict=True)):
            states = {key: entry(batch, mirrored_key(number, key), _ADVICE) for key in plan.states}
            dist, _ = plan.run(_mirrored(batch, plan.keys, plan.networks, symmetry, states))
            distances.append(masked_mean(self._distance(dist, image, batch.batch_size), mask))
        distance = torch.stack(distances).mean()
        return {"loss_symmetry": self.coeff * distance, "asymmetry": distance.detach()}

    def _plan(self) -> ActorCritic:
        return ActorCritic.of(self.actor_network, None, self)

    def _image(self, symmetry: Symmetry, dist: d.Distribution) -> Tensor:
        return symmetry.action(_greedy(dist) if self.choices is None else _log_probs(dist).exp())

    def _distance(self, dist: d.Distribution, image: Tensor, shape: torch.Size) -> Tensor:
        """Return the distance ``[*B, T]`` of a distribution from the image of another."""
        if self.choices is None:
            return ((_greedy(dist) - image) / self.half_range).square().reshape(*shape, -1).mean(-1)
        possible = image > 0  # where it isn't, the logarithms may be infinite
        ratio = torch.where(possible, image, 1.0).log() - torch.where(possible, _log_probs(dist), 0.0)
        return (image * ratio).reshape(*shape, -1).sum(-1)


def _greedy(dist: d.Distribution) -> Tensor:
    return cast(Tensor, getattr(dist, "deterministic_sample", dist.mode))


def _log_probs(dist: d.Distribution) -> Tensor:
    return cast(Any, dist).logits


def _where_not(begins: Tensor, state: Tensor) -> Tensor:
    """Return states ``[*B, ...]``, zero in the rows that begin."""
    mask = begins.reshape(*begins.shape, *(1,) * (state.ndim - begins.ndim))
    return state.to(begins.device).masked_fill(mask, 0.0)


def _at_start(first: Tensor, shape: torch.Size) -> Tensor:
    """Return states ``[*B, T, ...]`` of which only the first is read."""
    states = first.new_zeros(*shape, *first.shape[len(shape) - 1 :])
    states.select(len(shape) - 1, 0).copy_(first)
    return states


def _mirrored(
    batch: Step,
    keys: Sequence[NestedKey],
    networks: Sequence[Network],
    symmetry: Symmetry,
    states: Mapping[NestedKey, Any],
) -> Step:
    """Return the entries ``keys`` of a batch for ``networks`` under a symmetry, with other states."""
    run = inputs_of(batch, keys, networks)
    for key in keys:
        value = states[key] if key in states else run.get(key, None)
        if value is not None:
            run.set(key, value if key in states else symmetry.transform(key, value))
    return run


def _checked(symmetries: Iterable[Symmetry]) -> list[Symmetry]:
    found = list(symmetries)
    wrong = next((symmetry for symmetry in found if not isinstance(symmetry, Symmetry)), None)  # type: ignore[reportUnnecessaryIsInstance] # users
    if wrong is not None:
        raise ArgumentTypeError(f"Symmetries must be objects of the class Symmetry, got {type(wrong).__name__}.")
    if not found:
        raise ArgumentError("There must be a symmetry, got an empty list.")
    return found
