"""Lowering of one TensorDict module: its computation as a function of :class:`~recurl.execution.lowering.Entries`.

The overhead of TensorDict modules exceeds the arithmetic of a small network. A link calls the contents of a module on
``Entries`` directly: the same operations on the same shapes, so results are bitwise equal. Links are created for one
call or one batch and then dropped, so that none refers to modules that have since been replaced in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, cast

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from torch import Tensor, nn

from recurl.core.errors import UsageError
from recurl.core.keys import NestedKey, normalize_key
from recurl.core.torch_compat import has_global_hooks, has_hooks
from recurl.execution.explain import NotCompiled
from recurl.sequences.entries import Entries, unmarked
from recurl.sequences.tensordict_compat import passes_keywords, returns_other_entries, samples

__all__ = ["Link", "Linkable", "Links", "children_in_order", "hooked", "in_order", "link"]

Link: TypeAlias = Callable[[Entries], Any]
_IN_ORDER = "_recurl_in_order"


class Linkable(Protocol):
    """A TensorDict module that defines its own execution on ``Entries``."""

    def link_entries(self) -> Link:
        """Return a function of ``Entries`` that writes the same as ``forward``.

        Raises:
            NotCompiled: there is none; the message is the reason.
        """
        ...


def link(module: object) -> Link:
    """Return a function of ``Entries`` that writes the same as ``module``.

    Supported are ``TensorDictModule``, modules whose ``forward`` is marked with
    :func:`~recurl.execution.lowering.takes_entries`, :class:`Linkable` modules, and sequences of these. The function is
    valid until the next edit of the module tree.

    Raises:
        NotCompiled: there is none; the message is the reason.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.execution.lowering import Entries
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> step = Entries({"observation": torch.zeros(4, 3)}, torch.Size([4]))
        >>> link(net)(step); step["logits"].shape
        torch.Size([4, 2])
        >>> link(len)
        Traceback (most recent call last):
            ...
        recurl.execution.explain.NotCompiled: builtin_function_or_method is not a TensorDict module
    """
    if not isinstance(module, TensorDictModuleBase):
        raise NotCompiled(f"{type(module).__name__} is not a TensorDict module")
    _check(hooked(module) or ("tensordict's set_skip_existing is active" if skip_existing() else None))
    if hasattr(type(module), "link_entries"):
        return cast(Linkable, module).link_entries()
    if isinstance(module, TensorDictSequential):
        return _link_sequence(module)
    if isinstance(module, TensorDictModule):
        _check(_network_does_more(module))
        return _Network(module)
    _check(unmarked(module, "forward"))
    return cast(Link, module.forward)


def _check(reason: str | None) -> None:
    if reason is not None:
        raise NotCompiled(reason)


def hooked(module: nn.Module) -> str | None:
    """Return which hooks of ``module`` a link would skip, as text, or None if there are none."""
    if has_hooks(module):
        return f"{type(module).__name__} has hooks"
    if has_global_hooks():
        return "torch has global module hooks"
    return None


class Links:
    """Links that run one after another.

    Args:
        modules: the modules, in order.

    Raises:
        NotCompiled: one of them has none; the message is the reason.
    """

    __slots__ = ("_links",)

    def __init__(self, modules: Iterable[object]) -> None:
        self._links = tuple(map(link, modules))

    def __call__(self, entries: Entries) -> Entries:
        """Run all links on ``entries`` and return it."""
        for run in self._links:
            run(entries)
        return entries


# -- sequences


def in_order(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the ``forward`` of a sequence as equivalent to tensordict's own, which runs the modules in order."""
    setattr(forward, _IN_ORDER, True)
    return forward


_SEQUENCE_FORWARDS = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)


def children_in_order(sequence: TensorDictSequential) -> list[Any]:
    """Return the modules that ``sequence`` runs one after another.

    Raises:
        NotCompiled: it does more.
    """
    forward = type(sequence).forward
    plain = forward in _SEQUENCE_FORWARDS or getattr(forward, _IN_ORDER, False)
    plain = plain and "forward" not in vars(sequence)
    plain = plain and sequence.inplace in (None, True) and not sequence.partial_tolerant
    held: Any = sequence.module
    children = list(held.values() if isinstance(held, Mapping | nn.ModuleDict) else held)
    if isinstance(sequence, ProbabilisticTensorDictSequential):
        # tensordict has other rules for several samplers, or for a module before the sampler that writes the action.
        kinds = ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential
        plain = plain and not any(isinstance(child, kinds) for child in children[:-1])
        plain = plain and samples(sequence) and not sequence.return_composite
    if not plain:
        raise NotCompiled(f"{type(sequence).__name__} does more than run its modules in order")
    return children


def _link_sequence(sequence: TensorDictSequential) -> Link:
    links = Links(children_in_order(sequence))
    return _Selection(links, sequence) if returns_other_entries(sequence) else links


class _Selection:
    """Links of a sequence with ``select_out_keys``: keeps its selected outputs and the entries present before."""

    __slots__ = ("_links", "_others", "_selected")

    def __init__(self, links: Links, sequence: TensorDictSequential) -> None:
        self._links = links
        self._selected = [normalize_key(key) for key in sequence.out_keys]
        self._others = {normalize_key(key) for key in sequence.out_keys_source} - set(self._selected)

    def __call__(self, entries: Entries) -> None:
        inside = self._links(entries.copy())
        for key in (*self._selected, *(key for key in self._others if key in entries)):
            entries.set(key, inside[key])


# -- networks on tensors


def _network_does_more(module: TensorDictModule) -> str | None:
    name = type(module).__name__
    if type(module).forward is not TensorDictModule.forward or "forward" in vars(module):
        return f"{name} has its own forward"
    special = passes_keywords(module) or returns_other_entries(module)
    if special or module.method is not None or module.inplace is not True:
        return f"{name} has inplace, method, selected out_keys or a dict of in_keys"
    return None


class _Network:
    """Calls the network inside a ``TensorDictModule``."""

    __slots__ = ("_module", "_reads", "_writes")

    def __init__(self, module: TensorDictModule) -> None:
        self._module = module
        self._reads = [normalize_key(key) for key in module.in_keys]
        self._writes = [normalize_key(key) for key in module.out_keys]

    def __call__(self, entries: Entries) -> None:
        inputs = [entries.get(key) for key in self._reads]
        if any(value is None for value in inputs):
            self._run_on_tensordict(entries)  # raises tensordict's error, or runs without the missing entry
            return
        outputs, writes = self._module.module(*inputs), self._writes
        if type(outputs) is Tensor and len(writes) == 1:
            entries.set(writes[0], outputs)
            return
        for key, value in zip(writes, _outputs(outputs, writes), strict=True):
            _write(entries, key, value)

    def _run_on_tensordict(self, entries: Entries) -> None:
        result = self._module(entries.to_tensordict())
        for key in self._writes:
            _write(entries, key, result.get(key, None))


def _write(entries: Entries, key: NestedKey, value: Any) -> None:
    if key != "_":
        entries.set(key, value if isinstance(value, Tensor) else Entries.of(TensorDict.from_any(value)))


def _outputs(outputs: Any, keys: list[NestedKey]) -> tuple[Any, ...]:
    """Return the outputs of a network, one value for each of the out keys."""
    if isinstance(outputs, dict | TensorDictBase) and all(key in outputs for key in keys):
        return tuple(outputs[key] for key in keys)
    values = outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)
    if len(values) != len(keys):
        raise UsageError(
            f"A module must return one tensor for each of its out_keys {keys}, got {len(values)}. A network that "
            "returns location and scale of a distribution must end with a NormalParamExtractor."
        )
    return values
