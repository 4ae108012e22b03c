"""Exploration modules, applied after a deterministic policy."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import ACTION, NestedKey, normalize_key
from recurl.core.specs import Bounded, Categorical, Composite, TensorSpec, masked_rand
from recurl.core.torch_compat import CompletedState
from recurl.modules.qvalue import action_choices, mask_in
from recurl.sequences.entries import Step, StepT, takes_entries
from recurl.sequences.mode import ExplorationType, exploration_type

__all__ = ["AdditiveGaussianModule", "EGreedyModule"]

_MAX_STEPS = 2**53  # cap of the step count: up to here, float64 represents all integers exactly


class _Exploration(CompletedState, TensorDictModuleBase):
    """Base class of modules that perturb a policy's actions by an amount annealed linearly over environment steps.

    Args:
        init: initial amount.
        end: final amount.
        annealing_num_steps: environment steps of the annealing.
        action_key: key of the action.
        reads: further entries that :meth:`_explore` reads.

    Raises:
        ArgumentError: ``annealing_num_steps`` is not positive.
    """

    amount: ClassVar[str]
    """Name of the amount's buffer; the buffers of initial and final amount append ``_init`` and ``_end``."""

    def __init__(
        self, init: float, end: float, annealing_num_steps: int, action_key: NestedKey, reads: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        if annealing_num_steps < 1:
            raise ArgumentError(f"annealing_num_steps must be positive, got {annealing_num_steps}.")
        self.action_key = normalize_key(action_key)
        self.in_keys = cast(Any, [self.action_key, *reads])
        self.out_keys = cast(Any, [self.action_key])
        self.annealing_num_steps = annealing_num_steps
        for name, value in (("", init), ("_init", init), ("_end", end), ("_anchor", init)):
            self.register_buffer(self.amount + name, torch.tensor(float(value)))
        self.frames = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def step(self, frames: int = 1) -> None:
        """Anneal the amount by ``frames`` environment steps, down to the final amount.

        The amount is computed from the steps since the last anchor, so rounding errors don't accumulate. An amount set
        by hand, or loaded without its step count, becomes the new anchor.

        Raises:
            ArgumentError: ``frames`` is not an integer, or is negative.
        """
        if not _is_count(frames):
            raise ArgumentError(f"frames counts environment steps and must be a non-negative integer, got {frames!r}.")
        now, anchor = (cast(Tensor, getattr(self, self.amount + name)) for name in ("", "_anchor"))
        same = now == self._annealed()
        anchor.copy_(torch.where(same, anchor, now))
        counted = torch.where(same, self.frames, 0) + min(int(frames), _MAX_STEPS)
        self.frames.copy_(counted.clamp_max(_MAX_STEPS))  # the sum, at most twice the cap, fits int64
        now.copy_(self._annealed())

    def _annealed(self) -> Tensor:
        """Return the amount after ``frames`` steps from the anchor, in the dtype of its buffer."""
        anchor, init, end = (getattr(self, self.amount + name).double() for name in ("_anchor", "_init", "_end"))
        annealed = anchor - (init - end) * (self.frames.double() / self.annealing_num_steps)
        return torch.maximum(annealed, end).to(getattr(self, self.amount).dtype)

    def complete_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add a step count and anchor, which earlier versions didn't save: annealing continues from the amount."""
        for name in (f"{self.amount}_anchor", "frames"):
            state_dict.setdefault(prefix + name, getattr(self, name))

    @takes_entries
    def forward(self, tensordict: StepT) -> StepT:
        """Perturb the actions in ``tensordict`` and return it."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action = cast(Tensor | None, tensordict.get(self.action_key, None))
        if action is None:
            raise MissingKeyError(
                f"There is no {self.action_key!r} to change: put the policy before the {type(self).__name__}; the "
                f"entries are {sorted(map(str, tensordict.keys()))}."
            )
        return tensordict.set(self.action_key, self._explore(tensordict, action))

    @abstractmethod
    def _explore(self, tensordict: Step, action: Tensor) -> Tensor:
        """Return the actions to take instead of ``action``."""


def _is_count(value: Any) -> bool:
    try:
        return operator.index(value) >= 0
    except TypeError:
        return False


class EGreedyModule(_Exploration):
    """Epsilon-greedy exploration: replace each action, with probability ``eps``, by a random one.

    Append it to the collecting policy: ``TensorDictSequential(actor, EGreedyModule(spec))``. It is active under
    ``ExplorationType.RANDOM`` (the type collectors use) and if no type is set. Otherwise the actions are unchanged.

    Args:
        spec: the action spec, ``OneHot`` or ``Categorical``, of one environment or of a batch of them. A ``Composite``
            must contain ``action_key``.
        eps_init: initial probability.
        eps_end: final probability.
        annealing_num_steps: environment steps of the linear annealing, counted by ``step(frames)``.
        action_key: key of the action.
        action_mask_key: key of the mask, ``[*B, n]``, nonzero where an action is allowed. Random actions are uniform
            over the allowed ones.

    ``eps``, ``eps_init`` and ``eps_end`` are buffers and saved with the module's state, as is the step count.
    After ``module.eps.fill_(0.3)``, annealing continues from 0.3. Random numbers come from torch's default generator,
    without device synchronization.

    Raises:
        ArgumentError: a probability is out of [0, 1], or ``eps_end > eps_init``; ``annealing_num_steps`` is not
            positive; the spec is of another kind; when called, if the actions have another encoding.
        MissingKeyError: when called, if the action or the mask is missing.

    Example:
        >>> from recurl.core.specs import Categorical
        >>> explore = EGreedyModule(Categorical(3), eps_init=1.0, eps_end=0.2, annealing_num_steps=100)
        >>> explore.step(50)
        >>> explore.eps
        tensor(0.6000)
    """

    amount = "eps"
    eps: Tensor
    eps_init: Tensor
    eps_end: Tensor

    def __init__(
        self,
        spec: TensorSpec,
        eps_init: float = 1.0,
        eps_end: float = 0.1,
        annealing_num_steps: int = 1000,
        *,
        action_key: NestedKey = ACTION,
        action_mask_key: NestedKey | None = None,
    ) -> None:
        if not 0.0 <= eps_end <= eps_init <= 1.0:
            raise ArgumentError(f"0 <= eps_end <= eps_init <= 1 must hold, got {eps_end=} and {eps_init=}.")
        mask_key = None if action_mask_key is None else normalize_key(action_mask_key)
        super().__init__(eps_init, eps_end, annealing_num_steps, action_key, [] if mask_key is None else [mask_key])
        self.action_mask_key = mask_key
        self._one_hot, self._choices = action_choices(spec, self.action_key)

    def _random(self, tensordict: Step, device: torch.device) -> Tensor:
        """Return random choices, ``[*B]``."""
        batch = tensordict.batch_size
        if self.action_mask_key is None:
            return torch.randint(self._choices, batch, device=device)
        mask = mask_in(tensordict, self.action_mask_key, torch.Size([*batch, self._choices]))
        return masked_rand(Categorical(self._choices), mask)

    def _explore(self, tensordict: Step, action: Tensor) -> Tensor:
        batch = tensordict.batch_size
        random = self._random(tensordict, action.device)
        replaced = torch.rand(batch, device=action.device) < self.eps
        if self._one_hot:
            random, replaced = F.one_hot(random, self._choices), replaced.unsqueeze(-1)
        if action.shape != random.shape:
            raise ArgumentError(
                f"For a batch of {list(batch)} the spec's actions have shape {list(random.shape)}, got "
                f"{list(action.shape)}. Use the action spec of the environment, in the encoding of the policy."
            )
        return torch.where(replaced, random.to(action.dtype), action)


class AdditiveGaussianModule(_Exploration):
    """Gaussian exploration: add normal noise to actions and clamp them to their bounds.

    Append it to the collecting policy: ``TensorDictSequential(actor, AdditiveGaussianModule(spec))``. It is active
    under ``ExplorationType.RANDOM`` (the type collectors use) and if no type is set. Otherwise the actions are
    unchanged.

    Args:
        spec: the action spec, ``Bounded``, of one environment or of a batch of them. A ``Composite`` must contain
            ``action_key``.
        sigma_init: initial standard deviation of the noise, in units of half the action range.
        sigma_end: final standard deviation.
        annealing_num_steps: environment steps of the linear annealing, counted by ``step(frames)``.
        action_key: key of the action.

    ``sigma``, ``sigma_init`` and ``sigma_end`` are buffers and saved with the module's state, as is the step count.
    After ``module.sigma.fill_(0.3)``, annealing continues from 0.3. Random numbers come from torch's default generator,
    without device synchronization.

    Raises:
        ArgumentError: ``0 <= sigma_end <= sigma_init`` doesn't hold; ``annealing_num_steps`` is not positive; or the
            spec is of another kind.
        MissingKeyError: when called, if the action is missing.

    Example:
        >>> from recurl.core.specs import Bounded
        >>> explore = AdditiveGaussianModule(Bounded(-2.0, 2.0, (1,)), sigma_init=1.0, sigma_end=0.2)
        >>> explore.step(500)
        >>> explore.sigma
        tensor(0.6000)
    """

    amount = "sigma"
    sigma: Tensor
    sigma_init: Tensor
    sigma_end: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        spec: TensorSpec,
        sigma_init: float = 1.0,
        sigma_end: float = 0.1,
        annealing_num_steps: int = 1000,
        *,
        action_key: NestedKey = ACTION,
    ) -> None:
        if not 0.0 <= sigma_end <= sigma_init:
            raise ArgumentError(f"0 <= sigma_end <= sigma_init must hold, got {sigma_end=} and {sigma_init=}.")
        super().__init__(sigma_init, sigma_end, annealing_num_steps, action_key)
        leaf: object = spec.get(self.action_key) if isinstance(spec, Composite) else spec
        if not isinstance(leaf, Bounded) or not (leaf.high - leaf.low).isfinite().all():
            raise ArgumentError(
                f"The action spec must be Bounded, with two finite bounds, high - low finite too, got {leaf}."
            )
        self.register_buffer("low", leaf.low.clone(), persistent=False)
        self.register_buffer("high", leaf.high.clone(), persistent=False)

    def _explore(self, tensordict: Step, action: Tensor) -> Tensor:
        noise = torch.randn_like(action) * (self.sigma * (0.5 * (self.high - self.low)))
        return (action + noise).clamp(self.low, self.high)
