"""Actor, critics and exploration noise of TD3."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl.core import specs
from recurl.core.errors import UnsupportedError
from recurl.core.keys import ACTION
from recurl.modules import AdditiveGaussianModule
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.actor_q import ActorQ, is_box
from recurl.trainers.networks.layers import make_head

__all__ = ["DeterministicActor", "WithinBounds", "check_bounded_actions"]


class WithinBounds(nn.Module):
    """Squash real numbers ``[*B, n]`` into the bounds of an action, ``[*B, *A]``, with tanh.

    Example:
        >>> WithinBounds(specs.Bounded(0.0, 4.0, (2,)))(torch.zeros(3, 2))[0]
        tensor([2., 2.])
    """

    low: Tensor
    high: Tensor

    def __init__(self, spec: specs.Bounded) -> None:
        super().__init__()
        self.shape = spec.shape
        self.register_buffer("low", spec.low.clone(), persistent=False)
        self.register_buffer("high", spec.high.clone(), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the action."""
        half = 0.5 * (self.high - self.low)
        within = torch.tanh(numbers.reshape(*numbers.shape[:-1], *self.shape))
        return torch.addcmul(self.low + half, half, within.to(half.dtype))


class DeterministicActor(ActorQ):
    """Deterministic actor of TD3, critics, and Gaussian noise for collection.

    Args:
        config: see :class:`ActorQ`.
        observation_spec: see :class:`ActorQ`.
        action_spec: action spec of one environment, real-valued and bounded.
        noise_init: initial standard deviation of the noise, in units of half the action range.
        noise_end: standard deviation after ``noise_steps``.
        noise_steps: environment steps over which it is annealed linearly.
        shared_trunk: see :class:`ActorQ`.
        critics: see :class:`ActorQ`.

    Attributes:
        explore: adds the noise during collection.
    """

    explore: AdditiveGaussianModule

    def __init__(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        *,
        noise_init: float,
        noise_end: float,
        noise_steps: int,
        shared_trunk: bool,
        critics: int = 2,
    ) -> None:
        explore = AdditiveGaussianModule(action_spec, noise_init, noise_end, noise_steps)
        super().__init__(
            config,
            observation_spec,
            action_spec,
            shared_trunk=shared_trunk,
            critics=critics,
            explore=explore,
        )

    def make_actor(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        trunk: list[TensorDictModuleBase],
    ) -> TensorDictSequential:
        """Build the actor on top of ``trunk``."""
        assert isinstance(action_spec, specs.Bounded)
        net = nn.Sequential(make_head(config, action_spec.shape.numel(), 0.01), WithinBounds(action_spec))
        return TensorDictSequential(*trunk, TensorDictModule(net, in_keys=[trunk[-1].out_keys[0]], out_keys=[ACTION]))


def check_bounded_actions(spec: specs.TensorSpec) -> None:
    """Raise if TD3 doesn't support the action spec.

    Raises:
        UnsupportedError: actions are not real-valued with finite bounds.
    """
    if not isinstance(spec, specs.Bounded) or not is_box(spec) or not _finite(spec):
        raise UnsupportedError(
            f"TD3 needs Box actions with two finite bounds, low < high, high - low finite, got {spec}: use SAC (for "
            "Discrete and MultiDiscrete too) or PPO, or wrap the environment."
        )


def _finite(spec: specs.Bounded) -> bool:
    return bool(((spec.high - spec.low).isfinite() & (spec.low < spec.high)).all())
