"""What the recurrence kernels of every family compute, in plain torch: one token after another.

Families differ in how they cut the tokens into slots and the units into programs, in the order of columns
(:class:`~recurl.recurrence.cuda.layout.GateLayout`), and in precision. Tests compare them with these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.cells import States

__all__ = ["backward", "forward"]


def forward(input_gates: Tensor, b_hn: Tensor, w_hh: Tensor, stored: States, starts: Tensor) -> tuple[States, Tensor]:
    """Return the states after every token, ``[N, H]`` each, and the gates that are kept, ``[N, 4, H]``.

    Args:
        input_gates: input products with all biases except b_hn, ``[N, G, H]``. LSTM: i, f, g, o. GRU: r, z, n.
        b_hn: hidden bias of n of a GRU, ``[H]``.
        w_hh: recurrent weights ``[G * H, H]``, in this order.
        stored: states before every token, ``[N, H]`` each, which are read at the starts of segments only.
        starts: bool ``[N]``: whether a segment starts at a token.

    Returns:
        The states (LSTM: h and c), and the gates. LSTM: i, f, g, o. GRU: r, z, n and n's hidden product with its bias.
    """
    lstm, (tokens, gates, _) = len(stored) == 2, input_gates.shape
    states, kept = list[States](), list[Tensor]()
    for token in range(tokens):
        before = tuple(state[token] for state in stored) if starts[token] else states[-1]
        x, hidden = input_gates[token], (w_hh @ before[0]).view(gates, -1)
        if lstm:
            i, f, o = (torch.sigmoid(x[k] + hidden[k]) for k in (0, 1, 3))
            g = torch.tanh(x[2] + hidden[2])
            c = f * before[1] + i * g
            states.append((o * c.tanh(), c))
            kept.append(torch.stack([i, f, g, o]))
        else:
            r, z = (torch.sigmoid(x[k] + hidden[k]) for k in (0, 1))
            inner = hidden[2] + b_hn
            n = torch.tanh(x[2] + r * inner)
            states.append((n + z * (before[0] - n),))
            kept.append(torch.stack([r, z, n, inner]))
    return tuple(map(torch.stack, zip(*states, strict=True))), torch.stack(kept)


def backward(
    grads: States, gates: Tensor, w_hh: Tensor, stored: States, after: States, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates, ``[N, 4, H]``, and of the last stored state, ``[N, H]``.

    The other arguments and results are those of :func:`forward`.

    Args:
        grads: gradients of the states after every token, ``[N, H]`` each.
        gates: the kept gates.
        w_hh: recurrent weights.
        stored: stored states.
        after: states after every token.
        starts: where segments start.

    Returns:
        Gradients of the gates. LSTM: of the sums inside i, f, g, o. GRU: of those inside r, z, n, and of n's hidden
        product. The second result is zero except at starts. LSTM: the gradient of c. GRU: the part of h's gradient that
        bypasses the hidden product; the other part is the gradients of r, z and that product times the weights.
    """
    lstm, tokens = len(stored) == 2, gates.shape[0]
    to_gates, to_stored = torch.zeros_like(gates), torch.zeros_like(after[-1])
    carried = torch.zeros_like(after[0][0])  # to the state before this token, beside the hidden product
    for token in reversed(range(tokens)):
        linked = token + 1 < tokens and not starts[token + 1]
        dh, carried = grads[0][token], carried if linked else torch.zeros_like(carried)
        before = stored[-1][token] if starts[token] else after[-1][token - 1]
        if linked:
            hidden = to_gates[token + 1] if lstm else to_gates[token + 1][[0, 1, 3]]
            dh = dh + hidden.flatten() @ w_hh
        if lstm:
            i, f, g, o = gates[token]
            tanh_c = after[1][token].tanh()
            dc = grads[1][token] + carried + dh * o * (1 - tanh_c**2)
            found = dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g**2), dh * tanh_c * o * (1 - o)
            carried = dc * f
        else:
            r, z, n, inner = gates[token]
            dh = dh + carried
            dn = dh * (1 - z) * (1 - n**2)
            found = dn * inner * r * (1 - r), dh * (before - n) * z * (1 - z), dn, dn * r
            carried = dh * z
        to_gates[token] = torch.stack(found)
        if starts[token]:
            to_stored[token] = carried
    return to_gates, to_stored
