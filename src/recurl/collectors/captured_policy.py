"""CUDA graph of a policy, replayed at every step of environments on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from recurl.collectors.captured import COLLECT_WITHOUT
from recurl.execution.capture import GraphedFunction, ModuleGuard
from recurl.sequences.entries import Entries, Step, leaves

__all__ = ["CapturedPolicy", "generator_of"]

_Key = tuple[str, ...]


class _Written(NamedTuple):
    """Written entries of one dtype, which are returned as one tensor: copied with one launch."""

    keys: list[_Key]
    shapes: list[torch.Size]
    sizes: list[int]


class CapturedPolicy:
    """Runs a policy as a CUDA graph (see :class:`~recurl.execution.capture.GraphedFunction`).

    Results have the bits of single launches, and are newly allocated.

    Args:
        policy: the policy; if a module, parameter or buffer in it was replaced, or the mode of a module changed (see
            :class:`~recurl.execution.capture.ModuleGuard`), the graph is captured again.
        generator: the random generator of the policy's device, on which all inputs must be.
    """

    def __init__(self, policy: object, generator: Generator) -> None:
        self._generator = generator
        self._setting: object = None
        self._guard = ModuleGuard(
            policy if isinstance(policy, nn.Module) else None, modes=True, settings=lambda: {"setting": self._setting}
        )
        self._root: object = None  # type and keys of the root
        self._passed: list[tuple[_Key, _Key]] = []  # entries of the result that are unchanged entries of the root
        self._written: list[_Written] = []
        self.reset()

    def reset(self) -> None:
        """Discard and free the graph."""
        self._graphed: GraphedFunction[list[Tensor]] | None = None

    def begin(self, act: Callable[[Any], Step], setting: object) -> Self:
        """Begin a batch, and return ``self``.

        Args:
            act: calls the policy.
            setting: further state that the result depends on; if it has changed, the graph is captured again.
        """
        self._act, self._setting = act, setting
        if self._graphed is not None and self._guard.replaced() is not None:
            self._graphed.discard()
        return self

    def __call__(self, root: Any) -> Any:
        """Run the policy, and return a root of the type of ``root`` with its results.

        Raises:
            UsageError: the policy can't be captured; the message gives the reason.
        """
        given = dict(leaves(root))
        graphed = self._graphed
        if graphed is None or self._root != (type(root), list(given)):
            self._root = type(root), list(given)
            graphed = self._graphed = self._graph_of(_empty(root), list(given))
        numbers = graphed(*given.values())
        result = _empty(root)
        for key, source in self._passed:
            result.set(key, given[source])
        for values, (keys, shapes, sizes) in zip(numbers, self._written, strict=True):
            for key, shape, part in zip(keys, shapes, values.clone().split(sizes), strict=True):
                result.set(key, part.view(shape))
        return result

    def _graph_of(self, empty: Any, keys: list[_Key]) -> GraphedFunction[list[Tensor]]:
        def run(*tensors: Tensor) -> list[Tensor]:
            root = empty.copy()
            for key, tensor in zip(keys, tensors, strict=True):
                root.set(key, tensor)
            sources = {id(tensor): key for key, tensor in zip(keys, tensors, strict=True)}
            found = dict(leaves(self._act(root)))
            self._passed = [(key, sources[id(tensor)]) for key, tensor in found.items() if id(tensor) in sources]
            made: dict[torch.dtype, dict[_Key, Tensor]] = {}
            for key, tensor in found.items():
                if id(tensor) not in sources:
                    made.setdefault(tensor.dtype, {})[key] = tensor
            shapes = [[tensor.shape for tensor in kind.values()] for kind in made.values()]
            self._written = [
                _Written([*kind], sizes, [shape.numel() for shape in sizes])
                for kind, sizes in zip(made.values(), shapes, strict=True)
            ]
            return [torch.cat([tensor.reshape(-1) for tensor in kind.values()]) for kind in made.values()]

        device = self._generator.device
        return GraphedFunction(run, device, self._generator, name="policy", instead=COLLECT_WITHOUT, guard=self._guard)


def _empty(root: Step) -> Any:
    """Return an empty root of the type of ``root``."""
    if isinstance(root, Entries):
        return Entries({}, root.batch_size, root.device)
    return TensorDict({}, root.batch_size, device=root.device)


def generator_of(device: torch.device | None) -> Generator:
    """Return torch's default random generator of a device."""
    if device is None or device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]
