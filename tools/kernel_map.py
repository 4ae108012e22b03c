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
from recurl.recurrence.cuda.precision import PRECISIONS

MAP = Path(choose.__file__).with_name("MAP.md")
FAMILIES = ("portable", "rows", "cluster", "tiles", "resident", "single")
LANGUAGES = {"rows": "CUDA C++", "cluster": "CUDA C++", "portable": "Triton"}
PROCESSORS, AT_ONCE = 132, (66, 32, 16)  # an H100's multiprocessors, and its clusters of each size
ROWS = (1, 4, 64, 132, 264, 528, 1056, 4096)
LARGEST = 1024

HEAD = f"""# Map of the GPU kernels

Written by `tools/kernel_map.py` from the rules in `choose.py` and the tables in `tables.py`; a test compares.

A layer of H units runs through `backend.py` (is the call supported?), `plan.py` (precision, layout and kernels, kept per size),
`layer.py` (large products before and after), and the launch of one family: `families.py`, or `portable/launch.py`. Every family
computes the same: the recurrence over a flat stream of tokens, cut into *slots* that walk side by side, forward or backward.

| folder | language | GPU | pass of one layer |
|---|---|---|---|
"""
CHOICE = f"""
## Who serves what

For {PROCESSORS} multiprocessors that hold {", ".join(map(str, AT_ONCE))} clusters of {", ".join(map(str, CLUSTERS))} CTAs (an H100), by rows of the
batch. Where NVRTC is missing, *rows* and *cluster* are left out. Every other chip is served by *portable*.

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
    found = (
        choose.chosen_for(choose.GLUON_CAPABILITY, PROCESSORS, cell, hidden, precision, rows, AT_ONCE) for rows in ROWS
    )
    return tuple("portable" if choice is None else type(choice.forward).__name__.lower() for choice in found)


def rows() -> Iterator[str]:
    """Yield the rows of the table of choices, with neighboring sizes joined."""
    for cell, precision in itertools.product(("lstm", "gru"), PRECISIONS):
        if (names := "tf32x3") == precision and all(chosen(cell, names, h) == chosen(cell, "ieee", h) for h in range(1, LARGEST)):
            continue
        for served, sizes in itertools.groupby(range(1, LARGEST + 1), lambda h: chosen(cell, precision, h)):
            first, *_, last = [*sizes] * 2
            size = f"{first} to {last}" if last < LARGEST else f"{first} and more"
            title = "ieee, tf32x3" if precision == "ieee" else precision
            yield f"| {cell} | {title} | {first if first == last else size} | {' | '.join(served)} |\n"


def markdown() -> str:
    """Return the map."""
    return "".join([HEAD, *families(), CHOICE, *rows()])


if __name__ == "__main__":
    MAP.write_text(markdown())
