import copy
import math

import pytest
import torch

from recurl.trainers.files.contents import contents_of, first_difference

STATE = {
    "weights": torch.ones(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "number": torch.tensor(1.5),
    "none": torch.zeros(0, 4),
    ("a", "tuple"): {0: 1, "nested": [{"x": math.nan}, None]},
    "plain": [1, "two", 3.0, None, True, b"x"],
    "empty": {},
}


def test_a_copy_is_the_same():
    contents = contents_of(STATE)
    assert first_difference(copy.deepcopy(STATE), contents) is None
    assert contents["('a', 'tuple')/nested/0/x"].startswith("float, ")


def test_a_tensor_of_one_number_may_have_any_stride():
    strange = torch.arange(9).view(1, 9)[:, 4]
    assert strange.stride() == (9,)
    assert contents_of({"number": strange}) == contents_of({"number": torch.tensor([4])})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda state: state.pop("number"), "number was float32 [], is absent"),
        (lambda state: state.update(new=1), "new was absent, is int"),
        (lambda state: state.update(number=1.5), "number was float32 [], is float"),
        (lambda state: state.update(half=torch.ones(2)), "half was bfloat16 [2], is float32 [2]"),
        (lambda state: state.update(none=torch.zeros(0, 5)), "none was float32 [0, 4], is float32 [0, 5]"),
        (lambda state: state["flags"].fill_(True), "flags has another value"),
        (lambda state: state.update(plain=[1, "two"]), "plain was list of 6, is list of 2"),
        (lambda state: state.update(plain=tuple(state["plain"])), "plain was list of 6, is tuple of 6"),
        (lambda state: state["a", "tuple"].update({0: 2}), "('a', 'tuple')/0 has another value"),
        (lambda state: state["a", "tuple"].update({0: True}), "('a', 'tuple')/0 was int, is bool"),
        (lambda state: state.update(empty=None), "empty was dict of 0, is NoneType"),
    ],
)
def test_changed_values_are_named(edit, said):
    state = copy.deepcopy(STATE)
    edit(state)
    assert first_difference(state, contents_of(STATE)) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("place", [0, 100, 4999])
def test_every_number_of_a_tensor_counts(dtype, place):
    before = torch.zeros(5000, dtype=dtype)
    after = before.clone()
    after[place] = 1
    assert first_difference({"x": after}, contents_of({"x": before})) == "x has another value"
