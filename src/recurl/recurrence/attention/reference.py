"""The backend ``reference``: one token after another, each with the keys that it attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.attention.kernels import AttentionInputs, AttentionKernels
from recurl.recurrence.cells import States
from recurl.sequences.stored import spacing_of


class ReferenceAttention(AttentionKernels):
    """Reference: the softmax of each token by itself, in float64, with derivatives of any order by autograd."""

    def forward(self, inputs: AttentionInputs, keep: bool) -> tuple[States, States]:
        """Return the result; differentiable."""
        query, key, value, position, windows = (tensor.double() for tensor in inputs[:5])
        spacing = spacing_of(windows, query.shape[0])
        maps = [one.double() for one in (inputs.to_key, inputs.to_value) if one is not None]
        results: list[Tensor] = []
        start = 0
        for n, starts in enumerate(inputs.boundaries.starts.tolist()):
            start = n if starts else start
            first = max(start, n - inputs.past)
            keys, values = key[first : n + 1], value[first : n + 1]
            distances = [n - token for token in range(first, n + 1)]
            if maps:
                # The input at place j of the window lies M - j steps before the segment.
                row = start // spacing
                places = range(n - start, inputs.past if start % spacing == 0 else 0)
                seen = [j for j in places if windows[row, j, -1] > 0]
                of_keys, of_values = (torch.einsum("me,hde->mhd", windows[row, seen], one) for one in maps)
                keys, values = torch.cat([of_keys, keys]), torch.cat([of_values, values])
                distances = [n - start + inputs.past - j for j in seen] + distances
            scores = torch.einsum("hd,khd->hk", query[n], keys) + position[n][:, distances]
            results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        return (torch.stack(results).to(inputs.query.dtype),), ()
