import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurl.core.errors import ArgumentError
from recurl.core.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    choice_counts,
    has_mask,
    masked_rand,
    rows_without_choice,
    split_choices,
)

PARTS = Composite({"move": Categorical(3), "aim": Bounded(-1.0, 1.0, (2,)), "keys": MultiCategorical([2, 3])})


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        (Categorical(4), (4,)),
        (Categorical(4, (2,)), (4, 4)),
        (OneHot(3), (3,)),
        (MultiCategorical([[2, 3], [4, 5]]), (2, 3, 4, 5)),
        (Binary((3,)), ()),
        (PARTS, (3, 2, 3)),
    ],
)
def test_choices_of_a_spec(spec, counts):
    assert choice_counts(spec) == counts


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**31))
def test_random_actions_are_allowed_and_cover_all_allowed_choices(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(7, sum(counts), generator=generator) < 0.5
    parts = split_choices(mask, counts, False)
    empty = rows_without_choice(mask, counts)
    assert torch.equal(empty, torch.tensor([any(not row.any() for row in rows) for rows in parts]))
    drawn = masked_rand(MultiCategorical(counts), mask.expand(60, *mask.shape))
    assert drawn.shape == (60, 7, len(counts))
    allowed = parts.expand(60, *parts.shape).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    assert allowed[:, ~empty].all()


def test_random_actions_are_uniform():
    torch.manual_seed(0)
    mask = torch.tensor([True, False, True, True]).expand(30_000, 4)
    share = masked_rand(Categorical(4), mask).bincount(minlength=4) / 30_000
    torch.testing.assert_close(share, torch.tensor([1.0, 0.0, 1.0, 1.0]) / 3, rtol=0, atol=0.015)


def test_parts_are_drawn_in_their_own_form():
    mask = torch.tensor([[False, True, False, True, False, False, False, True]]).expand(5, 8)
    drawn = masked_rand(PARTS, mask)
    assert drawn["move"].tolist() == [1] * 5
    assert drawn["keys"].tolist() == [[0, 2]] * 5
    assert PARTS.expand(5).is_in(drawn)
    one_hot = masked_rand(OneHot(3), mask[:, :3])
    assert one_hot.tolist() == [[0, 1, 0]] * 5


def test_accepted_masks():
    def observed(spec):
        return Composite({"action_mask": spec}, shape=(2,))

    assert has_mask(observed(Binary((2, 3))), Categorical(3))
    assert not has_mask(observed(Binary((2, 3), dtype=torch.int8)), Categorical(3))
    assert not has_mask(Composite(), Categorical(3))
    for shape, action in (((2, 4), Categorical(3)), ((2, 3), Bounded(-1.0, 1.0, (3,)))):
        with pytest.raises(ArgumentError, match="'action_mask' must be bool"):
            has_mask(observed(Binary(shape)), action)
