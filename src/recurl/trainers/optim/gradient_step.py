"""Adam step with clipping and a check for non-finite gradients."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from recurl.core.errors import ArgumentError
from recurl.core.spans import BACKWARD, OPTIMIZER, span
from recurl.core.torch_compat import has_step_hooks
from recurl.distributed import average_, world_size
from recurl.execution.executor import compile  # noqa: A004 - as in torch.compile
from recurl.execution.explain import Explanation

_ADAM_STEP = unwrap(torch.optim.Adam.step)
_UNSUPPORTED = ("weight_decay", "amsgrad", "maximize", "differentiable")


class GradientStep:
    """Adam step with gradient clipping by the total norm.

    If the loss or the gradient norm isn't finite, parameters and optimizer state stay unchanged. This is decided on the
    device, without synchronization. Under torchrun, gradients and loss are averaged over the ranks.

    :meth:`reference_step` is the definition. A faster form of it is used if one supports the parameters and the options
    of ``optimizer``: a single call of recurl's C++ library on a CPU, three Triton kernels on a GPU. Their results are
    equal up to rounding; see :meth:`explain`. The optimizer may be edited or replaced between steps.

    Args:
        parameters: the parameters to train.
        learning_rate: initial learning rate; see :meth:`set_learning_rate`.
        max_norm: maximum norm of the gradient of all parameters together; larger gradients are scaled down to it.
        eps: Adam's epsilon.
        capturable: keep all numbers that change on the device, so that the step can be captured in a CUDA graph.

    Example:
        >>> from torch import nn
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> step = GradientStep([weight], learning_rate=0.1, max_norm=1.0)
        >>> step((weight * torch.tensor([3.0, 4.0])).sum())
        tensor(5.)
        >>> weight
        Parameter containing:
        tensor([-0.1000, -0.1000], requires_grad=True)
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        max_norm: float,
        eps: float = 1e-8,
        capturable: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self.max_norm = max_norm
        self._capturable = capturable
        kinds = {(p.device, p.dtype) for p in self._parameters}
        fused = len(kinds) == 1 and all(d.type in ("cpu", "cuda") and t.is_floating_point for d, t in kinds)
        rate = torch.tensor(learning_rate, device=self._parameters[0].device) if capturable else learning_rate
        self.optimizer = torch.optim.Adam(self._parameters, lr=rate, eps=eps, fused=fused, capturable=capturable)
        self._same_kind = fused
        self._step: Any = compile(self.reference_step)
        self._kept: list[object] = []  # what the forms were built for
        self._obstacle: str | None = None

    def __call__(self, loss: Tensor) -> Tensor:
        """Compute the gradient of ``loss``, make a step, and return the gradient norm before clipping, a scalar.

        Nothing changes if the norm or the loss isn't finite.
        """
        for parameter in self._parameters:
            parameter.grad = None
        with span(BACKWARD):
            loss.backward()
        return self.descend(loss)

    @torch.no_grad()
    def descend(self, loss: Tensor) -> Tensor:
        """Make a step with the gradients that the parameters hold, which must be those of ``loss``.

        Gradients may be averaged and clipped in place.
        """
        with span(OPTIMIZER):
            loss = loss.detach()
            grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            self._obstacle = self._find_obstacle(grads)
            if self._obstacle is not None:
                return self.reference_step(grads, loss)
            if _are_same(self._held(), self._kept):
                return self._step(grads, loss)
            self._step = compile(self.reference_step)
            self._create_state()
            norm = self._step(grads, loss)
            self._kept = self._held()  # a form may move the state
            return norm

    @torch.no_grad()
    def reference_step(self, grads: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Make a step with operations of torch.

        Args:
            grads: the gradients of the parameters that have one.
            loss: scalar loss.
        """
        loss = loss if world_size() == 1 else loss.clone()
        average_([*grads, loss])
        norm = get_total_norm(grads)
        clip_grads_with_norm_(self._parameters, self.max_norm, norm)
        before = {id(tensor): tensor.clone() for tensor in self._tensors()}
        self.optimizer.step()
        finite = (norm + loss).isfinite()
        for tensor in self._tensors():
            kept = before.get(id(tensor), 0)  # new state starts at 0
            tensor.copy_(torch.where(finite.to(tensor.device), tensor, kept))
        return norm

    def _tensors(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self._parameters, *(value for value in states if isinstance(value, Tensor))]

    def _find_obstacle(self, grads: Sequence[Tensor]) -> str | None:
        """Return the reason why no form computes what the optimizer does, or None."""
        optimizer = self.optimizer
        if not self._same_kind:
            return "the parameters aren't of one floating-point dtype and on one device"
        if unwrap(type(optimizer).step) is not _ADAM_STEP or "step" in vars(optimizer):
            return f"the optimizer is {type(optimizer).__name__}, whose step is not that of torch.optim.Adam"
        if has_step_hooks(optimizer):
            return "the optimizer has hooks"
        first, *more = optimizer.param_groups
        if more or not _are_same(first["params"], self._parameters):
            return "the optimizer's parameters aren't those of the step, in one group"
        used = [name for name in _UNSUPPORTED if first.get(name)]
        if used:
            return f"the optimizer uses {', '.join(used)}"
        return "a parameter has no gradient" if len(grads) < len(self._parameters) else None

    def _held(self) -> list[object]:
        """Return the optimizer and the tensors of its state."""
        states = self.optimizer.state
        held = [value for parameter in self._parameters for value in states.get(parameter, {}).values()]
        return [self.optimizer, *held]

    def _create_state(self) -> None:
        """Create the optimizer's state as Adam does, where it is missing."""
        for parameter in self._parameters:
            if not self.optimizer.state[parameter]:
                self.optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )

    def explain(self) -> Explanation:
        """Return the forms of the step, fastest first, each with the reason why the last step didn't use it.

        Before the first step, these are the forms that it will try.

        Example:
            >>> from torch import nn
            >>> print(GradientStep([nn.Parameter(torch.zeros(2))], learning_rate=0.1, max_norm=1.0).explain())
            Adam: cpp
        """
        forms = self._step.explain()
        return Explanation("Adam", forms if self._obstacle is None else dict.fromkeys(forms, self._obstacle), "torch")

    @property
    def learning_rate(self) -> float | Tensor:
        """The learning rate: a tensor on the device if the step is ``capturable``."""
        return self.optimizer.param_groups[0]["lr"]

    def set_learning_rate(self, learning_rate: float | Tensor) -> None:
        """Set the learning rate; a scalar tensor needs a step that is ``capturable``."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state returned by :meth:`state_dict`.

        Raises:
            ArgumentError: if the state belongs to other parameters.
        """
        own = {name: self.optimizer.param_groups[0][name] for name in ("fused", "capturable")}
        state = copy.deepcopy(state)  # torch's Adam would keep and modify these tensors
        state["param_groups"] = [{**group, **own} for group in state["param_groups"]]
        self.optimizer.load_state_dict(state)
        for parameter, saved in self.optimizer.state.items():
            shapes = {saved[name].shape for name in ("exp_avg", "exp_avg_sq")}
            if shapes != {parameter.shape}:
                raise ArgumentError(
                    f"The optimizer's state must have the shapes of the parameters, got {shapes} for {parameter.shape}."
                )
        for group in self.optimizer.param_groups:
            rate, device = group["lr"], group["params"][0].device
            group["lr"] = torch.as_tensor(rate, device=device) if self._capturable else float(rate)


def _are_same(found: Sequence[object], kept: Sequence[object]) -> bool:
    return len(found) == len(kept) and all(map(operator.is_, found, kept))
