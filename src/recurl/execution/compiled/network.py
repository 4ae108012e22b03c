"""Execution of modules in order by as few calls of the C++ library as possible."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl.core.errors import UsageError
from recurl.core.keys import NestedKey, normalize_key
from recurl.execution.compiled.compilation import Compilation
from recurl.execution.compiled.in_memory import StepsInMemory
from recurl.execution.explain import Explanation, NotCompiled
from recurl.execution.lowering import Link, Network, children_in_order, link, modules_in_order
from recurl.native.library import can_call, missing
from recurl.sequences.entries import Entries
from recurl.sequences.mode import set_recurrent_mode
from recurl.sequences.tensordict_compat import returns_other_entries

__all__ = ["CompiledNetwork", "write_all"]


_BATCH_SIZES = 8


class CompiledNetwork:
    """A lowered network that computes steps without gradients, as far as possible with the C++ library.

    The first call with a batch size decides which modules run together as one program. Other modules run as in the
    lowered network, and so do all modules if the shape of an entry has changed, or if autograd or a transform or mode
    of torch is active. Random numbers are drawn from torch's generator as in the lowered network. Results are equal to
    rounding, about 1e-6 of their norm in float32. Weights are read in place, so in-place edits take effect at once.
    Replaced weights and modules take effect in the next ``CompiledNetwork``: create one for each batch.

    Args:
        network: the lowered network.

    Raises:
        UsageError: it can't be lowered.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from recurl.execution.lowering import Entries, Network
        >>> net = TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), ["observation"], ["features"])
        >>> network = CompiledNetwork(Network([net]))
        >>> step = Entries({"observation": torch.zeros(5, 3)}, torch.Size([5]))
        >>> with torch.no_grad():
        ...     network(step)["features"].shape
        torch.Size([5, 4])
        >>> with torch.no_grad():
        ...     print(network.explain(step))
        step: cpp
    """

    def __init__(self, network: Network) -> None:
        if network.obstacle is not None:
            raise UsageError(f"Only a network that can be lowered can be compiled, and {network.obstacle}.")
        self._whole = cast(Link, network)
        self._leaves, self._selection = _flattened(network.modules)
        self._parts: dict[torch.Size, list[Link]] = {}
        self._dtype = _dtype_of(network)

    def explain(self, entries: Entries) -> Explanation:
        """Explain whether a step on ``entries`` is one call of the C++ library."""
        if can_call():
            with set_recurrent_mode(False):
                reason = self._compiled(self._leaves, entries, [])[1]
        else:
            reason = missing() or "autograd, or a transform or mode of torch, is active"
        return Explanation("step", {"cpp": reason, "tensors": None})

    def __call__(self, entries: Entries) -> Entries:
        """Run the network on ``entries`` and return it."""
        parts = self._parts.get(entries.batch_size)
        if parts is None:
            self._begin(entries)
        elif len(parts) == 1:
            parts[0](entries)
        else:
            inside = entries if self._selection is None else entries.copy()
            for part in parts:
                part(inside)
            self._select(inside, entries)
        return entries

    def in_memory(self, entries: Entries, memory: Mapping[NestedKey, Tensor]) -> StepsInMemory:
        """Return the network as a function of the step index of a batch.

        Args:
            entries: example entries of a step.
            memory: entries that steps are read from and written to, ``[T, *B, ...]``.

        Raises:
            NotCompiled: that is impossible; the message is the reason.
        """
        parts = self._parts.get(entries.batch_size)
        if parts is None and can_call():
            program, reason = self._compiled(self._leaves, entries, [])
            if program is not None and reason is None:
                parts = self._parts[entries.batch_size] = [cast(Link, program)]
        first, *others = parts or [self._whole]
        if not can_call() or others or not isinstance(first, _CompiledModules):
            raise NotCompiled("a step of the policy is more than one call of the C++ library")
        return first.in_memory(memory)

    def _begin(self, entries: Entries) -> None:
        """Run entries of a new batch size, and store how they are run."""
        if not can_call():
            self._whole(entries)
            return
        parts = self._divided(entries)
        if len(self._parts) == _BATCH_SIZES:  # otherwise they would pile up where batch sizes vary
            self._parts = {}
        self._parts[entries.batch_size] = parts

    def _select(self, inside: Entries, entries: Entries) -> None:
        if self._selection is not None:
            for key in self._selection.kept(entries):
                entries.set(key, inside[key])

    def _divided(self, entries: Entries) -> list[Link]:
        """Run the modules one after another, and return the parts that ran them."""
        inside = entries if self._selection is None else entries.copy()
        parts, done = list[Link](), 0
        while done < len(self._leaves):
            program = self._program(self._leaves[done:], inside)
            parts.append(link(self._leaves[done]) if program is None else program)
            parts[-1](inside)
            done += 1 if program is None else len(program.modules)
        self._select(inside, entries)
        return parts if any(type(part) is _CompiledModules for part in parts) else [self._whole]

    def _program(self, modules: Sequence[TensorDictModuleBase], entries: Entries) -> _CompiledModules | None:
        """Return a program of the longest prefix of ``modules`` that can run together, or None."""
        later: Sequence[TensorDictModuleBase] = []
        with set_recurrent_mode(False):
            while modules:  # what a later module reads must be written, which a shorter prefix may be able to
                found, reason = self._compiled(modules, entries, later)
                if reason is None:
                    return found
                count = 0 if found is None else len(found.modules)
                modules, later = modules[:count], [*modules[count:], *later]
        return None

    def _compiled(
        self, modules: Sequence[TensorDictModuleBase], entries: Entries, later: Sequence[TensorDictModuleBase]
    ) -> tuple[_CompiledModules | None, str | None]:
        """Return a program of the first of ``modules``, and the reason why the next one isn't part of it."""
        wanted = _ANY if self._selection is None else {*self._selection.kept(entries), *_read_by(later)}
        done: list[TensorDictModuleBase] = []
        compilation: Compilation | None = None
        reason = None
        try:
            compilation = Compilation(entries, self._dtype, wanted)
            for module in modules:
                compilation.add(module)
                done.append(module)
        except NotCompiled as why:
            reason = str(why)
        program = _CompiledModules(compilation, done, entries.batch_size) if compilation is not None and done else None
        return program, reason


def _dtype_of(network: Network) -> torch.dtype:
    first = next((tensor for module in network.modules for tensor in module.parameters()), None)
    return torch.float32 if first is None else first.dtype


def write_all(network: Network, example: Entries, wanted: Container[NestedKey | None], recorder: Any) -> Compilation:
    """Translate a lowered network to a program that writes the entries ``wanted``.

    Raises:
        NotCompiled: a module can't be part of a program.
    """
    if network.obstacle is not None:
        raise NotCompiled(network.obstacle)
    with set_recurrent_mode(False):
        compilation = Compilation(example, _dtype_of(network), wanted, recorder)
        for module in _flattened(network.modules)[0]:
            compilation.add(module)
    return compilation


class _Any:
    def __contains__(self, _: object) -> bool:
        return True


_ANY = _Any()


class _Selection(NamedTuple):
    """Selected outputs of a sequence, and the other outputs of its modules."""

    selected: list[NestedKey]
    others: list[NestedKey]

    def kept(self, entries: Entries) -> list[NestedKey]:
        """Return the keys that the sequence writes to ``entries``: the other ones only if already present."""
        return [*self.selected, *(key for key in self.others if key in entries)]


def _flattened(modules: Sequence[TensorDictModuleBase]) -> tuple[list[TensorDictModuleBase], _Selection | None]:
    """Return the modules that run in order, and the selection of their outputs; None for all outputs."""
    if len(modules) == 1 and isinstance(modules[0], TensorDictSequential) and returns_other_entries(modules[0]):
        sequence = modules[0]
        with suppress(NotCompiled):
            leaves = [leaf for child in children_in_order(sequence) for leaf in modules_in_order(child)]
            selected = [normalize_key(key) for key in sequence.out_keys]
            others = [key for key in map(normalize_key, sequence.out_keys_source) if key not in selected]
            return leaves, _Selection(selected, others)
    return [leaf for module in modules for leaf in modules_in_order(module)], None


def _read_by(modules: Sequence[TensorDictModuleBase]) -> set[NestedKey]:
    return {normalize_key(key) for module in modules for key in module.in_keys}


class _CompiledModules:
    """Modules that run as one call of the C++ library."""

    __slots__ = ("_batch_size", "_places", "_program", "_reads", "_rows", "_writes", "modules")

    def __init__(
        self, compilation: Compilation, modules: Sequence[TensorDictModuleBase], batch_size: torch.Size
    ) -> None:
        self.modules = tuple(modules)
        self._program = compilation.finish()
        self._rows, self._batch_size = batch_size.numel(), batch_size
        places = [0] * (2 * (len(compilation.reads) + len(compilation.writes)))
        for outside in (*compilation.reads, *compilation.writes):
            places[2 * outside.slot + 1] = outside.shape[len(batch_size) :].numel()
        self._places = places
        self._reads = [(2 * read.slot, cast(NestedKey, read.key), read.shape, read.dtype) for read in compilation.reads]
        # torch.empty_like takes less than half the time of torch.empty.
        self._writes = [
            (2 * write.slot, write.key, torch.empty(write.shape, dtype=write.dtype), write.fill)
            for write in compilation.writes
        ]

    def __call__(self, entries: Entries) -> None:
        if not self._ran(entries):
            self.run_modules(entries)

    def run_modules(self, entries: Entries) -> None:
        """Run the modules without the program."""
        for module in self.modules:
            link(module)(entries)

    def in_memory(self, memory: Mapping[NestedKey, Tensor]) -> StepsInMemory:
        """Return the program as a function of the step index; see :meth:`CompiledNetwork.in_memory`."""
        steps = StepsInMemory(self._program, memory, self._places, self._batch_size, self.run_modules)
        for slot, key, shape, dtype in self._reads:
            if not steps.bind_entry(slot, key, shape, dtype, steps.reads):
                raise NotCompiled(f"the policy reads {key!r}, which is not an entry of the batch, or differs from it")
        for slot, key, like, fill in self._writes:
            if key is None:
                steps.bind_scratch(slot, torch.empty_like(like), fill)
            elif not steps.bind_entry(slot, key, like.shape, like.dtype, steps.writes):
                raise NotCompiled(f"the policy writes {key!r}, which is not an entry of the batch, or differs from it")
        return steps

    def _ran(self, entries: Entries) -> bool:
        """Run the program on ``entries`` if they match those it was compiled for; return whether it ran."""
        if not can_call():
            return False
        places, kept = self._places.copy(), list[Tensor]()
        for slot, key, shape, dtype in self._reads:
            value = entries.get(key)
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape or not value.is_cpu:
                return False
            if not value.is_contiguous():
                value = value.contiguous()
                kept.append(value)
            places[slot] = value.data_ptr()
        written: list[tuple[Any, Tensor]] = []
        for slot, key, like, fill in self._writes:
            value = torch.empty_like(like)
            places[slot] = (value if fill is None else fill(value)).data_ptr()
            written.append((key, value))
        if not self._program(places, self._rows):
            return False
        for key, value in written:
            if key is not None:
                entries.set(key, value)
        return True
