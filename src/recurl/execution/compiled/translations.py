"""Tables of C++ forms. Modules and distributions are defined in torch; their C++ forms are registered here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["DENSITIES", "TRANSLATIONS", "register_density", "register_translation"]

_HOMES = {
    "torch.": "recurl.execution.compiled.layers",
    "torch.nn.modules.module.": "recurl.execution.compiled.plain_forward",
    "recurl.modules.": "recurl.modules.cpp_forms",
    "recurl.trainers.networks.": "recurl.trainers.networks.cpp_forms",
}
"""Modules that register the forms of the classes of a package, imported when one of these is looked up."""
_LEFT_OUT = {"__getattribute__", "__init__", "__new__"}


class _Form(NamedTuple):
    function: Callable[..., Any]
    depends: tuple[str, ...]


class _Table(dict[type, _Form]):
    """C++ forms by class."""

    def __init__(self) -> None:
        super().__init__()
        self._found: WeakKeyDictionary[type, _Form | None] = WeakKeyDictionary()

    def __setitem__(self, cls: type, form: _Form) -> None:
        super().__setitem__(cls, form)
        self._found.clear()

    def find(self, of: object) -> Callable[..., Any] | None:
        """Return the form of a class, or of the class of an object; None if there is none.

        A form applies to subclasses unless they, or the object itself, override an attribute that it depends on.
        """
        cls, own = (of, {}) if isinstance(of, type) else (type(of), vars(of))
        if cls not in self._found:
            self._found[cls] = self._search(cls)
        form = self._found[cls]
        return None if form is None or not own.keys().isdisjoint(form.depends) else form.function

    def _search(self, cls: type) -> _Form | None:
        for package, home in _HOMES.items():
            if any(f"{owner.__module__}.".startswith(package) for owner in cls.__mro__):
                import_module(home)
        for owner in cls.__mro__:
            form = self.get(owner)
            if form is not None and all(_defined(cls, name) is _defined(owner, name) for name in form.depends):
                return form
        return None


def _defined(cls: type, name: str) -> object:
    """Return an attribute of a class as written in it or a base class, without binding."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


TRANSLATIONS, DENSITIES = _Table(), _Table()


def register_translation(
    cls: type, translate: Callable[..., Any], *, depends: Sequence[str] | None = ("forward",)
) -> None:
    """Register the C++ form of a module or a distribution.

    Args:
        cls: its class. The form also serves subclasses, unless they override an attribute in ``depends``.
        translate: function that adds the computation of ``forward`` to a program, or raises
            :class:`~recurl.execution.compiled.NotCompiled`. For a module of tensors, it is called with a
            :class:`~recurl.execution.compiled.Compilation`, the module and a
            :class:`~recurl.execution.compiled.Signal` for each input, and returns a ``Signal`` or a tuple of them. For
            a TensorDict module, it is called with the ``Compilation`` and the module, and reads and writes entries.
            For a distribution, see :class:`~recurl.modules.cpp_forms.Draw`.
        depends: names of the attributes of the class that the result depends on; None for all.

    Example:
        >>> from torch import nn
        >>> from recurl.execution.compiled import Compilation, CompiledNetwork, Signal
        >>> class Halves(nn.Module):
        ...     def forward(self, x):
        ...         return x.chunk(2, -1)
        >>> def halves(program: Compilation, module: Halves, x: Signal) -> tuple[Signal, Signal]:
        ...     columns = (program.numbers(x).value.columns + 1) // 2
        ...     return x.part(0, columns), x.part(columns, x.value.columns - columns)
        >>> register_translation(Halves, halves)
    """
    TRANSLATIONS[cls] = _Form(translate, _names(cls, depends))


def register_density(cls: type, density: Callable[..., Any], *, depends: Sequence[str] | None) -> None:
    """Register the density that the C++ library evaluates for a sampler or a distribution.

    Args:
        cls: its class.
        density: function that returns a :class:`~recurl.execution.compiled.Density`, or raises
            :class:`~recurl.execution.compiled.NotCompiled`. It is called with a sampler; or for a distribution as in
            :class:`~recurl.modules.cpp_forms.Draw`.
        depends: see :func:`register_translation`.
    """
    DENSITIES[cls] = _Form(density, _names(cls, depends))


def _names(cls: type, depends: Sequence[str] | None) -> tuple[str, ...]:
    if depends is not None:
        of_all = ("__call__", "__getattr__", "__getattribute__") if issubclass(cls, nn.Module) else ()
        return (*depends, *of_all)
    return tuple(name for name in dir(cls) if name in _LEFT_OUT or not name.startswith("__"))
