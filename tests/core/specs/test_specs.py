from __future__ import annotations

import math

import pytest
import torch

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

LEAVES = {
    "unbounded": Unbounded(3),
    "integers": Unbounded(3, dtype=torch.int64),
    "bytes": Unbounded(3, dtype=torch.uint8),
    "flags": Unbounded((2,), dtype=torch.bool),
    "bounded": Bounded(-1.0, torch.tensor([1.0, 2.0])),
    "half-bounded": Bounded(0.0, math.inf, (4,)),
    "image": Bounded(0, 255, (2, 2, 3), dtype=torch.uint8),
    "categorical": Categorical(5),
    "one-hot": OneHot(4),
    "multi": MultiCategorical([2, 7]),
    "binary": Binary((1,)),
}


@pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_random_members_are_in_the_spec(spec, batch):
    torch.manual_seed(0)
    spec = spec.expand(*batch, *spec.shape)
    for _ in range(10):
        value = spec.rand()
        assert value.shape == spec.shape
        assert value.dtype == spec.dtype
        assert spec.is_in(value)
    assert spec.zero().shape == spec.shape
    assert not spec.zero().any()
    assert not spec.is_in(value[None])
    assert not spec.is_in(value.to(torch.complex64))
    assert not spec.is_in(None)


@pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES)
def test_equality_clone_and_device(spec):
    assert spec == spec.clone()
    assert spec != spec.expand(2, *spec.shape)
    assert spec != spec.to("cpu")
    assert spec.to("cpu").zero().device.type == "cpu"
    assert all(spec != other for other in LEAVES.values() if other is not spec)
    assert type(spec).__name__ in repr(spec)


def test_domains():
    assert not Bounded(-1.0, 1.0, (2,)).is_in(torch.tensor([0.0, 1.1]))
    assert not Categorical(3).is_in(torch.tensor(3))
    assert not OneHot(3).is_in(torch.tensor([0, 1, 1]))
    assert not OneHot(3, dtype=torch.float32).is_in(torch.tensor([0.5, 0.5, 0.0]))
    assert not MultiCategorical([2, 3]).is_in(torch.tensor([2, 0]))
    assert not Binary((1,), dtype=torch.int8).is_in(torch.tensor([2], dtype=torch.int8))
    assert Bounded(-1.0, 1.0, (2,)).expand(3, 2).low.tolist() == [[-1.0, -1.0]] * 3
    assert Bounded(-1.0, 1.0, (2,)).high.tolist() == [1.0, 1.0]


def test_integer_samples_reach_both_bounds():
    torch.manual_seed(0)
    sample = Bounded(-1, 1, (1000,), dtype=torch.int64).rand()
    assert sample.unique().tolist() == [-1, 0, 1]


def test_refusals():
    with pytest.raises(ArgumentError, match="low must be <= its high"):
        Bounded(1.0, 0.0)
    with pytest.raises(ArgumentError, match="must broadcast to the shape"):
        Bounded(torch.zeros(2), torch.ones(3))
    with pytest.raises(ArgumentError, match="integer >= 1"):
        Categorical(0)
    with pytest.raises(ArgumentError, match="must be n=3"):
        OneHot(3, shape=(4,))
    with pytest.raises(ArgumentError, match="must be those of nvec"):
        MultiCategorical([2, 3], shape=(3,))
    with pytest.raises(ArgumentError, match="the new shape must end with the shape of the spec"):
        Unbounded(3).expand(3, 2)
    with pytest.raises(ArgumentError, match="expand it first"):
        Composite(a=Unbounded(3), shape=(2,))
    with pytest.raises(ArgumentTypeError, match="must be a spec, got int"):
        Composite(a=3)
    with pytest.raises(MissingKeyError, match="No entry 'b'"):
        Composite(a=Unbounded(3))["b"]


def test_composite_is_a_tree():
    spec = Composite({"a": Unbounded(3), "n": {"b": Categorical(2)}}, c=Binary((1,)))
    spec["n", "deep", "d"] = OneHot(3)
    assert list(spec.keys()) == ["a", "n", "c"]
    assert list(spec) == ["a", "n", "c"]
    assert set(spec.keys(True, True)) == {"a", ("n", "b"), ("n", "deep", "d"), "c"}
    assert ("n", "deep") in spec.keys(True)
    assert ("n", "b") in spec
    assert ("a", "b") not in spec
    assert spec.get(("n", "x"), "none") == "none"
    assert spec["n", "b"] == Categorical(2)
    assert len(list(spec.values(True, True))) == 4
    assert "deep" in repr(spec)


def test_composite_expands_samples_and_checks():
    spec = Composite({"a": Unbounded(3), ("n", "b"): Categorical(2)}).expand(4)
    assert spec["n"].shape == (4,)
    value = spec.rand()
    assert value.batch_size == (4,)
    assert spec.is_in(value)
    assert spec.is_in(spec.zero())
    assert not spec.is_in(value.exclude("a"))
    assert not spec.is_in({"a": value["a"]})
    value["n", "b"] = torch.full((4,), 2)
    assert not spec.is_in(value)
    assert spec.expand(5, 4)["a"].shape == (5, 4, 3)
    assert spec.to("cpu")["a"].device == torch.device("cpu")


def test_composite_clone_is_independent():
    spec = Composite({("n", "b"): Categorical(2)})
    copy = spec.clone()
    assert copy == spec
    copy["n", "c"] = Binary()
    assert ("n", "c") not in spec
    assert copy != spec
    assert spec.to("cpu") == Composite({("n", "b"): Categorical(2)}, device="cpu")


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Binary(2), (2,)),
        (lambda: Binary(n=2), (2,)),
        (lambda: Binary(n=2, shape=(3, 2)), (3, 2)),
        (lambda: Binary(2, shape=(3, 2)), (3, 2)),
        (lambda: Binary(), ()),
        (lambda: Binary((1,), None, torch.int8), (1,)),
        (lambda: Unbounded(shape=0), (0,)),
        (lambda: Unbounded(), ()),
        (lambda: Bounded(-1, 1, 2), (2,)),
        (lambda: Categorical(4, 2), (2,)),
        (lambda: OneHot(3, 3), (3,)),
        (lambda: MultiCategorical((2, 3), 2), (2,)),
        (lambda: MultiCategorical(torch.tensor([2, 3])), (2,)),
        (lambda: Composite(a=Unbounded(3, 2), shape=3), (3,)),
    ],
)
def test_a_shape_is_an_int_or_a_sequence(make, shape):
    assert make().shape == torch.Size(shape)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Binary("a"), ArgumentTypeError, "an int or a sequence of ints"),
        (lambda: Binary(2, 3), ArgumentError, "device of a spec"),
        (lambda: Binary(n=2, shape=(2, 3)), ArgumentError, "must be n=2"),
        (lambda: Binary(-1), ArgumentError, "must not be negative"),
        (lambda: Unbounded(2.5), ArgumentTypeError, "an int or a sequence of ints"),
        (lambda: Unbounded(2, shape=(3,)), ArgumentError, "given once"),
        (lambda: Unbounded(2, dtype="float"), ArgumentTypeError, "must be a torch.dtype"),
        (lambda: Unbounded(2, device="foo"), ArgumentError, "a torch device"),
        (lambda: Unbounded(2).to("foo"), ArgumentError, "a torch device"),
        (lambda: Unbounded(2).expand("a"), ArgumentTypeError, "an int or a sequence of ints"),
        (lambda: Bounded("a", 1), ArgumentError, "low must be a number"),
        (lambda: Bounded(-1, None), ArgumentError, "high must be a number"),
        (lambda: Bounded(math.nan, 1), ArgumentError, "Every low must be"),
        (lambda: Bounded(0, 300, dtype=torch.uint8), ArgumentError, "high must be a number.*uint8"),
        (lambda: Bounded(0.5, 1, dtype=torch.int64), ArgumentError, "low must be a number.*int64"),
        (lambda: Categorical("4"), ArgumentTypeError, "number of categories"),
        (lambda: Categorical(math.nan), ArgumentError, "number of categories"),
        (lambda: Categorical(math.inf), ArgumentError, "number of categories"),
        (lambda: Categorical(300, dtype=torch.uint8), ArgumentError, "can't represent 300 categories"),
        (lambda: OneHot("3"), ArgumentTypeError, "number of categories"),
        (lambda: MultiCategorical(3), ArgumentTypeError, "a sequence of numbers"),
        (lambda: MultiCategorical([2, "a"]), ArgumentTypeError, "number"),
        (lambda: MultiCategorical([[2, 3], [4]]), ArgumentError, "equal lengths"),
        (lambda: MultiCategorical([2, 300], dtype=torch.uint8), ArgumentError, "can't represent 300 categories"),
        (lambda: Composite([1]), ArgumentTypeError, "maps keys to specs"),
        (lambda: Composite({"a": Unbounded(1), ("a", "b"): Unbounded(1)}), ArgumentError, "can't be nested in 'a'"),
        (lambda: Composite({("a", "b"): Unbounded(1), "a": Unbounded(1)}), ArgumentError, "given once"),
        (lambda: Composite({"a": Unbounded(1)}, a=Unbounded(2)), ArgumentError, "given once"),
    ],
)
def test_arguments_that_make_no_spec(make, error, said):
    with pytest.raises(error, match=said):
        make()
