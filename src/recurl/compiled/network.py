"""Modules that run in order, as few calls of the C++ library as they allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl._torch import returns_other_entries
from recurl.compiled.compilation import Compilable, Compilation, NotCompiled, defines_both, unsupported
from recurl.errors import UsageError
from recurl.keys import NestedKey, normalize_key
from recurl.lowering import Entries, Link, children_in_order, link, modules_in_order
from recurl.mode import set_recurrent_mode
from recurl.recurrence.cpu.library import missing
from recurl.recurrence.cpu.step import can_step

__all__ = ["CompiledNetwork"]


class CompiledNetwork:
    """A lowered module that computes steps without gradients, as far as possible by the C++ library.

    The first call decides which modules run together as one program; others, and all where an entry has another shape
    or where something follows what torch does, run as :func:`~recurl.lowering.link` says. Random numbers are drawn from
    torch's generator as there. Results equal those of the modules to rounding, about 1e-6 of their norm in float32.
    Weights are read where they lie: edits in place count at once; a weight or module that is replaced counts in the
    next ``CompiledNetwork``, so create one for each batch.

    Args:
        module: a module that :func:`~recurl.lowering.link` supports.

    Raises:
        UsageError: it does not.

    Example:
        >>> from torch import nn
        >>> net = TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), ["observation"], ["features"])
        >>> network = CompiledNetwork(net)
        >>> with torch.no_grad():
        ...     network(Entries({"observation": torch.zeros(5, 3)}, torch.Size([5])))["features"].shape
        torch.Size([5, 4])
    """

    def __init__(self, module: TensorDictModuleBase) -> None:
        found = link(module)
        if isinstance(found, str):
            raise UsageError(f"A module can be compiled only where it can be lowered, and {found}.")
        self._whole = found
        self._leaves, self._selection = _taken_apart(module)
        self._parts: list[Link] = []
        self._direct = self._selection is None
        self._reason: str | None = None
        self._dtype = next((tensor.dtype for tensor in module.parameters()), torch.float32)

    def why_not_compiled(self) -> str | None:
        """Return, after a call, the reason why not all of it was one call of the library, or None."""
        return self._reason

    def __call__(self, entries: Entries) -> Entries:
        """Run the module on ``entries`` and return it."""
        if not self._parts and not can_step():
            self._reason = missing() or "autograd, or something else that follows torch's operations, is in force"
            self._whole(entries)
            return entries
        inside = entries if self._direct else entries.copy()
        if self._parts:
            for part in self._parts:
                part(inside)
        else:
            self._divide(inside)
        if inside is not entries:
            assert self._selection is not None
            for key in self._selection.kept(entries):
                entries.set(key, inside[key])
            self._direct = type(self._parts[0]) is _Program and len(self._parts) == 1
        return entries

    def _divide(self, entries: Entries) -> None:
        """Run the modules one after another, and keep how."""
        self._reason, done = None, 0
        while done < len(self._leaves):
            program = self._program(self._leaves[done:], entries)
            part = cast(Link, link(self._leaves[done])) if program is None else program
            part(entries)
            self._parts.append(part)
            done += 1 if program is None else len(program.modules)

    def _program(self, modules: Sequence[TensorDictModuleBase], entries: Entries) -> _Program | None:
        """Return a program of as many of ``modules`` as can run together from the first on, or None."""
        with set_recurrent_mode(False):
            found, reason = self._compiled(modules, entries, [])
            if reason is None:
                return found
            self._reason = self._reason or reason
            count = 0 if found is None else len(found.modules)
            return self._compiled(modules[:count], entries, modules[count:])[0] if count else None

    def _compiled(
        self, modules: Sequence[TensorDictModuleBase], entries: Entries, later: Sequence[TensorDictModuleBase]
    ) -> tuple[_Program | None, str | None]:
        """Return a program of the first of ``modules``, and why the next one isn't part of it."""
        wanted = _ANY if self._selection is None else {*self._selection.kept(entries), *_read_by(later)}
        done, reason = 0, None
        try:
            compilation = Compilation(entries, self._dtype, wanted)
            for module in modules:
                _add(compilation, module)
                done += 1
        except NotCompiled as why:
            reason = str(why)
        return (_Program(compilation, modules[:done], entries.batch_size) if done else None), reason


class _Any:
    def __contains__(self, _: object) -> bool:
        return True


_ANY = _Any()


class _Selection(NamedTuple):
    """Outputs that a sequence keeps, and further ones of its modules."""

    selected: list[NestedKey]
    others: list[NestedKey]

    def kept(self, entries: Entries) -> list[NestedKey]:
        """Return the keys that the sequence writes into ``entries``: others only if they are there before."""
        return [*self.selected, *(key for key in self.others if key in entries)]


def _taken_apart(module: TensorDictModuleBase) -> tuple[list[TensorDictModuleBase], _Selection | None]:
    """Return the modules that run in order, and what is kept of their outputs; None for all."""
    if not isinstance(module, TensorDictSequential) or not returns_other_entries(module):
        return modules_in_order(module), None
    children = children_in_order(module)
    if isinstance(children, str):
        return [module], None
    selected = [normalize_key(key) for key in module.out_keys]
    others = [key for key in map(normalize_key, module.out_keys_source) if key not in selected]
    return [leaf for child in children for leaf in modules_in_order(child)], _Selection(selected, others)


def _read_by(modules: Sequence[TensorDictModuleBase]) -> set[NestedKey]:
    return {normalize_key(key) for module in modules for key in module.in_keys}


def _add(compilation: Compilation, module: TensorDictModuleBase) -> None:
    """Write the step of a module into a program."""
    found = link(module)
    if isinstance(found, str):
        raise NotCompiled(found)
    if defines_both(type(module), "compile_entries", "link_entries" if hasattr(module, "link_entries") else "forward"):
        with unsupported():
            cast(Compilable, module).compile_entries(compilation)
    elif isinstance(module, TensorDictModule):
        outputs = compilation.apply(module.module, *(compilation.read(normalize_key(key)) for key in module.in_keys))
        if len(outputs) != len(module.out_keys):
            raise NotCompiled(f"a network returns {len(outputs)} tensors for {len(module.out_keys)} keys")
        for key, signal in zip(module.out_keys, outputs, strict=True):
            compilation.write(normalize_key(key), signal)
    else:
        raise NotCompiled(f"{type(module).__name__} has no form in C++")


class _Program:
    """Modules that run as one call of the library."""

    __slots__ = ("_kept", "_link", "_places", "_program", "_reads", "_rows", "_writes", "modules")

    def __init__(
        self, compilation: Compilation, modules: Sequence[TensorDictModuleBase], batch_size: torch.Size
    ) -> None:
        self.modules = tuple(modules)
        self._program = compilation.finish()
        self._link = [cast(Link, link(module)) for module in modules]
        self._rows = batch_size.numel()
        places = [0] * (2 * (len(compilation.reads) + len(compilation.writes)))
        for outside in (*compilation.reads, *compilation.writes):
            places[2 * outside.slot + 1] = outside.shape[len(batch_size) :].numel()
        self._places = places
        self._reads = [(2 * read.slot, read.key, read.shape, read.dtype) for read in compilation.reads]
        self._writes = [
            (2 * write.slot, write.key, tuple(write.shape), write.dtype, write.fill) for write in compilation.writes
        ]

    def __call__(self, entries: Entries) -> None:
        if not self._ran(entries):
            for run in self._link:
                run(entries)

    def _ran(self, entries: Entries) -> bool:
        """Run the program on ``entries`` if they are those it is made for; return whether it could."""
        if not can_step():
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
        for slot, key, shape, dtype, fill in self._writes:
            value = torch.empty(shape, dtype=dtype)
            places[slot] = (value if fill is None else fill(value)).data_ptr()
            written.append((key, value))
        if not self._program(places, self._rows):
            return False
        for key, value in written:
            if key is not None:
                entries.set(key, value)
        return True
