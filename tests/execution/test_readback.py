import numpy as np
import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.execution.readback import refuse_read_back

X = torch.arange(4.0)


@pytest.mark.parametrize(
    "read",
    [
        lambda: X[0].item(),
        lambda: bool(X.sum() > 0),
        lambda: X[X > 1],
        lambda: X.masked_select(X > 1),
        lambda: (X > 1).nonzero(),
        lambda: X.clone().index_put_((X > 1,), X[:2]),
        lambda: X.unique(),
        lambda: torch.equal(X, X),
        lambda: X.numpy(),
        lambda: X.tolist(),
        lambda: np.sin(X),
        lambda: X.repeat_interleave(torch.tensor([1, 0, 1, 1])),
    ],
)
def test_reads_are_refused_with_their_line(read):
    with (
        pytest.raises(UnsupportedError, match=r"read back to the host, but .*test_readback\.py:\d+ does "),
        refuse_read_back(),
    ):
        read()


def test_operations_on_the_device_are_allowed():
    with refuse_read_back():
        masked = torch.where(X > 1, X, 0.0).masked_fill(X > 2, 5.0)
        kept = masked[torch.tensor([3, 0])].repeat_interleave(2)
    assert kept.tolist() == [5.0, 5.0, 0.0, 0.0]
