"""Saving and restoring the state of a policy and of random number generators around an experiment."""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from recurl.core.seeding import derive_seed
from recurl.core.torch_compat import tensors_of
from recurl.diagnostics.parts import submodules

_CONTAINERS = (dict, OrderedDict, list, set, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Snapshot:
    """Snapshot of the attributes of a policy's modules and of all random number generators.

    It covers attributes (mode, buffers, state kept in modules) with the contents of tensors, and the generators of
    Python, NumPy and torch, including those owned by modules.

    Args:
        policy: any policy.
    """

    def __init__(self, policy: object) -> None:
        modules = [module for module in submodules(policy).values() if not _is_lazy(module)]
        holders = [vars(module) for module in modules]
        if not isinstance(policy, nn.Module):
            holders.append(getattr(policy, "__dict__", {}))
        values = [value for holder in holders for value in holder.values()]
        containers = [value for value in values if type(value) in _CONTAINERS]
        values += [item for some in containers for item in (some.values() if isinstance(some, dict) else some)]
        devices = {parameter.device for module in modules for parameter in module.parameters(recurse=False)}
        self._holders = [(holder, dict(holder)) for holder in holders]
        self._containers = [(container, copy.copy(container)) for container in containers]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in values if _has_contents(tensor)]
        self._generators: list[Any] = [
            *(random, np.random, torch.default_generator),
            *(torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"),
            *(value for value in values if isinstance(value, _GENERATORS)),
        ]
        self._restorers = [_restorer(generator) for generator in self._generators]

    def restore(self) -> None:
        """Restore the snapshot."""
        for restore in self._restorers:
            restore()
        for holder, before in self._holders:
            for name in holder.keys() - before.keys():
                del holder[name]
            holder.update(before)
        for container, before in self._containers:
            container.clear()
            getattr(container, "update" if isinstance(container, dict | set) else "extend")(before)
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not _same(tensor, before):
                    tensor.copy_(before)

    def seed(self, seed: int) -> None:
        """Seed every generator with a different seed."""
        for index, generator in enumerate(self._generators):
            own = derive_seed(seed, "experiment", index)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(own).state
            else:
                generator.seed(own % 2**32)  # NumPy's legacy generators take 32 bits


def _is_lazy(module: nn.Module) -> bool:
    """Return whether a module is initialized by its first call, which can't be undone."""
    return any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(False), *module.buffers(False)))


def _has_contents(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _same(tensor: Tensor, before: Tensor) -> bool:
    both_nan = (tensor != tensor) & (before != before)
    return bool(((tensor == before) | both_nan).all())


def _restorer(generator: Any) -> Callable[[], Any]:
    """Return a function that restores the current state of a generator."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        before = bits.state  # a new dict
        return lambda: setattr(bits, "state", before)
    python = hasattr(generator, "getstate")
    state, restore = (
        (generator.getstate(), generator.setstate) if python else (generator.get_state(), generator.set_state)
    )
    return lambda: restore(state)


@contextmanager
def preserved(policy: object, seed: int = 0) -> Generator[Snapshot]:
    """Seed random numbers and disable compilation inside the block; restore policy and generators afterwards."""
    kept = Snapshot(policy)
    kept.seed(seed)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield kept
    finally:
        kept.restore()


@contextmanager
def evaluating(policy: object) -> Generator[None]:
    """Set ``policy`` to evaluation mode inside the block."""
    before = [(module, module.training) for module in submodules(policy).values()]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def other_weights(policy: object, seed: int) -> AbstractContextManager[None]:
    """Replace the policy's weights with random nonzero ones inside the block.

    This reveals the dependencies of networks whose last layer is initialized to zeros.
    """
    return _changed_weights(policy, seed, "other weights", _other)


def rounded_weights(policy: object, seed: int) -> AbstractContextManager[None]:
    """Change the policy's weights at random by about their last bit inside the block."""
    return _changed_weights(policy, seed, "rounded weights", _rounded)


@contextmanager
def _changed_weights(
    policy: object, seed: int, what: str, change: Callable[[Tensor, torch.Generator], Tensor]
) -> Generator[None]:
    generator = torch.Generator().manual_seed(derive_seed(seed, what))
    drawn: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
    try:
        modules = submodules(policy).values()
        for module in (module for module in modules if not isinstance(module, torch.jit.ScriptModule)):  # immutable
            for tensors in tensors_of(module):
                before.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_floating_point():
                        cast(Any, tensors)[name] = drawn.setdefault(id(tensor), change(tensor, generator))
        yield
    finally:
        for tensors, kept in before:
            tensors.update(kept)


def _rounded(tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    return tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * noise)


def _other(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random weights for a parameter, or a slightly increased buffer, which may be a variance."""
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    if not isinstance(tensor, nn.Parameter):
        return tensor + 0.1 * noise.abs()
    fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
    return noise / math.sqrt(fan_in)
