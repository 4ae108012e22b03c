"""Backend on torch.nn's kernels (cuDNN, oneDNN): equal segments as one batch, ragged segments packed."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.core.torch_compat import is_exporting, is_forward_mode, is_functorch_active, rnn_kernel
from recurl.recurrence.backend import LayerCall, Support, record_run
from recurl.recurrence.cells import States


class PadBackend:
    """Backend that runs torch.nn's kernels.

    States are exact at the last token of each segment and zero elsewhere, since the kernels return only final states.
    The segment lengths are fetched once per batch, which synchronizes with a GPU.
    """

    name = "pad"
    cells = ("lstm", "gru")

    def missing(self) -> str | None:
        """Return None: only torch is needed."""
        return None

    def unsupported(self, support: Support) -> str | None:
        """Refuse export (segment lengths are read on the host) and recomputation (torch.nn keeps its buffers)."""
        if is_exporting():
            return "it reads segment lengths on the host, which can't be exported; use 'auto' or 'loop'"
        if support.options.recompute:
            return "torch.nn's kernels keep their own buffers, so recurrent_recompute must be 'none'"
        return None

    # torch.compile breaks the graph here; with fullgraph=True it raises an error that states the reason.
    @torch.compiler.disable(reason="the recurrent backend 'pad' reads segment lengths on the host: use 'auto'")
    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        try:
            return self._run(call)
        except RuntimeError as error:
            if not is_functorch_active() and not is_forward_mode():
                raise
            raise UnsupportedError(
                "The recurrent backend 'pad' runs torch.nn's kernels, which torch can't transform or differentiate "
                "here (torch.func or torch.autograd.forward_ad): use recurrent_backend='loop'."
            ) from error

    def _run(self, call: LayerCall) -> tuple[Tensor, States]:
        plan = call.boundaries.host()
        initial = tuple(state.index_select(0, plan.starts).unsqueeze(0) for state in call.states)
        rows, longest = plan.starts.shape[0], len(plan.steps)
        record_run(self.name)
        if rows * longest == call.x.shape[0]:  # equal segments: the stream is already an [S, L] batch
            y, final = _kernel(call, call.x.reshape(rows, longest, -1), initial=initial, trailing=(True,))
            features = y.reshape(call.x.shape[0], -1)
        else:
            packed = call.x.index_select(0, plan.order)
            y, final = _kernel(call, packed, plan.batch_sizes, initial=initial)
            features = torch.empty_like(y).index_copy(0, plan.order, y)
        after = tuple(
            state.new_zeros(call.x.shape[0], state.shape[-1]).index_copy(0, plan.ends, state.squeeze(0))
            for state in final
        )
        return features, after


def _kernel(
    call: LayerCall, *leading: Tensor, initial: States, trailing: tuple[bool, ...] = ()
) -> tuple[Tensor, States]:
    """Call torch.nn's kernel on one layer: (x, [batch_sizes], states, weights, ...)."""
    hidden = initial if len(call.cell.state_names) > 1 else next(iter(initial))
    weights = [weight for weight in call.weights if weight is not None]
    options = (weights, call.weights.b_ih is not None, 1, 0.0, torch.is_grad_enabled(), False, *trailing)
    y, *final = rnn_kernel(call.cell.name)(*leading, hidden, *options)
    return y, tuple(final)
