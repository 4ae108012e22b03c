"""A policy's graph of TensorDict modules as a plain list of calls on tensors.

A small policy spends most of its time in what TensorDict modules do around the arithmetic. Where each link is known,
the links are called one after another on :class:`~recurl.entries.Entries`: the same modules, the same operations in
the same order and shapes, hence the same bits. The list holds the modules themselves, no copy of their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)

from recurl.entries import Entries
from recurl.errors import UnsupportedError
from recurl.keys import normalize_key
from recurl.lowering import Link, hooked, link, not_linkable
from recurl.modules.actors import Sampler, SamplingSequence

__all__ = ["lower"]

_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward, SamplingSequence.forward)


def lower(policy: Callable[[TensorDictBase], TensorDictBase]) -> Callable[[Entries], Entries]:
    """Return a function of ``Entries`` that writes what ``policy`` would write into a TensorDict of them.

    Args:
        policy: TensorDict modules in sequence: ``TensorDictModule`` (so ``ValueOperator``), recurl's recurrent and
            other modules, and at the end perhaps the sampler of a ``ProbabilisticActor``.

    Raises:
        UnsupportedError: a part of the policy does more than can be lowered; the text names it.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> step = Entries({"observation": torch.zeros(4, 3)}, torch.Size([4]))
        >>> lower(TensorDictSequential(net))(step)["logits"].shape
        torch.Size([4, 2])
    """
    links = list[Link]()
    _append(links, policy)

    def run(entries: Entries) -> Entries:
        for step in links:
            step(entries)
        return entries

    return run


def _append(links: list[Link], module: object) -> None:
    if not isinstance(module, TensorDictModuleBase):
        raise UnsupportedError(f"{_name(module)} is no TensorDict module")
    forward = type(module).forward
    if isinstance(module, TensorDictSequential) and forward in _SEQUENCES:
        reason, add = hooked(module), _append_sequence
    elif isinstance(module, Sampler) and forward is Sampler.forward:
        reason, add = hooked(module), _append_sampler
    else:
        reason, add = hooked(module) or not_linkable(module), _append_link
    if reason is not None:
        raise UnsupportedError(reason)
    add(links, cast(Any, module))


def _append_link(links: list[Link], module: TensorDictModuleBase) -> None:
    links.append(link(module))


def _append_sampler(links: list[Link], sampler: Sampler) -> None:
    links.append(sampler.lowered())


def _append_sequence(links: list[Link], sequence: TensorDictSequential) -> None:
    parts = cast("list[TensorDictModuleBase]", list(sequence.module.children()))
    plain = sequence.inplace in (None, True) and not sequence.partial_tolerant
    if isinstance(sequence, ProbabilisticTensorDictSequential):
        # Several samplers, or a prefix that already writes the action, follow rules of tensordict's own.
        samplers = [part for part in parts[:-1] if isinstance(part, Sampler | ProbabilisticTensorDictSequential)]
        plain = plain and not samplers and sequence._requires_sample and not sequence.return_composite  # pyright: ignore[reportPrivateUsage] - no other name
    if not plain or "forward" in vars(sequence) or skip_existing():
        raise UnsupportedError(f"{_name(sequence)} does more than run its modules in order")
    if not getattr(sequence, "_select_before_return", False):
        for part in parts:
            _append(links, part)
        return
    inner = list[Link]()
    for part in parts:
        _append(inner, part)
    links.append(_selecting(inner, sequence))


def _selecting(links: list[Link], sequence: TensorDictSequential) -> Link:
    """Run ``links``; of what they write, keep the selected entries and what was there before."""
    selected = [normalize_key(key) for key in sequence.out_keys]
    others = {normalize_key(key) for key in sequence.out_keys_source} - set(selected)

    def run(entries: Entries) -> None:
        inside = entries.copy()
        for step in links:
            step(inside)
        for key in (*selected, *(key for key in others if key in entries)):
            entries.set(key, inside[key])

    return run


def _name(module: object) -> str:
    return type(module).__name__
