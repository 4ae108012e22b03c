"""Exploration behind a deterministic policy."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F

from recurl.errors import ArgumentError, MissingKeyError
from recurl.keys import ACTION, NestedKey, normalize_key
from recurl.lowering import Step, StepT, takes_entries
from recurl.mode import ExplorationType, exploration_type
from recurl.modules.qvalue import action_choices, mask_in
from recurl.specs import Bounded, Categorical, Composite, TensorSpec, masked_rand

__all__ = ["AdditiveGaussianModule", "EGreedyModule"]

_MOST = 2**53  # steps that are counted, the last integer that float64 holds with all before it


class _Exploration(TensorDictModuleBase):
    """Changes the actions of a policy, by an amount that falls linearly with the environment's steps.

    Args:
        init: the amount at the beginning.
        end: that at the end.
        annealing_num_steps: environment steps over which it falls.
        action_key: the action's entry.
        reads: the other entries that :meth:`_explored` reads.

    Raises:
        ArgumentError: ``annealing_num_steps`` is not positive.
    """

    amount: ClassVar[str]
    """Name of the amount: of its buffer, and with ``_init`` and ``_end`` of those of its ends."""

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
        """Lower the amount by what ``frames`` environment steps are worth, down to its end.

        The amount is computed from the steps since the last anchor, so that rounding doesn't accumulate. An amount that
        was set by hand, or loaded without its count, becomes the new anchor.

        Raises:
            ArgumentError: ``frames`` is not an integer, or is negative.
        """
        if not _is_count(frames):
            raise ArgumentError(f"frames counts environment steps and must be an integer from 0 on, got {frames!r}.")
        now, anchor = (cast(Tensor, getattr(self, self.amount + name)) for name in ("", "_anchor"))
        same = now == self._annealed()
        anchor.copy_(torch.where(same, anchor, now))
        counted = torch.where(same, self.frames, 0) + min(int(frames), _MOST)
        self.frames.copy_(counted.clamp_max(_MOST))  # twice that would still fit
        now.copy_(self._annealed())

    def _annealed(self) -> Tensor:
        """Return the amount after ``frames`` steps from the anchor, in the dtype of its buffer."""
        anchor, init, end = (getattr(self, self.amount + name).double() for name in ("_anchor", "_init", "_end"))
        annealed = anchor - (init - end) * (self.frames.double() / self.annealing_num_steps)
        return torch.maximum(annealed, end).to(getattr(self, self.amount).dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load a state; one of an earlier version has no count, and annealing continues from its amount."""
        for name in (f"{self.amount}_anchor", "frames"):
            state_dict.setdefault(prefix + name, getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @takes_entries
    def forward(self, tensordict: StepT) -> StepT:
        """Change actions in ``tensordict``, and return it."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action = cast(Tensor | None, tensordict.get(self.action_key, None))
        if action is None:
            raise MissingKeyError(
                f"There is no {self.action_key!r} to change: put the policy before the {type(self).__name__}; there "
                f"are {sorted(map(str, tensordict.keys()))}."
            )
        return tensordict.set(self.action_key, self._explored(tensordict, action))

    @abstractmethod
    def _explored(self, tensordict: Step, action: Tensor) -> Tensor:
        """Return the actions to take instead of ``action``."""


def _is_count(value: Any) -> bool:
    try:
        return operator.index(value) >= 0
    except TypeError:
        return False


class EGreedyModule(_Exploration):
    """Replaces each action, with probability ``eps``, by a random one of the action spec.

    Put it behind the policy that collects: ``TensorDictSequential(actor, EGreedyModule(spec))``. It acts under
    ``ExplorationType.RANDOM`` (what collectors use) and where no type is set; otherwise the policy's actions stay.

    Args:
        spec: the action spec, ``OneHot`` or ``Categorical``, of one environment or of a batch of them; a ``Composite``
            must hold ``action_key``.
        eps_init: probability at the beginning.
        eps_end: probability at the end.
        annealing_num_steps: environment steps over which it falls, linearly, by ``step(frames)``.
        action_key: the action's entry.
        action_mask_key: the entry with the mask, ``[*B, n]``, nonzero where an action is allowed: random actions are
            uniform over the allowed ones.

    ``eps``, ``eps_init`` and ``eps_end`` are buffers, saved with the module's state, as is the count of steps.
    After ``module.eps.fill_(0.3)`` annealing continues from 0.3. Random numbers come from torch's default generator;
    nothing waits for the device.

    Raises:
        ArgumentError: a probability out of [0, 1], or ``eps_end > eps_init``; ``annealing_num_steps`` not positive;
            another spec; when called, actions of another encoding.
        MissingKeyError: when called, there is no action, or no mask.

    Example:
        >>> from recurl.specs import Categorical
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

    def _explored(self, tensordict: Step, action: Tensor) -> Tensor:
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
    """Adds normal noise to actions, and clamps them to their bounds.

    Put it behind the policy that collects: ``TensorDictSequential(actor, AdditiveGaussianModule(spec))``. It acts under
    ``ExplorationType.RANDOM`` (what collectors use) and where no type is set; otherwise the policy's actions stay.

    Args:
        spec: the action spec, ``Bounded``, of one environment or of a batch of them; a ``Composite`` must hold
            ``action_key``.
        sigma_init: standard deviation of the noise at the beginning, in halves of the range of the action.
        sigma_end: that at the end.
        annealing_num_steps: environment steps over which it falls, linearly, by ``step(frames)``.
        action_key: the action's entry.

    ``sigma``, ``sigma_init`` and ``sigma_end`` are buffers, saved with the module's state, as is the count of steps.
    After ``module.sigma.fill_(0.3)`` annealing continues from 0.3. Random numbers come from torch's default generator;
    nothing waits for the device.

    Raises:
        ArgumentError: ``0 <= sigma_end <= sigma_init`` doesn't hold; ``annealing_num_steps`` is not positive; or the
            spec is another one.
        MissingKeyError: when called, there is no action.

    Example:
        >>> from recurl.specs import Bounded
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

    def _explored(self, tensordict: Step, action: Tensor) -> Tensor:
        noise = torch.randn_like(action) * (self.sigma * (0.5 * (self.high - self.low)))
        return (action + noise).clamp(self.low, self.high)
