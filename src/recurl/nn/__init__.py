"""Recurrent networks on plain tensors, with the arguments of ``torch.nn`` and resets inside sequences.

They need torch alone: no TensorDict, no environment.
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.nn.memories import (
        FFM,
        LRU,
        MLSTM,
        RGLRU,
        S5,
        SHM,
        SLSTM,
        GatedDeltaNet,
        GTrXL,
        Mamba2,
        MemoryNet,
        MinGRU,
        MinLSTM,
    )
    from recurl.nn.recurrent_net import RecurrentNet
    from recurl.nn.rnn import GRU, LSTM, CellNet, GRUCell, LSTMCell

lazy_names(
    __name__,
    {
        ".memories": "FFM GTrXL GatedDeltaNet LRU MLSTM Mamba2 MemoryNet MinGRU MinLSTM RGLRU S5 SHM SLSTM",
        ".recurrent_net": "RecurrentNet",
        ".rnn": "GRU LSTM CellNet GRUCell LSTMCell",
    },
)

__all__ = [
    "FFM",
    "GRU",
    "LRU",
    "LSTM",
    "MLSTM",
    "RGLRU",
    "S5",
    "SHM",
    "SLSTM",
    "CellNet",
    "GRUCell",
    "GTrXL",
    "GatedDeltaNet",
    "LSTMCell",
    "Mamba2",
    "MemoryNet",
    "MinGRU",
    "MinLSTM",
    "RecurrentNet",
]
