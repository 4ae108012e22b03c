"""Recurrent networks on plain tensors, with the arguments of ``torch.nn`` and resets inside sequences.

They need torch alone: no TensorDict, no environment.
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.nn.recurrent_net import RecurrentNet
    from recurl.nn.rnn import GRU, LSTM, CellNet, GRUCell, LSTMCell

lazy_names(__name__, {".recurrent_net": "RecurrentNet", ".rnn": "GRU LSTM CellNet GRUCell LSTMCell"})

__all__ = ["GRU", "LSTM", "CellNet", "GRUCell", "LSTMCell", "RecurrentNet"]
