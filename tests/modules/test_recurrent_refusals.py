"""Arguments, inputs and uses that recurrent modules reject."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from recurl.core.errors import RecurlError
from recurl.modules import (
    GRUModule,
    LSTMModule,
    set_recurrent_mode,
)
from tests.modules.recurrent_cases import HIDDEN, INPUTS, make

LSTM_KEYS = {"in_key": "x", "out_key": "y"}


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: LSTMModule(3, 5, out_key="y"), ValueError, "exactly one of in_key and in_keys.*neither"),
        (lambda: GRUModule(3, 5, in_key="x", in_keys=["x", "h"], out_key="y"), ValueError, "in_keys.*both"),
        (lambda: GRUModule(3, 5, in_key="x"), ValueError, "exactly one of out_key and out_keys"),
        (lambda: LSTMModule(3, 5, in_keys=["x", "h"], out_key="y"), ValueError, "in_keys must be 3 keys"),
        (lambda: GRUModule(3, 5, in_keys=["x", "is_init", "h"], out_key="y"), ValueError, "in_keys must be 2 keys"),
        (lambda: GRUModule(3, 5, in_keys=["x", "h", ("a", "is_init")], out_key="y"), ValueError, "nested"),
        (lambda: LSTMModule(3, 5, in_key="x", out_keys=["y"]), ValueError, "out_keys must be 3 keys"),
        (lambda: LSTMModule(3, 5, in_keys="abc", out_key="y"), TypeError, "in_keys: .*must be a list"),
        (lambda: LSTMModule(3, 5, in_key="x", out_keys="abc"), TypeError, "out_keys: .*must be a list"),
        (lambda: GRUModule(3, 5, in_key="", out_key="y"), TypeError, "non-empty string"),
        (lambda: LSTMModule(3, 5, batch_first=False, **LSTM_KEYS), ValueError, "batch_first must be True"),
        (lambda: LSTMModule(3, **LSTM_KEYS), ValueError, "hidden_size is missing"),
        (lambda: LSTMModule(hidden_size=3, **LSTM_KEYS), TypeError, "input_size is missing"),
        (lambda: LSTMModule(3, 0, **LSTM_KEYS), ValueError, "hidden_size must be at least 1, got 0"),
        (lambda: GRUModule(3, 2.5, **LSTM_KEYS), TypeError, "hidden_size must be an int"),
        (lambda: LSTMModule(3, 5, proj_size=5, **LSTM_KEYS), ValueError, "proj_size must be smaller than"),
        (lambda: GRUModule(3, 5, dropout=1.5, **LSTM_KEYS), ValueError, "dropout must be a probability"),
        (
            lambda: GRUModule(3, 5, recurrent_backend="cudnn", **LSTM_KEYS),
            ValueError,
            "recurrent_backend must be one of",
        ),
        (lambda: LSTMModule(3, lstm=nn.LSTM(3, 5, batch_first=True), **LSTM_KEYS), ValueError, "remove input_size"),
        (
            lambda: LSTMModule(num_layers=2, lstm=nn.LSTM(3, 5, batch_first=True), **LSTM_KEYS),
            ValueError,
            "remove num_layers",
        ),
        (lambda: LSTMModule(lstm=nn.LSTM(3, 5), **LSTM_KEYS), ValueError, "must have batch_first=True"),
        (
            lambda: GRUModule(gru=nn.GRU(3, 5, batch_first=True), python_based=True, device="cpu", **LSTM_KEYS),
            ValueError,
            "remove device, python_based",
        ),
        (lambda: GRUModule(3, **LSTM_KEYS), TypeError, "hidden_size is missing"),
        (lambda: GRUModule(3, 0, **LSTM_KEYS), ValueError, "hidden_size must be at least 1"),
        (lambda: GRUModule(3, 5, recurrent_recompute="half", **LSTM_KEYS), ValueError, "recurrent_recompute must be"),
        (lambda: GRUModule(3, 5, recurrent_recompute=None, **LSTM_KEYS), ValueError, "recurrent_recompute must be"),
        (
            lambda: GRUModule(3, 5, recurrent_recompute="full", **LSTM_KEYS),
            ValueError,
            "recurrent_recompute='full' can't be used with recurrent_backend='pad'",
        ),
        (
            lambda: LSTMModule(3, 5, recurrent_backend="auto", recurrent_recompute="full", **LSTM_KEYS),
            ValueError,
            "recurrent_recompute='full' can't be used with recurrent_backend='auto'",
        ),
        (
            lambda: LSTMModule(3, 5, recurrent_matmul_precision=None, **LSTM_KEYS),
            ValueError,
            "recurrent_matmul_precision must be one of auto",
        ),
        (
            lambda: LSTMModule(3, 5, recurrent_compute_dtype=torch.int8, **LSTM_KEYS),
            ValueError,
            "recurrent_compute_dtype must be torch.float32 or torch.bfloat16, got torch.int8",
        ),
        (
            lambda: LSTMModule(3, 5, recurrent_compute_dtype=torch.bfloat16, **LSTM_KEYS),
            ValueError,
            "'pad' computes in the dtype of the weights",
        ),
        (lambda: LSTMModule(lstm=nn.GRU(3, 5, batch_first=True), **LSTM_KEYS), TypeError, "must be a torch.nn.LSTM"),
        (lambda: make("gru", default_recurrent_mode="sequential"), TypeError, "True, False or None, got 'sequential'"),
        (lambda: make("gru", dropout="0.1"), TypeError, "dropout must be a number, got '0.1'"),
    ],
)
def test_bad_construction(build: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build()
    assert isinstance(caught.value, RecurlError)


def call(batch: dict, shape: list[int], recurrent: bool = False) -> None:
    with set_recurrent_mode(recurrent):
        make("lstm")(TensorDict(batch, shape))


X, INIT = torch.zeros(2, INPUTS), torch.zeros(2, dtype=torch.bool)


H = torch.zeros(2, 1, HIDDEN)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (({"observation": X}, [2]), KeyError, "'is_init' is missing.*InitTracker"),
        (({"is_init": INIT}, [2]), KeyError, "input 'observation' is missing; the TensorDict holds is_init"),
        (
            ({"observation": X, "is_init": INIT.float()}, [2]),
            RuntimeError,
            "is_init must be boolean, got torch.float32",
        ),
        (({"observation": X, "is_init": torch.zeros(2, 3, dtype=torch.bool)}, [2]), ValueError, "is_init must have"),
        (({"observation": X[:, :2], "is_init": INIT}, [2]), ValueError, r"input_size: \[2, 3\], got \[2, 2\]"),
        (({"observation": X.double(), "is_init": INIT}, [2]), RuntimeError, "dtype torch.float64 but the module"),
        (({"observation": X.to("meta"), "is_init": INIT}, [2]), RuntimeError, "is on meta but the module on cpu"),
        (({"observation": X[0], "is_init": INIT[0]}, [], True), ValueError, "last batch dimension is time"),
        (
            ({"observation": X, "is_init": INIT, "recurrent_state_h": H}, [2]),
            RuntimeError,
            "'recurrent_state_c' is missing, but another one",
        ),
        (
            ({"observation": X, "is_init": INIT, "recurrent_state_h": H[..., 1:], "recurrent_state_c": H}, [2]),
            RuntimeError,
            r"'recurrent_state_h' must have shape \[2, 1, 5\]",
        ),
    ],
)
def test_bad_input(inputs: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(*inputs)
    assert isinstance(caught.value, RecurlError)


def test_bad_keywords() -> None:
    with pytest.raises(
        TypeError, match="Pass a TensorDict, or each of the tensors observation, recurrent_state, is_init"
    ):
        make("gru")(obs=X, is_init=INIT)
    with pytest.raises(KeyError, match="'observation' is missing; got is_init"):
        make("gru")(is_init=INIT)


def test_a_locked_tensordict_is_refused() -> None:
    batch = TensorDict({"observation": X, "is_init": INIT}, [2]).lock_()
    with pytest.raises(RuntimeError, match="lock"):
        make("gru")(batch)


def test_a_bidirectional_module_cannot_step() -> None:
    with pytest.raises(RuntimeError, match="bidirectional module can't run step by step"):
        make("gru", bidirectional=True)(TensorDict({"observation": X, "is_init": INIT}, [2]))
