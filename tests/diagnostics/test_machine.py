from __future__ import annotations

import platform

import pytest
import torch

from recurl.core import precision
from recurl.diagnostics import machine_report
from recurl.recurrence import BACKENDS


def rows(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  "))


def test_versions_and_backends() -> None:
    seen = rows(machine_report())
    assert seen["python"] == platform.python_version()
    assert seen["torch"] == torch.__version__
    assert {"tensordict", "gymnasium", "numpy", "triton"} <= set(seen)
    assert seen["pad"].startswith("lstm, gru: yes; ")
    for name in ("loop", "reference"):
        assert seen[name] == "yes"
    assert seen["scan"] == "yes" or seen["scan"].startswith("no: ")
    for name in ("cpu", "triton"):
        assert seen[name].startswith(("no: ", "lstm, gru, ", "lstm, gru: no, "))
        assert seen[name].startswith("no: ") or "; slstm: no, it has kernels for lstm, gru and cells with" in seen[name]
    others = "mingru, minlstm, lru, s5, rglru, ffm, gtrxl, mlstm, mamba2, gated_deltanet, slstm, shm"
    assert seen["auto"].startswith("lstm, gru: pad; under torch.compile ")
    assert f"; {others}: loop; under torch.compile " in seen["auto"]
    assert f"; {others}: no, it has kernels for lstm and gru only" in seen["pad"]
    assert seen["fastest"].split(";")[0].rpartition(": ")[2] in BACKENDS.names


def test_reasons_are_the_registry_s() -> None:
    class Broken:
        name, cells = "broken", None

        def missing(self) -> str:
            return "pip install it"

        def unsupported(self, support: object) -> None: ...

        def run(self, call: object) -> None: ...

    class Picky:
        name, cells = "picky", None

        def missing(self) -> None:
            return None

        def unsupported(self, support: object) -> str | None:
            return "it has three gates" if support.cell.name == "gru" else None

        def run(self, call: object) -> None: ...

    before = dict(BACKENDS._backends)
    try:
        BACKENDS.register(Broken())
        BACKENDS.register(Picky())
        seen = rows(machine_report())
    finally:
        BACKENDS._backends = before
    assert seen["broken"].startswith("no: ")
    assert "pip install it" in seen["broken"]
    cells = "lstm, mingru, minlstm, lru, s5, rglru, ffm, gtrxl, mlstm, mamba2, gated_deltanet, slstm, shm"
    assert seen["picky"].startswith(f"{cells}: yes; gru: no, ")
    assert "it has three gates" in seen["picky"]


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(machine_report())["precision"] == "ieee"
    monkeypatch.setattr(precision._process, "value", "nonsense")
    assert "none (" in rows(machine_report())["precision"]
