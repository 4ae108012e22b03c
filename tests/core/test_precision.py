from __future__ import annotations

import runpy
import threading
from collections.abc import Iterator

import pytest
import torch

from recurl.core import precision
from recurl.core.errors import RecurlError
from recurl.core.precision import (
    CONCRETE,
    get_recurrent_matmul_precision,
    resolve_precision,
    set_recurrent_matmul_precision,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(precision.ENVIRONMENT_VARIABLE, raising=False)
    set_recurrent_matmul_precision("auto")
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    monkeypatch.delenv(precision.ENVIRONMENT_VARIABLE, raising=False)
    set_recurrent_matmul_precision("auto")


@pytest.mark.parametrize(
    ("source", "on_ampere", "elsewhere"),
    [
        ("ieee", "ieee", "ieee"),
        ("tf32", "tf32", "tf32"),
        ("tf32x3", "tf32x3", "tf32x3"),
        ("fast", "tf32", "ieee"),
        ("high-prec", "tf32x3", "ieee"),
        ("auto/highest", "ieee", "ieee"),
        ("auto/high", "tf32", "ieee"),
        ("auto/medium", "tf32", "ieee"),
    ],
)
def test_resolution_table(source: str, on_ampere: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, _, torch_setting = source.partition("/")
    if torch_setting:
        torch.set_float32_matmul_precision(torch_setting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert resolve_precision(mode, GPU) == on_ampere
    assert resolve_precision(mode, CPU) == elsewhere
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert resolve_precision(mode, GPU) == elsewhere
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert resolve_precision(mode, GPU) == elsewhere


def test_module_over_process_over_torch() -> None:
    torch.set_float32_matmul_precision("medium")
    set_recurrent_matmul_precision("tf32x3")
    assert resolve_precision("auto", CPU) == "tf32x3"
    assert resolve_precision("ieee", CPU) == "ieee"
    set_recurrent_matmul_precision(None)
    assert resolve_precision("auto", CPU) == "ieee"


def test_the_process_value_holds_in_all_threads() -> None:
    set_recurrent_matmul_precision("tf32")
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(get_recurrent_matmul_precision("cpu")))
    thread.start()
    thread.join()
    assert seen == ["tf32"]


def test_the_variable_is_read_on_reset_to_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(precision.ENVIRONMENT_VARIABLE, " TF32 ")
    assert get_recurrent_matmul_precision("cpu") == "ieee"
    set_recurrent_matmul_precision("auto")
    assert get_recurrent_matmul_precision("cpu") == "tf32"
    monkeypatch.setenv(precision.ENVIRONMENT_VARIABLE, "")
    set_recurrent_matmul_precision(None)
    assert get_recurrent_matmul_precision("cpu") == "ieee"


@pytest.mark.parametrize("mode", ["TF32", "bf16", "", 32])
def test_bad_modes(mode: object) -> None:
    with pytest.raises(ValueError, match="recurrent matmul precision must be one of auto, fast") as caught:
        set_recurrent_matmul_precision(mode)
    assert isinstance(caught.value, RecurlError)


def test_a_bad_variable_raises_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(precision.ENVIRONMENT_VARIABLE, "tf33")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"RECURL_RNN_PRECISION.*got 'tf33'"):
            set_recurrent_matmul_precision("auto")
    with pytest.raises(ValueError, match=r"RECURL_RNN_PRECISION.*got 'tf33'"):
        get_recurrent_matmul_precision("cpu")
    assert resolve_precision("tf32", CPU) == "tf32"
    set_recurrent_matmul_precision("ieee")
    assert get_recurrent_matmul_precision("cpu") == "ieee"


def test_a_bad_variable_warns_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(precision.ENVIRONMENT_VARIABLE, "tf33")
    with pytest.warns(UserWarning, match="RECURL_RNN_PRECISION='tf33' is not one of"):
        runpy.run_path(precision.__file__)


def test_torch_flags_are_left_alone() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    for mode in precision.MODES:
        set_recurrent_matmul_precision(mode)
        get_recurrent_matmul_precision("cpu")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()) == before


def test_a_compiled_program_follows_the_setting() -> None:
    def width(x: torch.Tensor) -> torch.Tensor:
        return x + CONCRETE.index(resolve_precision("auto", x.device))

    compiled = torch.compile(width, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == CONCRETE.index("ieee")
    set_recurrent_matmul_precision("tf32x3")
    assert compiled(torch.zeros(1)).item() == CONCRETE.index("tf32x3")
