"""Cells that are linear recurrences, run over the segments of a stream by their own step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurl._torch import is_functorch_active
from recurl.recurrence.backend import LayerCall, Support, without_autocast
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import States
from recurl.recurrence.linear import LINEAR, linear_recurrence


class Segments:
    """:class:`~recurl.recurrence.Time` over a flat stream: each segment goes on from the state stored at its start.

    Args:
        boundaries: the segments.
        backend: who runs the linear recurrences.
    """

    def __init__(self, boundaries: Boundaries, backend: str) -> None:
        self.boundaries, self.backend = boundaries, backend

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """See :meth:`recurl.recurrence.Time.recur`."""
        return linear_recurrence(a, b.expand_as(h), h, self.boundaries, self.backend)

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """See :meth:`recurl.recurrence.Time.recur_complex`."""
        result = self.recur(_complex(a), _complex(b.expand_as(h)), _complex(h))
        return torch.view_as_real(result).to(h.dtype)

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """See :meth:`recurl.recurrence.Time.window`."""
        start, past = self.boundaries.start_index, before.shape[1]
        token = torch.arange(x.shape[0], device=x.device)
        inputs = [x]
        for lag in range(1, past + 1):
            age = token - start  # how many tokens of the segment came before
            own = torch.cat([x[:lag], x[:-lag]])
            stored = before[start, (past - lag + age).clamp(max=past - 1)]
            inputs.insert(0, torch.where((age >= lag).unsqueeze(-1), own, stored))
        return torch.stack(inputs, 1)


def _complex(pairs: Tensor) -> Tensor:
    wide = torch.promote_types(pairs.dtype, torch.float32)  # there are no complex numbers of less
    return torch.view_as_complex(pairs.to(wide).contiguous())


class LinearBackend:
    """A backend for cells whose step takes ``time``: their products as they stand, their recurrences as one operator.

    Args:
        name: of the kernels that run the operator.
    """

    cells = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels = LINEAR.named(name)

    def missing(self) -> str | None:
        """See :meth:`recurl.recurrence.backend.Backend.missing`."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """See :meth:`recurl.recurrence.backend.Backend.unsupported`."""
        return self.missing() or self.kernels.unsupported(support.device, support.dtype)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """See :meth:`recurl.recurrence.backend.Backend.run`; the operator takes note of it."""
        time = Segments(call.boundaries, self.name)

        def step() -> tuple[Tensor, States]:
            return call.cell.step(call.x, call.states, *call.weights, time=time)

        with without_autocast(call.x.device):
            if call.options.recompute and not is_functorch_active():  # torch.func keeps what it likes
                return checkpoint(step, use_reentrant=False)
            return step()
