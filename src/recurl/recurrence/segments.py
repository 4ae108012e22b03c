"""Execution of linear-recurrence cells over segments through their ``step``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurl.core.torch_compat import is_functorch_active
from recurl.recurrence.backend import LayerCall, Support, without_autocast
from recurl.recurrence.cells import States
from recurl.recurrence.linear import LINEAR, linear_recurrence
from recurl.sequences.index import Boundaries


class Segments:
    """:class:`~recurl.recurrence.Time` over a flat stream, where each segment starts from its stored state.

    Args:
        boundaries: the segments.
        backend: backend of the linear recurrences.
    """

    def __init__(self, boundaries: Boundaries, backend: str) -> None:
        self.boundaries, self.backend = boundaries, backend

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = a * h + b`` at every token."""
        return linear_recurrence(a, b.expand_as(h), h, self.boundaries, self.backend)

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the result of :meth:`recur` for complex numbers given as pairs."""
        result = self.recur(_complex(a), _complex(b.expand_as(h)), _complex(h))
        return torch.view_as_real(result).to(h.dtype)

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """Return the last inputs at every token, including its own."""
        start, past = self.boundaries.start_index, before.shape[1]
        token = torch.arange(x.shape[0], device=x.device)
        inputs = [x]
        for lag in range(1, past + 1):
            age = token - start  # number of earlier tokens in the segment
            own = torch.cat([x[:lag], x[:-lag]])
            stored = before[start, (past - lag + age).clamp(max=past - 1)]
            inputs.insert(0, torch.where((age >= lag).unsqueeze(-1), own, stored))
        return torch.stack(inputs, 1)


def _complex(pairs: Tensor) -> Tensor:
    wide = torch.promote_types(pairs.dtype, torch.float32)  # complex dtypes start at float32
    return torch.view_as_complex(pairs.to(wide).contiguous())


class LinearBackend:
    """Backend for cells whose step takes ``time``: the step runs once on all tokens, its recurrence as one operator.

    Args:
        name: name of the linear-recurrence kernels.
    """

    cells = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels = LINEAR.named(name)

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """Return why the call can't be served, or None."""
        return self.missing() or self.kernels.unsupported(support.device, support.dtype)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer. The operator records the run."""
        time = Segments(call.boundaries, self.name)

        def step() -> tuple[Tensor, States]:
            return call.cell.step(call.x, call.states, *call.weights, time=time)

        with without_autocast(call.x.device):
            if call.options.recompute and not is_functorch_active():  # torch.func decides itself what to save
                return checkpoint(step, use_reentrant=False)
            return step()
