"""Report on this machine: versions, devices, and available backends."""

from __future__ import annotations

import torch

from recurl.core.errors import RecurlError
from recurl.core.precision import get_recurrent_matmul_precision
from recurl.core.versions import versions
from recurl.recurrence import BACKENDS, CELLS, Cell, Support

_BACKENDS = ("pad", "scan", "loop", "cpu", "triton", "reference")


def machine_report() -> str:
    """Return a plain-text table of versions and, for each device, available backends, default choices and precision.

    Unavailable backends are listed with the reason.

    Example:
        >>> print(machine_report())
        versions
          recurl      ...
          python      3...
          ...
          reference   yes
        ...
    """
    lines = ["versions", *(_row(name, version or "not installed") for name, version in versions().items())]
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        lines += ["", f"backends on {_title(device)}"]
        lines += [_row(name, _availability(name, device)) for name in dict.fromkeys((*_BACKENDS, *_registered()))]
        for name in ("auto", "fastest"):
            lines.append(_row(name, _by_cell({cell: _choices(name, value, device) for cell, value in CELLS.items()})))
        lines.append(_row("precision", _precision(device)))
    if not torch.cuda.is_available():
        lines += ["", "no CUDA device"]
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:11} {text}"


def _title(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"


def _registered() -> tuple[str, ...]:
    return tuple(name for name in BACKENDS.names if name not in ("auto", "fastest"))


def _availability(name: str, device: torch.device) -> str:
    if name not in BACKENDS.names:
        return "no: not part of this version"
    reasons = {cell: _refusal(name, Support(value, device)) for cell, value in CELLS.items()}
    if len(set(reasons.values())) == 1 and (reason := next(iter(reasons.values()))):
        return f"no: {reason}"
    return _by_cell({cell: f"no, {reason}" if reason else "yes" for cell, reason in reasons.items()})


def _by_cell(texts: dict[str, str]) -> str:
    """Return the text if it is the same for every cell; otherwise each distinct text after the cells it applies to."""
    cells: dict[str, list[str]] = {}
    for cell, text in texts.items():
        cells.setdefault(text, []).append(cell)
    if len(cells) == 1:
        return next(iter(cells))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in cells.items())


def _choices(name: str, cell: Cell, device: torch.device) -> str:
    eager, compiled = (_choice(name, Support(cell, device, compiling=flag)) for flag in (False, True))
    return f"{eager}; under torch.compile {compiled}"


def _refusal(name: str, support: Support) -> str | None:
    try:
        BACKENDS.choose(name, support)
    except RecurlError as error:
        reason = " ".join(str(error).split())
        reason = reason.partition("can't run this call: ")[2] or reason
        return reason.replace(f", not for the cell {support.cell.name}", "").rstrip(".")  # to merge cells
    return None


def _choice(name: str, support: Support) -> str:
    try:
        return BACKENDS.choose(name, support).name
    except RecurlError as error:
        return f"none ({' '.join(str(error).split())})"


def _precision(device: torch.device) -> str:
    try:
        return get_recurrent_matmul_precision(device)
    except RecurlError as error:
        return f"none ({' '.join(str(error).split())})"
