import pytest
import torch

from recurl.collectors.actors.arrays import arrays_of, joined
from recurl.core.errors import ArgumentError

X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"x": torch.ones(2, 4)},
            r"'x' is float32 \[2, 3\] for actor 0 and float32 \[2, 4\] for actor 1",
        ),
        ({"x": X.double()}, r"'x' is float32 \[2, 3\] for actor 0 and float64 \[2, 3\] for actor 1"),
        ({"x": X, "y": X}, "'y' is missing for actor 0 and float32"),
        ({}, r"'x' is float32 \[2, 3\] for actor 0 and missing for actor 1"),
    ],
)
@pytest.mark.parametrize("dim", [None, 0])
def test_batches_of_other_entries_are_refused(other, message, dim):
    with pytest.raises(ArgumentError, match=message):
        joined([arrays_of({"x": X}), arrays_of(other)], dim)
