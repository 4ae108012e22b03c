"""The oracle: one token after the other, nothing clever. Every other backend is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support, record_run
from recurl.recurrence.cells import States


class ReferenceBackend:
    """Any dtype, any option, any order of derivative; slow."""

    name = "reference"
    cells = None

    def missing(self) -> str | None:
        """Nothing: it needs torch only."""
        return None

    def unsupported(self, support: Support) -> str | None:
        """Nothing is unsupported, but tracing a loop over tokens would unroll it."""
        return "it loops over tokens on the host; use 'auto'" if support.compiling else None

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """See :meth:`recurl.recurrence.backend.Backend.run`."""
        features: list[Tensor] = []
        after: list[States] = []
        states: States = ()
        for n, starts in enumerate(call.boundaries.starts.tolist()):
            if starts:
                states = tuple(stored[n : n + 1] for stored in call.states)
            y, states = call.cell.step(call.x[n : n + 1], states, *call.weights)
            features.append(y)
            after.append(states)
        record_run(self.name)
        dense = tuple(torch.cat(state) for state in zip(*after, strict=True))
        return dense[0] if call.cell.features_are_first_state else torch.cat(features), dense
