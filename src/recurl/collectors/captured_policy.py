"""CUDA graph of a policy, replayed at every step of environments on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from recurl.collectors.captured import capture_graph
from recurl.core.torch_compat import foreach_copy_
from recurl.execution.capture import ModuleGuard
from recurl.sequences.entries import Entries, Step, leaves

__all__ = ["CapturedPolicy", "generator_of"]

_WARM_UP = 2  # calls before capture, in which kernels are compiled and libraries allocate their memory

_Key = tuple[str, ...]


class _Written(NamedTuple):
    """Written entries of one dtype."""

    numbers: Tensor
    """Values of all entries, concatenated."""
    keys: list[_Key]
    shapes: list[torch.Size]
    sizes: list[int]


class _CapturedGraph(NamedTuple):
    replay: Callable[[], None]
    memory: dict[_Key, Tensor]
    passed: list[tuple[_Key, _Key]]  # entries of the result that are unchanged entries of the root
    written: list[_Written]


class CapturedPolicy:
    """Runs a policy as a CUDA graph.

    The first two calls launch individual operations, the third captures them, and later calls replay the graph. A
    replay draws the same random numbers as individual launches and gives bitwise equal results. Weights and buffers are
    read in place. Each call returns newly allocated results.

    Args:
        policy: the policy; if a module, parameter or buffer in it was replaced, the graph is captured again.
        generator: the random generator of the policy's device, on which all inputs must be.
    """

    def __init__(self, policy: object, generator: Generator) -> None:
        self._policy = policy if isinstance(policy, nn.Module) else None
        self._generator = generator
        self._setting: object = None
        self._guard: ModuleGuard | None = None
        self.reset()

    def reset(self) -> None:
        """Discard and free the graph."""
        self._warm = 0
        self._captured: _CapturedGraph | None = None

    def begin(self, act: Callable[[Any], Step], setting: object) -> Self:
        """Begin a batch, and return ``self``.

        Args:
            act: calls the policy.
            setting: further state that the result depends on; if it has changed, the graph is captured again.
        """
        training = self._policy and [module.training for module in self._policy.modules()]
        replaced = self._guard is not None and self._guard.replaced() is not None
        if replaced or self._setting != (setting, training):
            self._captured = None
            self._guard = None if self._policy is None else ModuleGuard(self._policy)
        self._act, self._setting = act, (setting, training)
        return self

    def __call__(self, root: Any) -> Any:
        """Run the policy, and return a root of the type of ``root`` with its results.

        Raises:
            UsageError: the policy can't be captured; the message gives the reason.
        """
        if self._warm < _WARM_UP:
            self._warm += 1
            return self._act(root)
        given = dict(leaves(root))
        graph = self._captured
        if graph is None or graph.memory.keys() != given.keys():
            graph = self._captured = self._capture(root, given)
        foreach_copy_(list(graph.memory.values()), [given[key] for key in graph.memory])
        graph.replay()
        result = _empty(root)
        for key, source in graph.passed:
            result.set(key, given[source])
        for numbers, keys, shapes, sizes in graph.written:
            for key, shape, values in zip(keys, shapes, numbers.clone().split(sizes), strict=True):
                result.set(key, values.view(shape))
        return result

    def _capture(self, root: Step, given: dict[_Key, Tensor]) -> _CapturedGraph:
        memory = {key: tensor.clone() for key, tensor in given.items()}
        found: dict[_Key, Tensor] = {}

        def steps() -> list[Sequence[Tensor]]:
            inputs = _empty(root)
            for key, tensor in memory.items():
                inputs.set(key, tensor)
            found.update(leaves(self._act(inputs)))
            for key, tensor in found.items():
                if id(tensor) not in sources:
                    made.setdefault(tensor.dtype, {})[key] = tensor
            return [[torch.cat([tensor.reshape(-1) for tensor in kind.values()]) for kind in made.values()]]

        sources = {id(tensor): key for key, tensor in memory.items()}
        made: dict[torch.dtype, dict[_Key, Tensor]] = {}  # copied with one launch per dtype
        replay, (written,) = capture_graph("policy", steps, self._generator)
        passed = [(key, sources[id(tensor)]) for key, tensor in found.items() if id(tensor) in sources]
        return _CapturedGraph(
            replay, memory, passed, [_written(*kind) for kind in zip(written, made.values(), strict=True)]
        )


def _written(numbers: Tensor, tensors: dict[_Key, Tensor]) -> _Written:
    shapes = [tensor.shape for tensor in tensors.values()]
    return _Written(numbers, list(tensors), shapes, [shape.numel() for shape in shapes])


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
