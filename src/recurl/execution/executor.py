"""The executor: methods run in the fastest form that is registered for them.

A loss, an estimator or an optimizer step has one definition, in torch. Faster forms of its methods are entries of a
table, from outside: :data:`FORMS` for those of recurl, :func:`register` for others. A form fails by raising
:class:`~recurl.execution.explain.NotCompiled`, before it has changed anything, and the next one runs. One whose
compiler failed isn't tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.execution.explain import CompilerFailed, Explanation, NotCompiled

__all__ = ["FORMS", "Backend", "Executable", "Form", "compile", "register"]

Backend: TypeAlias = Literal["auto", "eager", "inductor"]
Function: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=Function)


class Form(NamedTuple):
    """A faster form of a method.

    Attributes:
        name: name of the form, such as ``"cpp"``.
        build: function, or ``"module:name"`` of one, that returns the form of a bound method.
        parts: methods whose behavior the form reproduces: it doesn't serve a subclass or object that overrides one.
        package: package that must be installed, if any.
        owner: the class that it serves, with its subclasses; filled in by :func:`register`, or when it is found in the
            table.
    """

    name: str
    build: Function | str
    parts: tuple[str, ...] = ()
    package: str | None = None
    owner: type = object


_LOSS = ("gradients", "tensors", "losses")
_PPO = ("losses_of", "read", "_estimated", "_evaluate", "_ratio_metrics")
FORMS: dict[str, list[Form]] = {
    "recurl.objectives.ppo:ClipPPOLoss.gradients": [
        Form("fused", "recurl.objectives.compiled_ppo:CompiledPPO", (*_LOSS, *_PPO))
    ],
    "recurl.objectives.policy_gradient:PolicyGradientLoss.gradients": [
        Form("cpp", "recurl.objectives.compiled_policy:compiled_networks", _LOSS)
    ],
    "recurl.objectives.common:LossModule.gradients": [
        Form("inductor", "recurl.execution.inductor:InductorGradients", ("gradients",))
    ],
    "recurl.objectives.value.estimator:ValueEstimator.results": [
        Form("inductor", "recurl.execution.inductor:InductorResults")
    ],
    "recurl.trainers.optim.gradient_step:GradientStep.reference_step": [
        Form("cpp", "recurl.trainers.optim.cpp_adam:CpuAdam", ("reference_step",)),
        Form("triton", "recurl.trainers.optim.triton_adam:FlatAdam", ("reference_step",), "triton"),
    ],
}
"""Forms of recurl's methods, fastest first, by ``"module:Class.method"``."""


def register(cls: type, method: str, form: Form) -> None:
    """Add a faster form of a method, which is tried before those that exist.

    Args:
        cls: class that defines the method; its subclasses are served too.
        method: name of the method.
        form: the form; it replaces a form of the same method and name.

    Example:
        >>> from recurl.execution import Form
        >>> class Doubling:
        ...     def run(self, x):
        ...         return x + x
        >>> register(Doubling, "run", Form("shifted", lambda run: lambda x: x << 1))
        >>> run = compile(Doubling().run)
        >>> run(3), str(run.explain())
        (6, 'run: shifted')
    """
    known = FORMS.setdefault(f"{cls.__module__}:{cls.__qualname__}.{method}", [])
    known[:] = [form._replace(owner=cls), *(other for other in known if other.name != form.name)]


class Executable:
    """A method in its fastest form. Create one for each update: later edits of the object's modules aren't seen.

    Args:
        function: the bound method.
        forms: its faster forms, fastest first.
        otherwise: backend with which the method is compiled for a call that none of them serves.
    """

    def __init__(self, function: Function, forms: list[Form], otherwise: Backend = "eager") -> None:
        self._function = function
        self._forms = forms
        self._otherwise: Backend = otherwise
        self._other: Executable | None = None  # the one that served the last call, if any
        self._built: dict[Form, Function] = {}
        self._reasons = {form: _overridden(function, form) for form in forms}
        self._failed = {form for form, reason in self._reasons.items() if reason is not None}

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the method."""
        for form in self._forms:
            if form not in self._failed:
                try:
                    result = self._run(form, *args, **named)
                except NotCompiled as reason:
                    self._reasons[form] = str(reason)
                    if isinstance(reason, CompilerFailed):
                        self._failed.add(form)
                else:
                    self._reasons[form], self._other = None, None
                    return result
        if self._otherwise == "eager":
            return self._function(*args, **named)
        self._other = cast(Executable, compile(self._function, backend=self._otherwise))  # sees edited modules
        return self._other(*args, **named)

    def _run(self, form: Form, *args: Any, **named: Any) -> Any:
        if form not in self._built:
            try:
                if form.package is not None and find_spec(form.package) is None:
                    raise NotCompiled(f"{form.package} isn't installed")
                self._built[form] = _loaded(form.build)(self._function)
            except NotCompiled:
                self._failed.add(form)
                raise
        return self._built[form](*args, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and save the method and the table; what was built stays with this object."""
        return Executable, (self._function, self._forms, self._otherwise)

    def explain(self) -> Explanation:
        """Explain in which form the last call ran, or the next one will be tried."""
        what = getattr(self._function, "__name__", type(self._function).__name__)
        names = [form.name for form in self._forms]
        found = {
            form.name if names.count(form.name) == 1 else f"{form.name} of {form.owner.__name__}": reason
            for form, reason in self._reasons.items()
        }
        return Explanation(what, found if self._other is None else {**found, **self._other.explain()}, "eager")


def compile(function: _F, *, backend: Backend = "auto") -> _F:  # noqa: A001 - the name of torch.compile
    """Return a bound method in the fastest form that is registered for it.

    Args:
        function: the method, such as ``loss.gradients`` or ``estimator.results``.
        backend: ``"auto"`` for recurl's C++ library where it can serve, ``"inductor"`` for torch's compiler, and as
            ``"auto"`` where that fails, or ``"eager"`` for the method itself.

    Returns:
        An :class:`Executable` with the signature of the method. Its results are equal up to rounding. Gradients of
        parameters that it sets may be overwritten by its next call: clone those that are kept.

    Raises:
        ArgumentError: the backend is unknown, or the method has no form for it.
        ArgumentTypeError: the function can't be called.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from recurl.modules import MLP, QValueActor
        >>> from recurl.objectives import DQNLoss
        >>> loss = DQNLoss(QValueActor(MLP(3, 2), action_space="categorical"))
        >>> print(compile(loss.gradients).explain())
        gradients: eager
    """
    if backend not in ("auto", "eager", "inductor"):
        raise ArgumentError(f"backend must be 'auto', 'inductor' or 'eager', got {backend!r}.")
    if not callable(function):
        raise ArgumentTypeError(f"compile takes a method, such as loss.gradients, got {function!r}.")
    forms = [] if backend == "eager" else list(_forms_of(function, inductor=backend == "inductor"))
    if backend == "inductor" and not forms:
        raise ArgumentError(f"{function!r} has no form for Inductor: a loss's gradients and an estimator's results do.")
    return cast(_F, Executable(function, forms, "auto" if backend == "inductor" else "eager"))


def _forms_of(function: Function, *, inductor: bool) -> Iterator[Form]:
    for cls in type(getattr(function, "__self__", None)).__mro__:
        for form in FORMS.get(f"{cls.__module__}:{cls.__qualname__}.{getattr(function, '__name__', '')}", ()):
            # a class of the same name may have been defined since
            if (form.name == "inductor") is inductor and form.owner in (object, cls):
                yield form._replace(owner=cls)


def _overridden(function: Function, form: Form) -> str | None:
    """Return which of the parts of a form is overridden, as text, or None if it serves the method."""
    owner: Any = function.__self__  # type: ignore[attr-defined] - a bound method
    for name in form.parts:
        if name in vars(owner) or getattr(type(owner), name) is not getattr(form.owner, name):
            return f"{type(owner).__name__} overrides {name}"
    return None


@cache
def _imported(name: str) -> Function:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _loaded(build: Function | str) -> Function:
    return _imported(build) if isinstance(build, str) else build
