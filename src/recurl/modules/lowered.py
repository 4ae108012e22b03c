"""A policy's graph of TensorDict modules as a plain list of calls on tensors.

A small policy spends most of its time in what TensorDict modules do around the arithmetic. Where each link is known,
the links are called one after another on :class:`~recurl.entries.Entries`: the same modules, the same operations in
the same order and shapes, hence the same bits. The list holds the modules themselves, no copy of their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from torch import Tensor

from recurl.entries import Entries, unmarked
from recurl.errors import UnsupportedError, UsageError
from recurl.keys import normalize_key
from recurl.modules.actors import SCALE_HINT, Sampler, SamplingSequence

__all__ = ["lower"]

Link: TypeAlias = Callable[[Entries], Any]

_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward, SamplingSequence.forward)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def lower(policy: Callable[[TensorDictBase], TensorDictBase]) -> Callable[[Entries], Entries]:
    """Return a function of ``Entries`` that writes what ``policy`` would write into a TensorDict of them.

    Args:
        policy: TensorDict modules in sequence: ``TensorDictModule`` (so ``ValueOperator``), recurl's recurrent and
            other modules, and at the end perhaps the sampler of a ``ProbabilisticActor``.

    Raises:
        UnsupportedError: a part of the policy does more than can be lowered; the text names it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> step = Entries({"observation": torch.zeros(4, 3)}, torch.Size([4]))
        >>> lower(TensorDictSequential(net))(step)["logits"].shape
        torch.Size([4, 2])
    """
    links = list[Link]()
    _append(links, policy)

    def run(entries: Entries) -> Entries:
        for link in links:
            link(entries)
        return entries

    return run


def _append(links: list[Link], module: object) -> None:
    if not isinstance(module, TensorDictModuleBase):
        raise UnsupportedError(f"{_name(module)} is no TensorDict module")
    hooks = [name for name in _HOOKS if module.__dict__.get(name)]
    if hooks or "forward" in vars(module):
        raise UnsupportedError(f"{_name(module)} has hooks, selected out_keys or a forward of its own")
    forward = type(module).forward
    if isinstance(module, TensorDictSequential) and forward in _SEQUENCES:
        _append_sequence(links, module)
    elif isinstance(module, TensorDictModule) and forward is TensorDictModule.forward:
        links.append(_network(module))
    elif isinstance(module, Sampler) and forward is Sampler.forward:
        links.append(module.lowered())
    elif unmarked(module, "forward") is None:
        links.append(cast(Link, module.forward))
    else:
        raise UnsupportedError(f"{_name(module)}.forward needs a TensorDict")


def _append_sequence(links: list[Link], sequence: TensorDictSequential) -> None:
    parts = cast("list[TensorDictModuleBase]", list(sequence.module.children()))
    plain = sequence.inplace in (None, True) and not sequence.partial_tolerant
    plain = plain and not getattr(sequence, "_select_before_return", False)
    if isinstance(sequence, ProbabilisticTensorDictSequential):
        # Several samplers, or a prefix that already writes the action, follow rules of tensordict's own.
        samplers = [part for part in parts[:-1] if isinstance(part, Sampler | ProbabilisticTensorDictSequential)]
        plain = plain and not samplers and sequence._requires_sample and not sequence.return_composite  # pyright: ignore[reportPrivateUsage] - no other name
    if not plain or skip_existing():
        raise UnsupportedError(f"{_name(sequence)} does more than run its modules in order")
    for part in parts:
        _append(links, part)


def _network(module: TensorDictModule) -> Link:
    if module.inplace is not True or module.method is not None or module.method_kwargs or module._kwargs is not None:  # pyright: ignore[reportPrivateUsage] - no other name
        raise UnsupportedError(f"{_name(module)} has inplace, method or a dict of in_keys")
    network = module.module
    reads = [normalize_key(key) for key in module.in_keys]
    writes = [normalize_key(key) for key in module.out_keys]

    def run(entries: Entries) -> None:
        inputs = [entries.get(key) for key in reads]
        if any(value is None for value in inputs):
            module(entries.to_tensordict())  # explains which one is missing
        outputs = network(*inputs)
        if type(outputs) is Tensor and len(writes) == 1:
            entries.set(writes[0], outputs)
            return
        for key, value in zip(writes, _outputs(module, outputs), strict=True):
            if key != "_":
                entries.set(key, value if isinstance(value, Tensor) else Entries.of(TensorDict.from_any(value)))

    return run


def _outputs(module: TensorDictModule, outputs: Any) -> tuple[Any, ...]:
    """Return what a network gave, one value for each of the out keys."""
    keys = module.out_keys
    if isinstance(outputs, dict | TensorDictBase) and all(key in outputs for key in keys):
        values = tuple(outputs[key] for key in keys)
    else:
        values = outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)
    if len(values) != len(keys):
        raise UsageError(f"A module gave {len(values)} tensors for its out_keys {keys}. {SCALE_HINT}")
    return values


def _name(module: object) -> str:
    return type(module).__name__
