"""Target networks and their updates."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.torch_compat import foreach_copy_, foreach_lerp_

__all__ = ["HardUpdate", "SoftUpdate", "target_of"]

_M = TypeVar("_M", bound=nn.Module)
_PREFIX = "target_"


def target_of(network: _M) -> _M:
    """Return a copy of ``network`` without gradients, to be stored as ``"target_"`` plus the name of the network.

    Raises:
        ArgumentError: a parameter is lazy and has no values yet, so the copy would draw different ones.

    Example:
        >>> from torch import nn
        >>> target = target_of(nn.Linear(2, 1))
        >>> any(parameter.requires_grad for parameter in target.parameters())
        False
    """
    lazy = next((name for name, value in network.named_parameters() if is_lazy(value)), None)
    if lazy is not None:
        raise ArgumentError(
            f"A network with a target network must have its parameters, but {lazy!r} is lazy and has no values yet: "
            "run the network once on an example before passing it to the loss, or give the sizes of its inputs."
        )
    return copy.deepcopy(network).requires_grad_(False)


class _TargetUpdater:
    """Base class of target updates. Pairs of networks and targets are looked up in the loss at every call."""

    def __init__(self, loss_module: nn.Module) -> None:
        self.loss_module = loss_module
        if not list(_pairs(loss_module)):
            raise ArgumentError(
                f"{type(loss_module).__name__} has no target network to update: build it with delay_value=True."
            )

    def init_(self) -> None:
        """Make every target equal to its network."""
        self._move_targets(1.0)

    def _move_targets(self, tau: float) -> None:
        """Move the targets' parameters by the fraction ``tau`` toward those of the networks, and copy buffers."""
        moved: dict[int, tuple[Tensor, Tensor]] = {}  # two targets may share parts
        with torch.no_grad():
            for online, target in _pairs(self.loss_module):
                parameters = list(online.parameters()), list(target.parameters())
                buffers = list(online.buffers()), list(target.buffers())
                _check_shapes(online, parameters)
                _check_shapes(online, buffers)
                moved.update({id(copied): (copied, source) for source, copied in zip(*parameters, strict=True)})
                for source, copied in zip(*buffers, strict=True):
                    copied.copy_(source)
            if moved:
                copies, sources = zip(*moved.values(), strict=True)
                foreach_copy_(copies, sources) if tau == 1.0 else foreach_lerp_(copies, sources, tau)


class HardUpdate(_TargetUpdater):
    """Hard target update: copy networks to their targets at regular intervals.

    Source: Mnih et al., "Human-level control through deep reinforcement learning" (2015).

    Args:
        loss_module: a loss with target networks, such as a :class:`DQNLoss`.
        value_network_update_interval: number of calls of :meth:`step` per copy.

    Raises:
        ArgumentError: the interval is not positive, or the loss has no target network.

    Example:
        >>> from torch import nn
        >>> from recurl.objectives import target_of
        >>> loss = nn.Module()
        >>> loss.net, loss.target_net = nn.Linear(1, 1), target_of(nn.Linear(1, 1))
        >>> update = HardUpdate(loss, value_network_update_interval=2)
        >>> update.step(); torch.equal(loss.net.weight, loss.target_net.weight)
        False
        >>> update.step(); torch.equal(loss.net.weight, loss.target_net.weight)
        True
    """

    def __init__(self, loss_module: nn.Module, *, value_network_update_interval: int = 1000) -> None:
        super().__init__(loss_module)
        if value_network_update_interval < 1:
            raise ArgumentError(f"The update interval must be positive, got {value_network_update_interval}.")
        self.interval = value_network_update_interval
        self.steps = 0

    def step(self) -> None:
        """Count a gradient step, and copy the networks at the end of each interval."""
        if self.count():
            self.init_()

    def count(self) -> bool:
        """Count a gradient step without copying, and return whether :meth:`init_` is due."""
        self.steps += 1
        return self.steps % self.interval == 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of gradient steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a :meth:`state_dict`."""
        self.steps = state["steps"]


class SoftUpdate(_TargetUpdater):
    """Soft target update: ``target = (1 - tau) target + tau network`` at every step.

    Source: Lillicrap et al., "Continuous control with deep reinforcement learning" (2016). Buffers are copied.

    Args:
        loss_module: a loss with target networks, such as a :class:`DQNLoss`.
        eps: ``1 - tau``; exactly one of ``eps`` and ``tau`` must be given.
        tau: fraction of the difference per call of :meth:`step`, in (0, 1].

    Raises:
        ArgumentTypeError: not exactly one of ``eps`` and ``tau`` is given.
        ArgumentError: ``tau`` is out of range, or the loss has no target network.

    Example:
        >>> from torch import nn
        >>> from recurl.objectives import target_of
        >>> loss = nn.Module()
        >>> loss.net, loss.target_net = nn.Linear(1, 1), target_of(nn.Linear(1, 1))
        >>> SoftUpdate(loss, tau=1.0).step()
        >>> torch.equal(loss.net.weight, loss.target_net.weight)
        True
    """

    def __init__(self, loss_module: nn.Module, *, eps: float | None = None, tau: float | None = None) -> None:
        super().__init__(loss_module)
        if (eps is None) == (tau is None):
            raise ArgumentTypeError(f"Give exactly one of eps and tau, got {eps=} and {tau=}.")
        self.tau = 1.0 - eps if eps is not None else float(tau or 0.0)
        if not 0.0 < self.tau <= 1.0:
            raise ArgumentError(f"tau = 1 - eps must be in (0, 1], got {self.tau}.")

    def step(self) -> None:
        """Move every target toward its network."""
        self._move_targets(self.tau)


def _pairs(loss_module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    children = dict(loss_module.named_children())
    for name, target in children.items():
        online = children.get(name.removeprefix(_PREFIX))
        if name.startswith(_PREFIX) and online is not None:
            yield online, target


def _check_shapes(online: nn.Module, both: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
    if [value.shape for value in both[0]] != [copied.shape for copied in both[1]]:
        raise ArgumentError(
            f"The {type(online).__name__} and its target network must have parameters of the same shapes, but the "
            "network was replaced or edited since: create a new target, loss.target_... = target_of(loss....)."
        )
