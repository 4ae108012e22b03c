import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from recurl.core.errors import ArgumentError
from recurl.core.ranges import (
    Count,
    Fraction,
    NonNegativeInt,
    Number,
    OpenUnit,
    Positive,
    PositiveOrInf,
    Seed,
    check_fields,
    fields_of,
    whole_number,
)


@dataclass(frozen=True)
class Options:
    count: Count = 1
    whole: NonNegativeInt = 0
    seed: Seed | None = None
    number: Number = 0.0
    positive: Positive = 1.0
    bound: PositiveOrInf = 1.0
    fraction: Fraction = 0.5
    inside: OpenUnit = 0.5
    kind: Literal["a", "b"] = "a"
    level: Literal[1, 2] = 1
    on: bool = False
    text: str = ""
    path: Path = field(default_factory=Path)
    sizes: tuple[Count, ...] = ()
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"count": 2**31 - 1, "whole": 0, "seed": 2**63 - 1, "number": -1e300, "positive": 5, "bound": math.inf},
        {"fraction": 0, "kind": "b", "level": 2, "on": True, "text": "é", "path": Path("x"), "sizes": (1, 2)},
        {"fraction": 1.0, "positive": 1e-320, "names": ("a", "b"), "seed": 0},
    ],
)
def test_values_in_their_ranges(values):
    check_fields(Options(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "^--count must be positive, got 0.$"),
        ({"count": 2**31}, "--count must be at most 2,147,483,647, got 2147483648"),
        ({"count": 10**5000}, "--count must be at most .*, got a number of more than 60 digits"),
        ({"count": 1.0}, "--count must be a whole number, got 1.0"),
        ({"count": True}, "--count must be a whole number, got True"),
        ({"count": "1"}, "--count must be a whole number, got '1'"),
        ({"count": None}, "--count must be a whole number, got None"),
        ({"whole": -1}, "--whole must not be negative, got -1"),
        ({"seed": -1}, "--seed must not be negative, got -1"),
        ({"seed": 2**63}, "--seed must be at most 9,223,372,036,854,775,807"),
        ({"number": math.nan}, "--number must be a finite number, got nan"),
        ({"number": math.inf}, "--number must be a finite number, got inf"),
        ({"number": 10**5000}, "--number must be a finite number, got a number of more than 60 digits"),
        ({"number": "x" * 100}, r"--number must be a number, got 'x{59}\.\.\."),
        ({"positive": 0.0}, "--positive must be positive, got 0.0"),
        ({"positive": -math.inf}, "--positive must be a finite number, got -inf"),
        ({"bound": math.nan}, "--bound must be a number, or inf for no bound, got nan"),
        ({"bound": -math.inf}, "--bound must be a number, or inf for no bound, got -inf"),
        ({"bound": 0.0}, "--bound must be positive, got 0.0"),
        ({"fraction": 1.1}, "--fraction must lie between 0 and 1, got 1.1"),
        ({"fraction": -1}, "--fraction must lie between 0 and 1, got -1"),
        ({"inside": 0.0}, "--inside must lie between 0 and 1, both excluded, got 0.0"),
        ({"inside": 1}, "--inside must lie between 0 and 1, both excluded, got 1"),
        ({"kind": "c"}, "--kind must be one of a, b, got 'c'"),
        ({"level": True}, "--level must be one of 1, 2, got True"),
        ({"level": [1]}, "--level must be one of 1, 2, got .1."),
        ({"on": 1}, "--on must be true or false, got 1"),
        ({"text": "\udcff"}, r"--text must be text in UTF-8, got '\\udcff'"),
        ({"text": "a\0"}, r"--text must be text in UTF-8, got 'a\\x00'"),
        ({"text": Path("x")}, "--text must be text in UTF-8"),
        ({"path": Path("\udcff")}, "--path must be a path in UTF-8"),
        ({"path": 3}, "--path must be a path in UTF-8, got 3"),
        ({"sizes": (1, 0)}, "--sizes must be positive, got 0"),
        ({"sizes": [1]}, "--sizes must be a tuple, got .1."),
        ({"names": ("a", 3)}, "--names must be text in UTF-8, got 3"),
    ],
)
def test_values_out_of_their_ranges(values, message):
    with pytest.raises(ArgumentError, match=message):
        check_fields(Options(**values))


def test_properties_of_fields():
    fields = {found.name: found for found in fields_of(Options)}
    assert fields["seed"].optional
    assert fields["seed"].range.high == 2**63 - 1
    assert (fields["sizes"].many, fields["sizes"].kind) == (True, int)
    assert fields["kind"].choices == ("a", "b")
    assert fields["path"].default == Path()


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("5000", 5000),
        ("1_000_000", 10**6),
        ("1e6", 10**6),
        ("1.5k", 1500),
        ("10K", 10**4),
        ("2M", 2 * 10**6),
        (" -3 ", -3),
        (1e6, 10**6),
        (7, 7),
        ("1e18", 10**18),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_whole_numbers(written, number):
    assert whole_number(written) == number


@pytest.mark.parametrize(
    "written", ["1.5", "1e-3", "1.0001k", "k", "", "10 k m", "nan", "inf", "1e999999999", "2m", 2.5]
)
def test_invalid_whole_numbers(written):
    with pytest.raises(ArgumentError, match="must be a whole number, such as 5000, 10k, 2M or 1e6, got"):
        whole_number(written)


def test_values_of_files_are_read():
    read = {field.name: field.read for field in fields_of(Options)}
    assert (read["count"](1e6), read["seed"]("10k"), read["sizes"](["1k", 2])) == (10**6, 10**4, (1000, 2))
    assert (read["count"](2.5), read["text"]("10k"), read["number"](1.0), read["level"]("1")) == (2.5, "10k", 1.0, "1")
    assert read["on"](True) is True


def test_the_nearest_choice_is_suggested():
    @dataclass
    class Choice:
        format: Literal["torch", "onnx"]

    with pytest.raises(ArgumentError, match=r"--format must be one of torch, onnx, got 'onx'. Did you mean onnx\?"):
        check_fields(Choice("onx"))
