"""PPO losses and their gradients in one call of the C++ library: forward pass, losses, backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.execution.compiled.compilation import Density
from recurl.execution.compiled.passes import CompiledPass, gradients_of
from recurl.execution.explain import NotCompiled
from recurl.native import structures
from recurl.sequences.entries import Entries
from recurl.sequences.index import Boundaries

__all__ = ["RESULTS", "CompiledSurrogate", "SurrogateData", "SurrogateOptions"]

RESULTS = (
    "loss_objective",
    "loss_critic",
    "entropy",
    "kl_approx",
    "clip_fraction",
    "ESS",
    "max_ratio",
    "mean_ratio",
    "explained_variance",
)
"""In the order of ``enum recurl_result``."""
DISTANCES = ("smooth_l1", "l1", "l2")
_SURROGATE = structures.Surrogate.packer()


class SurrogateOptions(NamedTuple):
    """Options of :class:`~recurl.objectives.ClipPPOLoss`."""

    normalize: bool
    distance: str
    clip_epsilon: float
    clip_value: float
    entropy_coeff: float
    critic_coeff: float
    entropy: bool
    """Whether to report the entropy of a density for which it is expensive."""


class SurrogateData(NamedTuple):
    """Entries of a batch of N tokens: ``[N]``, actions and masks also ``[N, n]``."""

    action: Tensor
    mask: Tensor | None
    log_prob: Tensor
    advantage: Tensor
    target: Tensor
    old_value: Tensor | None

    def check(self, dtype: torch.dtype, columns: int, *, squashed: bool) -> None:
        """Raise NotCompiled if the library can't read this data."""
        tokens = len(self.log_prob)
        numbers = [self.log_prob, self.advantage, self.target, *([] if self.old_value is None else [self.old_value])]
        if any(value.dtype is not dtype or value.requires_grad or not value.is_cpu for value in numbers):
            raise NotCompiled("log-probabilities, advantages or targets aren't plain numbers of the networks' dtype")
        shape, kind = ((tokens, columns), dtype) if squashed else ((tokens,), torch.int64)
        if self.action.shape != shape or self.action.dtype is not kind:
            raise NotCompiled(f"the actions are {self.action.dtype} {list(self.action.shape)}")
        if not squashed:
            least, most = self.action.aminmax()
            if least < 0 or most >= columns:
                raise NotCompiled("an action is out of range")
        if self.mask is not None and (self.mask.dtype is not torch.bool or self.mask.shape != (tokens, columns)):
            raise NotCompiled(f"the mask is {self.mask.dtype} {list(self.mask.shape)}")


@dataclass
class _Buffers:
    """Working memory of a call."""

    work: Tensor
    outputs: list[Tensor]
    grads: list[Tensor]
    results: Tensor


class CompiledSurrogate:
    """Losses and gradients of PPO; memory is reused between calls.

    Args:
        networks: networks that compute logits, or location and scale, and values.
        density: density of the actions.
        value: key of the values.
    """

    def __init__(self, networks: CompiledPass, density: Density, value: NestedKey) -> None:
        self._networks, layout = networks, networks.layout
        self._squashed = density.scale is not None
        keys = (density.location, density.location if density.scale is None else density.scale, value)
        self._places = [networks.writes.index(key) for key in keys]
        self._columns = layout.writes[self._places[0]][1].numel()
        low, high = (torch.as_tensor(bound, dtype=layout.dtype, device="cpu") for bound in (density.low, density.high))
        self._bounds = [bound.expand(self._columns).contiguous() for bound in (low, 0.5 * (high - low))]
        self._into = torch.zeros(sum(layout.sizes), dtype=layout.dtype)
        parts = zip(self._into.split(layout.sizes), networks.parameters, strict=True)
        self._of_parameters = [part.view(parameter.shape) for part, parameter in parts]
        self._memories: dict[int, _Buffers] = {}

    def __call__(
        self, entries: Entries, boundaries: Boundaries, data: SurrogateData, options: SurrogateOptions
    ) -> dict[str, Tensor]:
        """Set the gradients of the parameters, and return losses and metrics, which the next call overwrites.

        Args:
            entries: inputs of the networks.
            boundaries: boundaries of the segments.
            data: inputs of the losses.
            options: options of the losses.

        Raises:
            NotCompiled: the library can't read the data.
        """
        data.check(self._networks.layout.dtype, self._columns, squashed=self._squashed)
        layout, tokens = self._networks.layout, entries.batch_size.numel()
        memory = self._memory(tokens)
        inputs = self._networks.inputs(entries)
        data = SurrogateData(*(None if value is None else value.contiguous() for value in data))  # type: ignore[arg-type]
        layout.program.descend(
            layout.filled(inputs, memory.outputs),
            gradients_of(layout, memory.grads),
            tokens,
            boundaries.starts.contiguous(),
            memory.work,
            self._into,
            self._packed(memory, data, options),
        )
        for parameter, grad in zip(self._networks.parameters, self._of_parameters, strict=True):
            parameter.grad = grad
        return dict(zip(RESULTS, memory.results.clone().unbind(), strict=True))

    def _memory(self, tokens: int) -> _Buffers:
        if tokens not in self._memories:
            if len(self._memories) == 4:
                self._memories = {}
            layout = self._networks.layout
            outputs = [torch.empty((tokens, *shape), dtype=layout.dtype) for _, shape in layout.writes]
            grads = [torch.zeros_like(output) for output in outputs]
            results = torch.empty(len(RESULTS), dtype=layout.dtype)
            self._memories[tokens] = _Buffers(layout.program.memory(tokens), outputs, grads, results)
        return self._memories[tokens]

    def _packed(self, memory: _Buffers, data: SurrogateData, options: SurrogateOptions) -> bytes:
        location, scale, value = (memory.outputs[place].data_ptr() for place in self._places)
        of_location, of_scale, of_value = (memory.grads[place].data_ptr() for place in self._places)
        return _SURROGATE.pack(
            int(self._squashed),
            self._columns,
            *(location, scale, value),
            *(_pointer(data.mask), _pointer(data.action)),
            *(bound.data_ptr() for bound in self._bounds),
            *map(_pointer, (data.log_prob, data.advantage, data.target, data.old_value)),
            *(options.normalize, DISTANCES.index(options.distance), options.entropy or options.entropy_coeff != 0.0),
            *(options.clip_epsilon, options.clip_value, options.entropy_coeff, options.critic_coeff),
            *(of_location, of_scale, of_value, memory.results.data_ptr()),
        )


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
