"""The contract of a cell: parameters, states, one step; and what it may add to be fast."""

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

from recurl.errors import ArgumentError, ArgumentTypeError
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
    """A recurrent cell. A subclass defines :meth:`parameters` and :meth:`step`, in operations of torch.

    Everything else is derived from these two: whole sequences, resets, gradients, batching. A row of a step must not
    depend on the other rows. Attributes that a cell is constructed with, but for the defaults of a dataclass, are part
    of its ``name``: give them numbers, texts or tuples of these, for the name to be the same in every process.

    Attributes:
        state_names: names of the states.
        parameter_names: names of the parameters, as :meth:`step` names them.
        projects: whether the cell has a projected output, of ``proj_size`` units.
        child_name: name of the network inside a module, which begins the names of its parameters.
        features_are_first_state: whether the features of a step are its first state, so that kernels return no more
            than the states.
        takes_time: whether :meth:`step` has the keyword ``time``, a :class:`~recurl.recurrence.Time`, and reaches back
            in time through it alone. Then every backend that has linear recurrences runs whole sequences by it.
        decays: a promise that what the step gives ``time`` as ``a`` has no modulus over 1.
        derivatives: hand-written derivatives, for cells made of gates; else autograd differentiates the step.
        loop: pointwise kernels for the backend ``loop``, for cells made of gates.

    A subclass with a :meth:`step` of its own inherits none of the last three, nor :meth:`fused_step` and :meth:`pack`.

    Example:
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
    takes_time: ClassVar[bool] = False
    decays: ClassVar[bool] = False
    derivatives: ClassVar[Derivatives | None] = None
    loop: ClassVar[LoopKernel | None] = None
    _base_name: ClassVar[str]
    _slots: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        path = f"{cls.__module__}:{cls.__qualname__}"
        known = None if name is None else _classes.get(name)
        if known is not None and path != f"{known.__module__}:{known.__qualname__}":
            raise ArgumentError(
                f"There is a cell called {name!r}, {known.__module__}:{known.__qualname__}: rename one."
            )
        cls._base_name = name or _unused(path)
        _classes[cls._base_name] = cls
        cls._slots = (*cls._slots, *(slot for slot in vars(cls).get("__slots__", ()) if not slot.startswith("__")))
        if "step" in vars(cls):
            cls.parameter_names = tuple(_parameters_of(cls.step))
            cls.takes_time = "time" in inspect.signature(cls.step).parameters
            for shortcut in ("fused_step", "pack", "features_are_first_state", "derivatives", "loop"):
                if shortcut not in vars(cls):
                    setattr(cls, shortcut, getattr(Cell, shortcut))

    @property
    def name(self) -> str:
        """What tells the cell from all others: a built-in one's name or ``module:Class``, and how it was made."""
        plain = not torch.compiler.is_compiling() and not vars(self) and not self._slots
        return self._base_name if plain else self._full_name()

    @property
    def attributes(self) -> dict[str, Any]:
        """What the cell was constructed with, by name."""
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
        """Return the shapes of the parameters of one layer, by name; without biases where ``sizes.bias`` is false."""

    @abstractmethod
    def step(self, x: Tensor, states: States, *weights: Any, **time: Any) -> tuple[Tensor, States]:
        """Return the features ``[B, P or H]`` and the states after one step.

        Args:
            x: input ``[B, I]``.
            states: states before the step, each ``[B, *shape]``.
            *weights: the parameters; a subclass names them, in any order, with a default of None for those that
                :meth:`parameters` may leave out.
            **time: ``time`` alone, if the subclass names it as a keyword, with a default of ``ONE_STEP``.
        """

    def fused_step(self, x: Tensor, states: States, *weights: Any) -> tuple[Tensor, States]:
        """Return what :meth:`step` returns, by a quicker way if there is one."""
        return self.step(x, states, *weights)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state of one row; ``(H,)`` by default."""
        return tuple((sizes.hidden_size,) for _ in self.state_names)

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Fill a parameter; from U(-1/sqrt(H), 1/sqrt(H)) by default."""
        bound = 1.0 / math.sqrt(sizes.hidden_size)
        nn.init.uniform_(parameter, -bound, bound)

    def initialize_for_training(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Fill a parameter as the trainers want it; as :meth:`initialize` does by default."""
        self.initialize(name, parameter, sizes)

    def initialize_layer(self, parameters: Mapping[str, Tensor], sizes: Sizes, *, for_training: bool = False) -> None:
        """Fill all parameters of one layer in one direction, given by name; one after the other by default."""
        fill = self.initialize_for_training if for_training else self.initialize
        for name, parameter in parameters.items():
            fill(name, parameter, sizes)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Return the parameters of one layer, or anything that there is one of for each, as :meth:`step` takes them."""
        return tuple(tensors)

    def __repr__(self) -> str:
        return self.name


def _unused(path: str) -> str:
    """Return ``path``, numbered where a class of that path is alive: one that is defined again is another cell."""
    numbered = (f"{path}#{number}" if number > 1 else path for number in count(1))
    return next(name for name in numbered if name not in _classes)


def _is_plain(value: object) -> bool:
    """Whether the ``repr`` of a value tells it from all others."""
    if isinstance(value, tuple):
        return all(map(_is_plain, cast(tuple[object, ...], value)))
    return value is None or isinstance(value, int | float | str | torch.dtype) or is_dataclass(value)


def _identity(value: object) -> str:
    return "" if _is_plain(value) else f" at {id(value):#x}"


def _parameters_of(step: Any) -> list[str]:
    """Names of the weights in the signature of a step, after (self, x, states)."""
    weights = list(inspect.signature(step).parameters.values())[3:]
    return [weight.name for weight in weights if weight.kind is weight.POSITIONAL_OR_KEYWORD]


def check_parameters(cell: Cell, shapes: Mapping[str, Shape]) -> None:
    """Refuse shapes of parameters that don't fit the cell's step.

    Raises:
        ArgumentError: a parameter isn't among the arguments of ``step``, one of these has no shape, there is none, or a
            shape isn't one.
    """
    given = inspect.signature(type(cell).step).parameters
    needed = [name for name in cell.parameter_names if given[name].default is inspect.Parameter.empty]
    if not shapes or not set(needed) <= shapes.keys() <= set(cell.parameter_names):
        raise ArgumentError(
            f"{cell}.parameters() must give shapes for what step() takes after x and states, "
            f"({', '.join(cell.parameter_names)}), and at least one; got {', '.join(shapes) or 'none'}."
        )
    for name, shape in shapes.items():
        if not _is_shape(shape):
            raise ArgumentError(
                f"{cell}.parameters() must give shapes as tuples of integers, not negative; got {shape} for {name!r}."
            )


def states_of(cell: Cell, sizes: Sizes) -> tuple[Shape, ...]:
    """Return the shapes of the cell's states.

    Raises:
        ArgumentError: there is no state, two have one name, or the cell doesn't give one shape for each.
    """
    names: Any = cell.state_names
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"The states of {cell} must have different names, at least one, as a tuple; got state_names = {names!r}."
        )
    shapes: Any = cell.state_shapes(sizes)
    if not isinstance(shapes, tuple) or len(shapes) != len(names) or not all(map(_is_shape, shapes)):
        raise ArgumentError(
            f"{cell}.state_shapes() must return one shape for each of state_names, ({', '.join(names)}), as a tuple of "
            f"tuples of integers, not negative; got {shapes}."
        )
    return shapes


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(size, int) and size >= 0 for size in cast(tuple[Any, ...], value)
    )


def cell_of(value: Cell | type[Cell]) -> Cell:
    """Return ``value``, or one of its instances if it is a class.

    Raises:
        ArgumentTypeError: ``value`` is no cell; the message says what is missing.
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
    """Let :func:`cell_named` find ``cell``, however it was made."""
    if cell.attributes:
        _with_options[cell.name] = cell


def cell_named(name: str) -> Cell:
    """Return the cell with this ``name``, as operators know it.

    Raises:
        ArgumentError: there is none in this process.
    """
    if name in _with_options:
        return _with_options[name]
    if name not in _classes:
        raise ArgumentError(
            f"The cell {name!r} isn't known in this process: import its module, and if it was made with arguments make "
            "the module that uses it, before a program that holds it runs."
        )
    return cell_of(_classes[name])
