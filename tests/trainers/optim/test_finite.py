import math

import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import NonFiniteError
from recurl.trainers.optim.finite import BatchCheck, all_finite, check_finite, first_nonfinite

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_kind_of_number(dtype):
    good = [torch.ones(2, 3, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    assert all_finite([*good, torch.tensor([1]), torch.tensor([True])])
    for number in BAD:
        assert not all_finite([*good, torch.tensor([1.0, number], dtype=dtype)])
    assert all_finite([])


def test_large_numbers_are_finite():
    largest = torch.full((100,), torch.finfo(torch.float32).max)
    assert all_finite([largest, -largest])
    assert not all_finite([largest, torch.tensor(math.nan)])
    assert not all_finite([torch.tensor([math.inf]), torch.tensor([-math.inf])])


@pytest.mark.parametrize("number", BAD)
def test_the_first_name(number):
    assert first_nonfinite({"a": 1.0, "b": number, "c": number}, ["a", "c", "b"]) == f"c was {number:g}"
    assert first_nonfinite({"a": 1.0, "b": number}, ["a"]) is None


def test_states_are_searched_through():
    state = {"a": [torch.ones(2), {"b": (torch.ones(1), 3, "x")}], "none": None, 5: torch.ones(2)}
    check_finite(state, "it")
    state[5][1] = -math.inf
    with pytest.raises(NonFiniteError, match="All numbers of it must be finite, but 5 holds -inf"):
        check_finite(state, "it")
    state["a"][1]["b"][0][0] = math.nan
    with pytest.raises(NonFiniteError, match=r"but a\.1\.b\.0 holds nan"):
        check_finite(state, "it")


def batch():
    def observed():
        return {
            "a": torch.zeros(3, 4),
            "b": {"c": torch.zeros(3, 4, 2), "image": torch.zeros(3, 4, 5, dtype=torch.uint8)},
        }

    after = {**observed(), "state_h": torch.zeros(3, 4, 1, 2), "reward": torch.zeros(3, 4, 1)}
    return TensorDict(
        {**observed(), "state_h": torch.zeros(3, 4, 1, 2), "other": torch.zeros(3, 4), "next": after}, [3, 4]
    )


CHECK = BatchCheck(["a", ("b", "c"), ("b", "image")], ["state_h"])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("a", "observation 'a'"),
        (("b", "c"), "observation 'b.c'"),
        ("state_h", "hidden state 'state_h'"),
        (("next", "reward"), "reward"),
        (("next", "b", "c"), "next observation 'b.c'"),
        (("next", "state_h"), "next hidden state 'state_h'"),
    ],
)
@pytest.mark.parametrize("number", BAD)
def test_the_culprit_is_named(key, said, number):
    data = batch()
    data.get(key)[2, 1] = number
    rows, culprit = CHECK(data, 1212)
    assert rows.tolist() == [False, False, True]
    assert culprit == f"The {said} of environment 2 at step 1 of its batch (environment step 1,206) was {number}"


def test_the_first_culprit_counts_and_all_rows():
    data = batch()
    data["next", "reward"][0, 3] = math.nan
    data["next", "a"][1, 2] = math.nan
    data["a"][1, 3] = math.nan
    rows, culprit = CHECK(data, 12)
    assert rows.tolist() == [True, True, False]
    assert "next observation 'a' of environment 1 at step 2" in culprit
    data["a"][2, 2] = math.inf
    assert "The observation 'a' of environment 2 at step 2" in CHECK(data, 12)[1]


def test_unread_entries_may_hold_anything():
    data = batch()
    data["other"][0, 0] = math.nan
    assert CHECK(data, 12) is None
