"""Choice of the fastest GPU kernels for given sizes, by measurement on this machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from recurl.core.devices import numbered
from recurl.core.errors import ArgumentError
from recurl.core.precision import resolve_precision
from recurl.diagnostics.rnn_timing import RNNCase, RNNTime, time_rnn
from recurl.recurrence.cuda import tuned
from recurl.recurrence.cuda.choose import Layer, fitting_for
from recurl.recurrence.cuda.hardware import Hardware, hardware_of
from recurl.recurrence.cuda.plan import only, plan_for
from recurl.recurrence.cuda.precision import PRECISIONS

__all__ = ["PORTABLE", "check_tunable", "tune_kernels"]

_BACKEND = "triton"
PORTABLE = f"{_BACKEND}: portable"
"""Name of the results of the portable kernels, which the accuracy of the others is compared with."""

_CELLS = ("lstm", "gru")
_LEAST_ACCURATE = 4  # times the error of the portable kernels


def check_tunable(case: RNNCase) -> None:
    """Raise ``ArgumentError`` unless a case is an LSTM or GRU on an NVIDIA GPU."""
    if case.cell not in _CELLS or numbered(case.device).type != "cuda":
        raise ArgumentError(f"--tune is for cells lstm and gru on a GPU, got {case.cell} on {case.device}.")


def tune_kernels(case: RNNCase, *, repeats: int = 20, seconds: float = 30.0) -> list[RNNTime]:
    """Time every family of kernels that can run a layer, and store the fastest as the choice for layers of its size.

    Timed are replays of a CUDA graph, since small layers take the host longer than the GPU. A family is eligible if its
    results are about as accurate as those of the portable kernels. The choice holds for this kind of GPU, this version
    of recurl, torch and Triton, and about as many rows; the file is :func:`recurl.recurrence.cuda.tuned.path`.

    Args:
        case: an LSTM or a GRU on a GPU.
        repeats: number of timed runs per family, at least 1.
        seconds: time limit per family.

    Returns:
        One result per family, named ``"triton: rows"``, fastest first, followed by those that can't run. Nothing is
        stored if the portable kernels can't run.

    Raises:
        ArgumentError: the case isn't an LSTM or GRU on an NVIDIA GPU.
    """
    check_tunable(case)
    device = numbered(case.device)
    hardware, precision = hardware_of(device), _precision_of(case, device)
    layer = Layer(hardware, case.cell, case.hidden_size, precision, case.batch)
    results: list[RNNTime] = []
    for family in ("portable", *fitting_for(layer)):
        with only(family):
            (result,) = time_rnn(case, (_BACKEND,), repeats=repeats, seconds=seconds, captured=True)
        results.append(replace(result, backend=f"{_BACKEND}: {family}"))
    _store(hardware, layer, results)
    return sorted(results, key=lambda result: result.median_ms if result.times_ms else float("inf"))


def _precision_of(case: RNNCase, device: torch.device) -> str:
    low = "bf16" in (case.precision, case.dtype.replace("bfloat", "bf"))
    return "bf16" if low else PRECISIONS[resolve_precision(case.precision, device)].name


def _store(hardware: Hardware, layer: Layer, results: list[RNNTime]) -> None:
    """Store the fastest of the accurate families; the first result is that of the portable kernels."""
    limit = _LEAST_ACCURATE * results[0].error
    accurate = [result for result in results if result.times_ms and result.error <= limit]
    if not accurate:
        return
    family = min(accurate, key=lambda result: result.median_ms).backend.removeprefix(f"{_BACKEND}: ")
    tuned.save(hardware, [tuned.Measured(layer.cell, layer.hidden, layer.precision, layer.rows, family)])
    plan_for.cache_clear()
