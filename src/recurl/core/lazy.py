"""Names of packages imported on first access, with advice for those of TorchRL that recurl does not provide."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(module: str, homes: Mapping[str, str] | None = None) -> None:
    """Let a module resolve names on first access, by defining its ``__getattr__`` and ``__dir__``.

    A package also resolves the names of its modules. A name of :data:`~recurl.core.torchrl_names.ABSENT` raises with
    the advice there: ``from module import name`` raises :class:`MissingNameError`, an ``ImportError``; any other
    access, such as ``module.name`` or ``hasattr``, raises :class:`MissingAttributeError`, an ``AttributeError``.

    Args:
        module: the module's ``__name__``.
        homes: names, separated by spaces, by the module that defines them; one of the same package begins with a dot.
            ``former=name`` adds the name of an earlier version.

    Example:
        >>> from recurl import objectives
        >>> objectives.TargetNetUpdater
        Traceback (most recent call last):
        recurl.core.errors.MissingAttributeError: recurl.objectives has no TargetNetUpdater: write SoftUpdate or ...
    """
    namespace = vars(sys.modules[module])
    found = [(home, *word.partition("=")) for home, words in (homes or {}).items() for word in words.split()]
    sources = {name: (home, attribute or name) for home, name, _, attribute in found}

    def find(name: str) -> Any:
        if name in sources:
            home, attribute = sources[name]
            namespace[name] = value = getattr(import_module(home, module), attribute)
            return value
        # An import statement would replace an AttributeError by an ImportError with a generic message.
        frame = inspect.currentframe()
        return _import_module_of(module, name, frame and frame.f_back)

    namespace["__getattr__"] = find
    if sources:
        namespace["__dir__"] = lambda: sorted({*namespace, *sources})


def _import_module_of(package: str, name: str, frame: FrameType | None) -> ModuleType:
    """Import ``package.name``; ``frame`` accesses it.

    Raises:
        MissingNameError: ``frame`` imports a name of TorchRL.
        MissingAttributeError: it accesses one.
        AttributeError: there is no such module.
    """
    if not name.startswith("__"):
        if hasattr(sys.modules[package], "__path__") and find_spec(f"{package}.{name}") is not None:
            try:
                return import_module(f"{package}.{name}")
            except import_module("recurl.core.errors").MissingNameError as error:  # a module of TorchRL
                raise import_module("recurl.core.errors").MissingAttributeError(str(error)) from None
        advice = import_module("recurl.core.torchrl_names").ABSENT.get(package, {})
        if name in advice:
            errors = import_module("recurl.core.errors")
            imports = import_module("recurl.core.python_compat").is_import_statement(frame)
            kind = errors.MissingNameError if imports else errors.MissingAttributeError
            raise kind(f"{package} has no {name}: {advice[name]}.")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
