"""Base class of recurrent cells: parameters, states, one step, and optional fast paths."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import count
from typing import Any, ClassVar, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.torch_compat import is_compiling
from recurl.recurrence.cells.by_hand import Derivatives, LoopKernel, States

Shape: TypeAlias = tuple[int, ...]
Weights: TypeAlias = Sequence[Tensor | None]
"""Parameters of one layer in one direction, in the order of the cell's ``parameter_names``; None where absent."""

_classes: WeakValueDictionary[str, type[Cell]] = WeakValueDictionary()
_with_options: dict[str, Cell] = {}
_ABSENT = object()


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer in one direction.

    Attributes:
        input_size: I, width of the input.
        hidden_size: H.
        bias: whether there are biases.
        proj_size: P, width of the projected output; 0 without projection.
    """

    input_size: int
    hidden_size: int
    bias: bool = True
    proj_size: int = 0

    @property
    def output_size(self) -> int:
        """P with projection, else H: the width of the features."""
        return self.proj_size or self.hidden_size


class Cell(ABC):
    """Base class of recurrent cells. A subclass defines :meth:`parameters` and :meth:`step` with torch operations.

    Sequences, resets, gradients and batching are all derived from these two methods. A row of a step must not depend on
    the other rows. The attributes of an instance, except values equal to class defaults as in a dataclass, are part of
    its ``name``. Use numbers, strings or tuples of these, so that the name is the same in every process.

    Attributes:
        state_names: names of the states.
        parameter_names: names of the parameters, taken from the signature of :meth:`step`.
        projects: whether the cell supports an output projection to ``proj_size`` units.
        child_name: name of the network inside a module, used as a prefix of its parameter names.
        features_are_first_state: whether the features of a step are its first state, so that kernels return only the
            states.
        states_at_ends: names of the states that runs over sequences return at the last token of each segment only, with
            zeros elsewhere, since they are too large for one per token.
        read_at_starts: names of the states that :meth:`step` passes to ``time.remember`` or ``time.attend`` and doesn't
            use otherwise, so that a batch may have them for every S-th token only, ``[N / S, *shape]``.
        takes_time: whether :meth:`step` has the keyword ``time``, a :class:`~recurl.recurrence.Time`, and accesses past
            steps only through it. Every backend that supports linear recurrences can then run whole sequences.
        decays: declares that no coefficient ``a`` passed to ``time`` has a modulus over 1.
        derivatives: hand-written derivatives of a gated cell; if None, autograd differentiates the step.
        loop: pointwise kernels of a gated cell for the ``loop`` backend.

    A subclass that overrides :meth:`step` doesn't inherit ``features_are_first_state``, ``read_at_starts``,
    ``derivatives``, ``loop``, :meth:`fused_step` or :meth:`pack`.

    Example:
        >>> from recurl.recurrence import Sizes
        >>> class Sum(Cell):
        ...     def parameters(self, sizes):
        ...         return {"weight": (sizes.hidden_size, sizes.input_size)}
        ...
        ...     def step(self, x, states, weight):
        ...         h = states[0] + x @ weight.t()
        ...         return h, (h,)
        >>> Sum().parameter_names, Sum().state_shapes(Sizes(2, 3))
        (('weight',), ((3,),))
    """

    state_names: ClassVar[tuple[str, ...]] = ("h",)
    parameter_names: ClassVar[tuple[str, ...]] = ()
    projects: ClassVar[bool] = False
    child_name: ClassVar[str] = "cell"
    features_are_first_state: ClassVar[bool] = False
    states_at_ends: ClassVar[tuple[str, ...]] = ()
    read_at_starts: ClassVar[tuple[str, ...]] = ()
    takes_time: ClassVar[bool] = False
    decays: ClassVar[bool] = False
    derivatives: ClassVar[Derivatives | None] = None
    loop: ClassVar[LoopKernel | None] = None
    _base_name: ClassVar[str]
    _slots: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        path = f"{cls.__module__}:{cls.__qualname__}"
        if name is not None and not path.startswith("recurl."):
            _built_in(name)
        known = None if name is None else _classes.get(name)
        if known is not None and path != f"{known.__module__}:{known.__qualname__}":
            raise ArgumentError(
                f"There is a cell called {name!r}, {known.__module__}:{known.__qualname__}: rename one."
            )
        cls._base_name = name or _unused_name(path)
        _classes[cls._base_name] = cls
        cls._slots = (*cls._slots, *(slot for slot in vars(cls).get("__slots__", ()) if not slot.startswith("__")))
        if "step" in vars(cls):
            cls.parameter_names = tuple(_parameters_of(cls.step))
            cls.takes_time = "time" in inspect.signature(cls.step).parameters
            for shortcut in ("fused_step", "pack", "features_are_first_state", "read_at_starts", "derivatives", "loop"):
                if shortcut not in vars(cls):
                    setattr(cls, shortcut, getattr(Cell, shortcut))

    @property
    def name(self) -> str:
        """Unique name of the cell: its built-in name or ``module:Class``, with its non-default attributes."""
        plain = not is_compiling() and not vars(self) and not self._slots
        return self._base_name if plain else self._full_name()

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the instance, by name."""
        return vars(self) | {slot: getattr(self, slot) for slot in self._slots if hasattr(self, slot)}

    @torch.compiler.assume_constant_result  # torch 2.11 can't trace vars()
    def _full_name(self) -> str:
        given = {key: value for key, value in self.attributes.items() if not self._is_default(key, value)}
        options = ", ".join(f"{key}={value!r}{_identity(value)}" for key, value in given.items())
        return f"{self._base_name}({options})" if options else self._base_name

    def _is_default(self, key: str, value: Any) -> bool:
        default = getattr(type(self), key, _ABSENT)
        return default is value or (_is_plain(value) and _is_plain(default) and default == value)

    @abstractmethod
    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer by name, without biases if ``sizes.bias`` is false."""

    @abstractmethod
    def step(self, x: Tensor, states: States, *weights: Any, **time: Any) -> tuple[Tensor, States]:
        """Return the features ``[B, P or H]`` and the states after one step.

        Args:
            x: input ``[B, I]``.
            states: states before the step, each ``[B, *shape]``.
            *weights: the parameters; a subclass names them, in any order, with a default of None for those that
                :meth:`parameters` may omit.
            **time: only ``time``, if the subclass declares it as a keyword with a default of ``ONE_STEP``.
        """

    def fused_step(self, x: Tensor, states: States, *weights: Any) -> tuple[Tensor, States]:
        """Return the result of :meth:`step`, using a faster implementation if there is one."""
        return self.step(x, states, *weights)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state of one row, ``(H,)`` by default."""
        return tuple((sizes.hidden_size,) for _ in self.state_names)

    def attention(self, hidden_size: int) -> tuple[int, int] | None:
        """Return D and E of ``time.attend``, if :meth:`step` calls it: backends that can't run it are refused."""
        return None

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize one parameter, by default from U(-1/sqrt(H), 1/sqrt(H))."""
        bound = 1.0 / math.sqrt(sizes.hidden_size)
        nn.init.uniform_(parameter, -bound, bound)

    def initialize_for_training(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize one parameter for the trainers, by default as :meth:`initialize` does."""
        self.initialize(name, parameter, sizes)

    def initialize_layer(self, parameters: Mapping[str, Tensor], sizes: Sizes, *, for_training: bool = False) -> None:
        """Initialize all parameters of one layer in one direction, given by name; by default one after another."""
        fill = self.initialize_for_training if for_training else self.initialize
        for name, parameter in parameters.items():
            fill(name, parameter, sizes)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Pack the parameters of one layer, or one value per parameter, in the form that :meth:`step` unpacks."""
        return tuple(tensors)

    def __repr__(self) -> str:
        return self.name


def _unused_name(path: str) -> str:
    """Return ``path``, numbered if a class with that path is alive, since a redefined class is a different cell."""
    numbered = (f"{path}#{number}" if number > 1 else path for number in count(1))
    return next(name for name in numbered if name not in _classes)


def _is_plain(value: object) -> bool:
    """Return whether the ``repr`` of a value identifies it."""
    if isinstance(value, tuple):
        return all(map(_is_plain, cast(tuple[object, ...], value)))
    return value is None or isinstance(value, int | float | str | torch.dtype) or is_dataclass(value)


def _identity(value: object) -> str:
    return "" if _is_plain(value) else f" at {id(value):#x}"


def _parameters_of(step: Any) -> list[str]:
    """Return the names of the weights in the signature of a step, after (self, x, states)."""
    weights = list(inspect.signature(step).parameters.values())[3:]
    return [weight.name for weight in weights if weight.kind is weight.POSITIONAL_OR_KEYWORD]


def check_parameters(cell: Cell, shapes: Mapping[str, Shape]) -> None:
    """Check that the shapes of the parameters match the signature of the cell's step.

    Raises:
        ArgumentError: a parameter isn't an argument of ``step``, a required argument has no shape, there are no
            parameters, or a shape is invalid.
    """
    given = inspect.signature(type(cell).step).parameters
    needed = [name for name in cell.parameter_names if given[name].default is inspect.Parameter.empty]
    if not shapes or not set(needed) <= shapes.keys() <= set(cell.parameter_names):
        raise ArgumentError(
            f"{cell}.parameters() must give shapes for the arguments of step() after x and states, "
            f"({', '.join(cell.parameter_names)}), and at least one; got {', '.join(shapes) or 'none'}."
        )
    for name, shape in shapes.items():
        if not _is_shape(shape):
            raise ArgumentError(
                f"{cell}.parameters() must give shapes as tuples of non-negative integers; got {shape} for {name!r}."
            )


def states_of(cell: Cell, sizes: Sizes) -> tuple[Shape, ...]:
    """Return the shapes of the cell's states.

    Raises:
        ArgumentError: there is no state, two states share a name, or the cell doesn't return one shape per state.
    """
    names: Any = cell.state_names
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"The states of {cell} must have distinct names in a non-empty tuple; got state_names = {names!r}."
        )
    shapes: Any = cell.state_shapes(sizes)
    if not isinstance(shapes, tuple) or len(shapes) != len(names) or not all(map(_is_shape, shapes)):
        raise ArgumentError(
            f"{cell}.state_shapes() must return one shape for each of state_names, ({', '.join(names)}), as a tuple of "
            f"tuples of non-negative integers; got {shapes}."
        )
    return shapes


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(size, int) and size >= 0 for size in cast(tuple[Any, ...], value)
    )


def cell_of(value: Cell | type[Cell]) -> Cell:
    """Return ``value`` if it is a cell, or an instance of it if it is a class.

    Raises:
        ArgumentTypeError: ``value`` is not a cell; the message states what is missing.
    """
    if isinstance(value, Cell):
        return value
    if not isinstance(value, type) or not issubclass(value, Cell):  # pyright: ignore[reportUnnecessaryIsInstance] - users
        raise ArgumentTypeError(
            f"A cell must be a subclass of recurl.recurrence.Cell, or an instance of one, with parameters() and "
            f"step(); got {value!r}{_missing(value)}."
        )
    if value.__abstractmethods__:
        raise ArgumentTypeError(
            f"The cell {value.__name__} must define {' and '.join(sorted(value.__abstractmethods__))}."
        )
    try:
        return value()
    except TypeError as error:
        raise ArgumentTypeError(f"The cell {value.__name__} needs arguments ({error}): pass an instance.") from error


def _missing(value: object) -> str:
    missing = [name for name in ("parameters", "step") if not callable(getattr(value, name, None))]
    return f", which has no {' and no '.join(missing)}" if missing else ", which doesn't derive from Cell"


def remember(cell: Cell) -> None:
    """Register ``cell`` for :func:`cell_named`, including its attributes."""
    if cell.attributes:
        _with_options[cell.name] = cell


def _built_in(name: str) -> Cell | None:
    """Return the built-in cell of this name, after importing it, or None."""
    from recurl.recurrence.cells.load import CELLS  # noqa: PLC0415 - it imports this module

    return CELLS.get(name)


def cell_named(name: str) -> Cell:
    """Return the cell with this ``name``, by which operators refer to it.

    Raises:
        ArgumentError: there is no such cell in this process.
    """
    if name in _with_options:
        return _with_options[name]
    if name not in _classes and _built_in(name) is None:
        raise ArgumentError(
            f"The cell {name!r} isn't known in this process: before running a program that contains it, import its "
            "module, and if the cell was created with arguments, create the module that uses it."
        )
    return cell_of(_classes[name])
