"""The choice of GPU kernels: the map of the rules, what fits on a chip, and tuned choices."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tools import kernel_map

from recurl.core.errors import ArgumentError, StorageError
from recurl.diagnostics import RNNCase, RNNTime, kernel_tuning
from recurl.experiments import bench_rnn as bench_rnn_module
from recurl.experiments.bench_rnn import BenchRNN, bench_rnn
from recurl.recurrence.cuda import tuned
from recurl.recurrence.cuda.choose import Layer, chosen_for, fitting_for
from recurl.recurrence.cuda.cluster.config import Cluster
from recurl.recurrence.cuda.hardware import Hardware
from recurl.recurrence.cuda.plan import only, plan_for
from recurl.recurrence.cuda.tuned import Measured

from .gpus import H200, OTHERS, WITHOUT_NVRTC

GPU = H200._replace(name="a GPU")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of an empty file of tuned kernels."""
    monkeypatch.setenv("RECURL_CACHE_DIR", str(tmp_path / "cache"))
    tuned._entries.cache_clear()
    return tuned.path()


def family(layer: Layer) -> str:
    choice = chosen_for(layer)
    return "portable" if choice is None else type(choice.forward).__name__.lower()


def test_the_map_is_up_to_date() -> None:
    assert kernel_map.MAP.read_text() == kernel_map.markdown(), "run python tools/kernel_map.py"


def test_what_fits_depends_on_the_properties_of_the_chip() -> None:
    def fitting(gpu: Any, hidden: int, precision: str = "tf32") -> list[str]:
        return [*fitting_for(Layer(gpu, "lstm", hidden, precision, 64))]

    assert fitting(H200, 64) == ["rows", "resident"]
    assert fitting(H200, 64, "bf16") == ["resident"]
    assert fitting(H200, 160) == ["cluster", "resident", "tiles"]
    assert fitting(WITHOUT_NVRTC, 64) == ["resident"]
    assert fitting(WITHOUT_NVRTC, 64, "ieee") == []
    assert fitting(OTHERS["A100"], 64) == ["rows"]
    assert fitting(OTHERS["A100"], 128) == []  # no clusters
    assert fitting(OTHERS["B200"], 256) == ["cluster"]
    assert fitting(OTHERS["RTX 5090"], 256) == ["cluster"]
    assert fitting(OTHERS["B200"], 256, "ieee") == ["cluster"]
    assert fitting(OTHERS["RTX 5090"], 256, "ieee") == []  # too little shared memory for the weights


def test_a_tuned_choice_holds_for_about_as_many_rows(file: Path) -> None:
    layer = Layer(GPU, "lstm", 64, "tf32", 64)
    assert family(layer) == "rows"
    tuned.save(GPU, [Measured("lstm", 64, "tf32", 64, "resident"), Measured("lstm", 64, "tf32", 128, "portable")])
    assert [family(layer._replace(rows=rows)) for rows in (30, 43, 64, 90, 91, 128, 192, 193)] == [
        *("rows", "resident", "resident", "resident", "portable", "portable", "portable", "rows"),
    ]
    for other in ({"hidden": 63}, {"cell": "gru"}, {"precision": "ieee"}, {"hardware": H200}):
        assert family(layer._replace(**other)) == "rows"
    tuned.save(GPU, [Measured("lstm", 64, "tf32", 64, "rows")])  # replaces the first one
    assert family(layer) == "rows"
    assert family(layer._replace(rows=128)) == "portable"


@pytest.mark.parametrize("name", ["cluster", "a family of the past"])
def test_a_family_that_does_not_fit_gives_way_to_the_rule(name: str, file: Path) -> None:
    tuned.save(GPU, [Measured("lstm", 64, "tf32", 64, name)])
    assert family(Layer(GPU, "lstm", 64, "tf32", 64)) == "rows"


def test_large_products_need_the_chip_that_they_were_written_for(file: Path) -> None:
    def large(gpu: Hardware | None, hidden: int, precision: str = "ieee") -> bool:
        return plan_for(gpu, "lstm", hidden, precision, 64).large_products

    chip = OTHERS["A100"]._replace(name="A100")
    assert [large(gpu, 64) for gpu in (GPU, WITHOUT_NVRTC, chip, None)] == [True, False, False, False]
    tuned.save(chip, [Measured("lstm", 64, "ieee", 64, "rows")])
    plan_for.cache_clear()
    assert plan_for(chip, "lstm", 64, "ieee", 64).chosen is not None
    assert not large(chip, 64)


def test_clusters_leave_registers_free_where_shared_memory_holds_the_weights() -> None:
    for hidden, held in ((128, 30), (256, 30), (320, 30), (384, 32)):
        choice = fitting_for(Layer(H200, "lstm", hidden, "ieee", 264))["cluster"]
        assert isinstance(choice.forward, Cluster)
        assert choice.forward.held == held


def test_few_units_are_served_by_rows_or_clusters() -> None:
    def chosen(cell: str, hidden: int, precision: str, *rows: int) -> list[str]:
        return [family(Layer(H200, cell, hidden, precision, one)) for one in rows]

    assert chosen("gru", 128, "ieee", 1, 132, 133) == ["rows", "rows", "cluster"]
    assert chosen("gru", 112, "tf32", 4, 132, 133) == ["rows", "rows", "cluster"]
    assert chosen("gru", 113, "tf32", 4, 132, 133) == ["cluster"] * 3
    assert chosen("lstm", 96, "ieee", 1, 132, 264, 265) == ["rows", "rows", "rows", "cluster"]
    assert chosen("lstm", 97, "ieee", 1, 132, 265) == ["cluster"] * 3
    assert family(Layer(WITHOUT_NVRTC, "gru", 128, "ieee", 64)) == "portable"
    assert family(Layer(WITHOUT_NVRTC, "gru", 129, "ieee", 64)) == "resident"


def test_choices_of_another_version_or_gpu_are_ignored_and_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.save(GPU, [Measured("lstm", 64, "tf32", 64, "tiles")])
    other = GPU._replace(name="another GPU")
    assert tuned.best(other, "lstm", 64, "tf32", 64) is None
    tuned.save(other, [Measured("gru", 8, "ieee", 1, "rows")])
    assert tuned.best(GPU, "lstm", 64, "tf32", 64) == "tiles"
    monkeypatch.setattr(tuned, "__version__", "99.0")
    tuned._entries.cache_clear()
    assert tuned.best(GPU, "lstm", 64, "tf32", 64) is None
    assert len(json.loads(file.read_text())) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"KEY": [{"cell": "lstm"}]}'])
def test_a_damaged_file_is_reported_and_not_used(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text.replace("KEY", tuned._key(GPU)))
    with pytest.warns(UserWarning, match="The tuned kernels are not used: "):
        assert tuned.best(GPU, "lstm", 64, "tf32", 64) is None
    if text == "{":
        with pytest.raises(StorageError, match=r"kernels.json is not a file of tuned kernels .*: delete it"):
            tuned.save(GPU, [Measured("lstm", 64, "tf32", 64, "tiles")])


def test_tf32x3_is_another_name_of_ieee() -> None:
    for gpu, hidden in itertools.product((GPU, WITHOUT_NVRTC, OTHERS["A100"], None), (16, 100, 300)):
        one, other = (plan_for(gpu, "lstm", hidden, name, 64) for name in ("ieee", "tf32x3"))
        assert one.precision is other.precision
        assert one.chosen == other.chosen


def test_only_one_family_is_used_inside_the_block() -> None:
    def used() -> str:
        chosen = plan_for(GPU, "lstm", 64, "tf32", 64).chosen
        return "portable" if chosen is None else type(chosen.forward).__name__.lower()

    assert used() == "rows"
    for name in ("portable", "resident"):
        with only(name):
            assert used() == name
    for name in ("cluster", "tiles"):  # they don't serve 64 units
        with only(name):
            assert used() == "portable"
    assert used() == "rows"


def test_the_fastest_accurate_family_is_stored(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []
    times = {"portable": 4.0, "rows": 1.0, "cluster": 5.0, "resident": 3.0}
    errors = {"portable": 1e-4, "rows": 5e-4, "cluster": 1e-4, "resident": 2e-4}

    @contextmanager
    def record(name: str) -> Any:
        running.append(name)
        yield

    def time_rnn(
        case: RNNCase, backends: tuple[str, ...], *, repeats: int, seconds: float, captured: bool
    ) -> list[RNNTime]:
        assert backends == ("triton",)
        assert captured
        name = running[-1]
        if name == "cluster":
            return [RNNTime(case, "triton", reason="it doesn't fit")]
        return [RNNTime(case, "triton", (times[name],) * repeats, error=errors[name])]

    monkeypatch.setattr(kernel_tuning, "only", record)
    monkeypatch.setattr(kernel_tuning, "time_rnn", time_rnn)
    monkeypatch.setattr(kernel_tuning, "hardware_of", lambda device: GPU)
    monkeypatch.setattr(kernel_tuning, "numbered", lambda device: type("Device", (), {"type": "cuda"}))
    case = RNNCase(cell="lstm", hidden_size=80, batch=64, precision="tf32")
    found = kernel_tuning.tune_kernels(case, repeats=2)
    assert [result.backend.removeprefix("triton: ") for result in found] == [
        *("rows", "resident", "portable", "cluster")
    ]
    assert tuned.best(GPU, "lstm", 80, "tf32", 64) == "resident"  # rows is too inaccurate
    errors["portable"] = math.nan
    kernel_tuning.tune_kernels(RNNCase(cell="gru", hidden_size=64, batch=64, precision="tf32"))
    assert tuned.best(GPU, "gru", 64, "tf32", 64) is None


def test_what_cannot_be_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--tune is for cells lstm and gru on a GPU, got lstm on cpu"):
        bench_rnn(BenchRNN(tune=True, device="cpu", out=tmp_path / "out"))
    with pytest.raises(ArgumentError, match="--tune times the families of the triton backend: leave out --backends"):
        bench_rnn(BenchRNN(tune=True, device="cpu", backends=("loop",), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [1e-6, math.nan])
def test_what_was_not_stored_is_not_announced(
    error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(case: RNNCase, *, repeats: int, seconds: float) -> list[RNNTime]:
        portable = RNNTime(case, kernel_tuning.PORTABLE, () if math.isnan(error) else (2.0,), error=error)
        return [RNNTime(case, "triton: rows", (1.0,), error=1e-6), portable]

    monkeypatch.setattr(bench_rnn_module, "check_tunable", lambda case: None)
    monkeypatch.setattr(bench_rnn_module, "tune_kernels", tune)
    bench_rnn(BenchRNN(tune=True, device="cpu", out=tmp_path / "out"))
    shown = capsys.readouterr().out
    assert ("use the fastest kernels from now on" in shown) == (error == 1e-6)
    assert ("nothing is stored, since the portable kernels" in shown) == math.isnan(error)
