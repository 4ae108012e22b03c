"""A policy as a CUDA graph, launched at every step of environments on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from recurl._torch import foreach_copy_
from recurl.capture import KeptTensors
from recurl.collectors.captured import recorded
from recurl.lowering import Entries, Step, leaves

__all__ = ["CapturedPolicy", "generator_of"]

_WARM_UP = 2  # calls before the one that is recorded: kernels are compiled and libraries make their memory

_Key = tuple[str, ...]


class _Written(NamedTuple):
    """Entries of one dtype."""

    numbers: Tensor
    """All of them, in one piece."""
    keys: list[_Key]
    shapes: list[torch.Size]
    sizes: list[int]


class _Recording(NamedTuple):
    replay: Callable[[], None]
    memory: dict[_Key, Tensor]
    passed: list[tuple[_Key, _Key]]  # entries of the result that are entries of the root
    written: list[_Written]


class CapturedPolicy:
    """Runs a policy as a CUDA graph.

    The first two calls launch one operation after another, the third records them. From then on they are launched all
    at once, which draws the random numbers that launching them one by one would have drawn and gives the same bits.
    Weights and buffers are read in place. What a call returns is in memory of its own.

    Args:
        policy: the policy; where a module, parameter or buffer in it was replaced, the graph is made anew.
        generator: the random generator of its device, on which all its inputs are.
    """

    def __init__(self, policy: object, generator: Generator) -> None:
        self._policy = policy if isinstance(policy, nn.Module) else None
        self._generator = generator
        self._setting: object = None
        self._weights: KeptTensors | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the graph, and free it."""
        self._warm = 0
        self._recording: _Recording | None = None

    def begin(self, act: Callable[[Any], Step], setting: object) -> Self:
        """Begin a batch, and return this object.

        Args:
            act: calls the policy.
            setting: what else the result depends on; the graph is made anew where it differs.
        """
        training = self._policy and [module.training for module in self._policy.modules()]
        replaced = self._weights is not None and self._weights.replaced() is not None
        if replaced or self._setting != (setting, training):
            self._recording = None
            self._weights = None if self._policy is None else KeptTensors(self._policy)
        self._act, self._setting = act, (setting, training)
        return self

    def __call__(self, root: Any) -> Any:
        """Act, and return a root of the kind of ``root`` with the policy's results.

        Raises:
            UsageError: the policy can't be captured; the message says why.
        """
        if self._warm < _WARM_UP:
            self._warm += 1
            return self._act(root)
        given = dict(leaves(root))
        recording = self._recording
        if recording is None or recording.memory.keys() != given.keys():
            recording = self._recording = self._record(root, given)
        foreach_copy_(list(recording.memory.values()), [given[key] for key in recording.memory])
        recording.replay()
        result = _empty(root)
        for key, source in recording.passed:
            result.set(key, given[source])
        for numbers, keys, shapes, sizes in recording.written:
            for key, shape, values in zip(keys, shapes, numbers.clone().split(sizes), strict=True):
                result.set(key, values.view(shape))
        return result

    def _record(self, root: Step, given: dict[_Key, Tensor]) -> _Recording:
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
        made: dict[torch.dtype, dict[_Key, Tensor]] = {}  # copied in one launch for each dtype
        replay, (written,) = recorded("policy", steps, self._generator)
        passed = [(key, sources[id(tensor)]) for key, tensor in found.items() if id(tensor) in sources]
        return _Recording(
            replay, memory, passed, [_written(*kind) for kind in zip(written, made.values(), strict=True)]
        )


def _written(numbers: Tensor, tensors: dict[_Key, Tensor]) -> _Written:
    shapes = [tensor.shape for tensor in tensors.values()]
    return _Written(numbers, list(tensors), shapes, [shape.numel() for shape in shapes])


def _empty(root: Step) -> Any:
    """Return a root of the kind of ``root`` without entries."""
    if isinstance(root, Entries):
        return Entries({}, root.batch_size, root.device)
    return TensorDict({}, root.batch_size, device=root.device)


def generator_of(device: torch.device | None) -> Generator:
    """Return torch's own random generator of a device."""
    if device is None or device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]
