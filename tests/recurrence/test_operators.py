"""Arguments of operators that aren't tensors, or no boundaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recurl.core.errors import ArgumentTypeError
from recurl.recurrence import Boundaries, gated_matrix_recurrence, linear_recurrence, windowed_attention

FLAGS = torch.tensor([True, False])
VECTORS, MATRICES, NUMBERS = torch.zeros(2, 3), torch.zeros(2, 1, 3), torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("operator", "tensors"),
    [
        (linear_recurrence, {"a": VECTORS, "b": VECTORS, "states": VECTORS}),
        (windowed_attention, dict.fromkeys(("query", "key", "value", "position"), MATRICES)),
        (
            gated_matrix_recurrence,
            dict.fromkeys(("query", "key", "value"), MATRICES)
            | {"log_decay": NUMBERS, "rate": NUMBERS, "states": MATRICES.unsqueeze(2).expand(2, 1, 3, 3)},
        ),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(operator: Any, tensors: dict[str, Any]) -> None:
    boundaries = Boundaries.from_is_init(FLAGS)
    for name in tensors:
        with pytest.raises(ArgumentTypeError, match=f"^{name} must be a tensor, got list: use torch.as_tensor"):
            operator(**tensors | {name: [1.0]}, boundaries=boundaries)
    with pytest.raises(ArgumentTypeError, match=r"got Tensor: pass Boundaries\.from_is_init\(is_init\)"):
        operator(**tensors, boundaries=FLAGS)
