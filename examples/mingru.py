"""A custom cell: train it with --cell examples.mingru:MinGRU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence import Cell, Sizes, States


class MinGRU(Cell):
    """h = (1 - z) * h + z * c, with z = sigmoid(W_z x + b_z) and c = W_h x + b_h (Feng et al. 2024)."""

    def parameters(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by name."""
        matrix, vector = (sizes.hidden_size, sizes.input_size), (sizes.hidden_size,)
        biases = {"bias_z": vector, "bias_h": vector} if sizes.bias else {}
        return {"weight_z": matrix, "weight_h": matrix, **biases}

    def step(
        self,
        x: Tensor,
        states: States,
        weight_z: Tensor,
        weight_h: Tensor,
        bias_z: Tensor = None,
        bias_h: Tensor = None,
    ) -> tuple[Tensor, States]:
        """Return features and states after one step."""
        z = torch.sigmoid(F.linear(x, weight_z, bias_z))
        h = (1 - z) * states[0] + z * F.linear(x, weight_h, bias_h)
        return h, (h,)
