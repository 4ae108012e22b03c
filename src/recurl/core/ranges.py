"""Declaration and validation of the types and ranges of option dataclasses."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest

__all__ = [
    "AUTO",
    "AutoCount",
    "AutoFlag",
    "AutoNonNegativeInt",
    "Count",
    "Exponent",
    "Field",
    "Fraction",
    "NonNegative",
    "NonNegativeInt",
    "Number",
    "OpenUnit",
    "Positive",
    "PositiveFraction",
    "PositiveOrInf",
    "Range",
    "Seed",
    "SmallCount",
    "SmallNonNegativeInt",
    "Steps",
    "Threads",
    "check_fields",
    "checked_seed",
    "fields_of",
    "flag",
    "shown",
    "whole_number",
]

_SHOWN = 60


@dataclass(frozen=True)
class Range:
    """Interval of accepted numbers; NaN is never accepted.

    Args:
        low: lower end.
        high: upper end.
        above: exclude ``low`` itself.
        below: exclude ``high`` itself.
        infinite: also accept infinity, meaning "no bound".
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def rule(self, value: float) -> str | None:
        """Return a description of the condition that ``value`` violates, or None."""
        if isinstance(value, float) and not math.isfinite(value) and not (self.infinite and value == math.inf):
            return "must be a number, or inf for no bound" if self.infinite else "must be a finite number"
        excluded = (self.above and value == self.low) or (self.below and value == self.high)
        if self.low <= value <= self.high and not excluded:
            return None
        if self.high <= _NARROW:
            ends = ", both excluded" if self.above and self.below else ""
            return f"must lie between {self.low:g} and {self.high:g}{ends}"
        if value > self.high:
            return f"must be at most {self.high:,}"
        return "must not be negative" if self.low == 0 and not self.above else "must be positive"


_NARROW = 100  # for ranges that end here or below, messages state both ends
_LARGE = 2**31 - 1

Count: TypeAlias = Annotated[int, Range(1, _LARGE)]
SmallCount: TypeAlias = Annotated[int, Range(1, 100)]  # for objects that are created one by one
SmallNonNegativeInt: TypeAlias = Annotated[int, Range(0, 100)]  # for what is kept for every row
NonNegativeInt: TypeAlias = Annotated[int, Range(0, _LARGE)]
Steps: TypeAlias = Annotated[int, Range(1, 10**15)]
Threads: TypeAlias = Annotated[int, Range(1, 1024)]
Seed: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
Number: TypeAlias = Annotated[float, Range()]
Positive: TypeAlias = Annotated[float, Range(0, above=True)]
NonNegative: TypeAlias = Annotated[float, Range(0)]
PositiveOrInf: TypeAlias = Annotated[float, Range(0, above=True, infinite=True)]
"""Above 0; infinity means no bound."""
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
PositiveFraction: TypeAlias = Annotated[float, Range(0, 1, above=True)]
OpenUnit: TypeAlias = Annotated[float, Range(0, 1, above=True, below=True)]
Exponent: TypeAlias = Annotated[float, Range(0, 10)]

AUTO: Any = None
"""Default of an option that is replaced by a value when the options are complete."""
if TYPE_CHECKING:
    AutoCount: TypeAlias = int
    AutoNonNegativeInt: TypeAlias = int
    AutoFlag: TypeAlias = bool
else:
    AutoCount = Count | None
    AutoNonNegativeInt = NonNegativeInt | None
    AutoFlag = bool | None


@dataclass(frozen=True)
class Field:
    """One field of an option dataclass.

    Attributes:
        name: name of the field.
        kind: bool, int, float, str, Path, or another option dataclass.
        range: range of a number, or None.
        choices: allowed values of a ``Literal`` field; empty for others.
        optional: whether None is allowed.
        many: whether the field is a tuple of these values.
        default: default value; ``dataclasses.MISSING`` if there is none.
    """

    name: str
    kind: type
    range: Range | None
    choices: tuple[Any, ...]
    optional: bool
    many: bool
    default: Any

    def check(self, value: Any) -> None:
        """Check that the field accepts a value.

        Raises:
            ArgumentError: ``value`` is not accepted; the message names the command-line option.
        """
        if value is None and self.optional:
            return
        parts: Any = value if self.many else (value,)
        if not isinstance(parts, tuple):
            raise ArgumentError(f"{flag(self.name)} must be a tuple, got {shown(parts)}.")
        for part in parts:
            rule = self._rule(part)
            if rule is not None:
                near = nearest(str(part), map(str, self.choices)) if self.choices else ""
                raise ArgumentError(f"{flag(self.name)} {rule}, got {shown(part)}.{near}")

    def read(self, value: Any) -> Any:
        """Convert a value from the command line or an options file, in which integers may be text or floats.

        A value that can't be converted is returned unchanged, and :meth:`check` then rejects it.

        Example:
            >>> @dataclass
            ... class Options:
            ...     size: Count = 3
            ...     steps: tuple[Count, ...] = ()
            >>> size, steps = fields_of(Options)
            >>> size.read("10k"), size.read(1e6), size.read(2.5), steps.read(["2M", 3])
            (10000, 1000000, 2.5, (2000000, 3))
        """
        if self.many and isinstance(value, list | tuple):
            return tuple(self._read(part) for part in cast("list[Any]", value))
        return self._read(value)

    def _read(self, value: Any) -> Any:
        if self.kind is not int or self.choices or not isinstance(value, str | float):
            return value
        try:
            return whole_number(value)
        except ArgumentError:
            return value

    def _rule(self, value: Any) -> str | None:
        if self.choices:
            known = any(value == choice and type(value) is type(choice) for choice in self.choices)
            return None if known else f"must be one of {', '.join(map(str, self.choices))}"
        wanted, fits = _KINDS[self.kind]
        if not fits(value):
            return f"must be {wanted}"
        if self.range is None:
            return None
        return self.range.rule(_float(value) if self.kind is float else value)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int
        return math.inf


def _is_text(value: Any) -> bool:
    if not isinstance(value, str | Path):
        return False
    try:
        return b"\0" not in str(value).encode()
    except UnicodeEncodeError:
        return False


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    str: ("text in UTF-8", lambda value: isinstance(value, str) and _is_text(value)),
    Path: ("a path in UTF-8", _is_text),
}


@cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the fields of an option dataclass.

    Example:
        >>> @dataclass
        ... class Options:
        ...     size: Count = 3
        ...     rates: tuple[Fraction, ...] = ()
        >>> [(field.name, field.kind.__name__, field.many) for field in fields_of(Options)]
        [('size', 'int', False), ('rates', 'float', True)]
    """
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_field(field, hints[field.name]) for field in dataclasses.fields(kind))


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    optional = many = False
    found: Range | None = None
    choices: tuple[Any, ...] = ()
    while get_origin(hint) is not None:
        origin, arguments = get_origin(hint), get_args(hint)
        hint = next(argument for argument in arguments if argument is not NoneType)
        if origin is Annotated:
            found = next((extra for extra in arguments[1:] if isinstance(extra, Range)), found)
        elif origin is Literal:
            hint, choices = type(arguments[0]), arguments
        elif origin in (Union, UnionType):
            optional = NoneType in arguments
        else:
            many = origin is tuple
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Field(field.name, hint, found, choices, optional, many, default)


def check_fields(options: Any) -> None:
    """Check the values of all fields of an option dataclass.

    Raises:
        ArgumentError: a value is not accepted; the message names the command-line option.

    Example:
        >>> @dataclass
        ... class Options:
        ...     batch_size: Count = 3
        >>> check_fields(Options(0))
        Traceback (most recent call last):
        ...
        recurl.core.errors.ArgumentError: --batch-size must be positive, got 0.
    """
    for field in fields_of(type(options)):
        if not dataclasses.is_dataclass(field.kind):
            field.check(getattr(options, field.name))


def flag(name: str) -> str:
    """Return the command-line option of a field: ``"--batch-size"`` for ``"batch_size"``."""
    return "--" + name.replace("_", "-")


def whole_number(value: str | float) -> int:
    """Parse a whole number such as ``1e6``, ``10k``, ``2M``, ``1.5k`` or ``1_000_000``.

    Args:
        value: text, or a number (an options file may contain the float ``1e6``).

    Raises:
        ArgumentError: ``value`` is not a whole number.

    Example:
        >>> whole_number("1e6"), whole_number("10k"), whole_number("2M"), whole_number(1e3)
        (1000000, 10000, 2000000, 1000)
    """
    text = str(value).strip()
    try:
        return int(text)
    except ValueError:
        number = _decimal(text)
    if number is None or not number.is_finite() or abs(number.adjusted()) > _SHOWN or number != int(number):
        raise ArgumentError(f"must be a whole number, such as 5000, 10k, 2M or 1e6, got {shown(value)}")
    return int(number)


def _decimal(text: str) -> Decimal | None:
    factor = _SUFFIXES.get(text[-1:])
    try:
        return Decimal(text) if factor is None else Decimal(text[:-1]) * factor
    except InvalidOperation:
        return None


_SUFFIXES = {"k": 1_000, "K": 1_000, "M": 1_000_000}


def shown(value: Any) -> str:
    """Format a value for a message, truncated if it is long.

    Example:
        >>> shown("lstm"), shown(10**5000), len(shown("x" * 1000))
        ("'lstm'", 'a number of more than 60 digits', 63)
    """
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:  # Python may reject printing it, or take very long
        return "a number of more than 60 digits"
    text = str(value) if isinstance(value, int | float) else repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def checked_seed(seed: Any) -> int:
    """Validate ``seed`` and return it as an integer.

    Raises:
        ArgumentError: ``seed`` is negative or not an integer.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(f"A seed must be a non-negative integer, got {seed!r}.")
    return number
