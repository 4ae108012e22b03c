"""Write the map of the GPU kernels, src/recurl/recurrence/cuda/MAP.md, from the rules that choose them.

python tools/kernel_map.py
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

from recurl.recurrence.cuda import choose
from recurl.recurrence.cuda.cluster.config import CLUSTERS
from recurl.recurrence.cuda.family import lazy_import
from recurl.recurrence.cuda.hardware import Hardware
from recurl.recurrence.cuda.precision import PRECISIONS

MAP = Path(choose.__file__).with_name("MAP.md")
FAMILIES = ("portable", "rows", "cluster", "tiles", "resident")
LANGUAGES = {"rows": "CUDA C++", "cluster": "CUDA C++", "portable": "Triton"}
H100 = Hardware((9, 0), 132, 227 * 1024, nvrtc=True, clusters=(66, 32, 16))
ROWS = (1, 4, 64, 132, 264, 528, 1056, 4096)
LARGEST = 1024

HEAD = """# Map of the GPU kernels

Written by `tools/kernel_map.py` from the rules in `choose.py` and the tables in `tables.py`; a test compares.

A layer of H units runs through `backend.py` (is the call supported?), `plan.py` (precision, layout and kernels, kept
per size), `layer.py` (large products before and after), and the launch of one family: `families.py`, or
`portable/launch.py`. Every family computes the same: the recurrence over a flat stream of tokens, cut into *slots*
that are processed side by side, forward or backward.

| folder | language | GPU | pass of one layer |
|---|---|---|---|
"""
CHOICE = f"""
## Who serves what

For {H100.processors} multiprocessors that hold {H100.clusters} clusters of {CLUSTERS} CTAs (an H100), by rows of the
batch. Where NVRTC is missing, *rows* and *cluster* are left out. Other chips are served by *portable* until
`recurl bench rnn --tune` has measured them.

| cell | precision | H | {" | ".join(map(str, ROWS))} |
|---|---|---|{"---|" * len(ROWS)}
"""


def families() -> Iterator[str]:
    """Yield a row of the table of families, and then a paragraph for each."""
    paragraphs = []
    for name in FAMILIES:
        title, _, text = (inspect.getdoc(lazy_import(name)) or "").partition("\n\n")
        gpu = "8.0 and newer" if name == "portable" else ".".join(map(str, choose.GLUON_CAPABILITY))
        yield f"| `{name}` | {LANGUAGES.get(name, 'Gluon')} | {gpu} | {title.rstrip('.')} |\n"
        paragraphs.append(f"\n**{name}.** {' '.join(text.split())}\n")
    yield from paragraphs


def chosen(cell: str, precision: str, hidden: int) -> tuple[str, ...]:
    """Return the family for each number of rows."""
    found = (choose.chosen_for(choose.Layer(H100, cell, hidden, precision, rows)) for rows in ROWS)
    return tuple("portable" if choice is None else type(choice.forward).__name__.lower() for choice in found)


def rows() -> Iterator[str]:
    """Yield the rows of the table of choices, with neighboring sizes and equal precisions joined."""
    for cell in ("lstm", "gru"):
        tables = {name: [chosen(cell, name, hidden) for hidden in range(1, LARGEST + 1)] for name in PRECISIONS}
        for table in {str(table): table for table in tables.values()}.values():
            names = ", ".join(name for name, other in tables.items() if other == table)
            first = 1
            for served, sizes in itertools.groupby(table):
                after = first + len([*sizes])
                size = f"{first} to {after - 1}" if after <= LARGEST else f"{first} and more"
                yield f"| {cell} | {names} | {size} | {' | '.join(served)} |\n"
                first = after


def markdown() -> str:
    """Return the map."""
    return "".join([HEAD, *families(), CHOICE, *rows()])


if __name__ == "__main__":
    MAP.write_text(markdown())
