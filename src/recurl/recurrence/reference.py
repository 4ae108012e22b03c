"""Reference backend: one token after another. All other backends are tested against it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support, record_run
from recurl.recurrence.cells import States
from recurl.recurrence.stack import at_ends


class ReferenceBackend:
    """Slow backend that supports every dtype, every option, and derivatives of any order."""

    name = "reference"
    cells = None

    def missing(self) -> str | None:
        """Return None: only torch is needed."""
        return None

    def unsupported(self, support: Support) -> str | None:
        """Refuse tracing, which would unroll the loop over tokens; everything else is supported."""
        return "it loops over tokens on the host; use 'auto'" if support.compiling else None

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
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
        names = zip(call.cell.state_names, zip(*after, strict=True), strict=True)
        dense = tuple(
            at_ends(call.boundaries.ends, torch.cat(state)) if name in call.cell.states_at_ends else torch.cat(state)
            for name, state in names
        )
        return dense[0] if call.cell.features_are_first_state else torch.cat(features), dense
