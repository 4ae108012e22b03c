"""Write the tables of docs/scale.md and docs/reliability.md from results/*.csv, between their marks.

If there are several rows for a case, the last one is used. Usage: ``python benchmarks/scale_tables.py``, and
``python benchmarks/plots.py`` for the figure.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "docs" / name for name in ("scale.md", "reliability.md")]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, str]


def read(name: str, *key: str) -> list[Row]:
    """Return the rows of a file, the last one for each key."""
    path = RESULTS / name
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list({tuple(row[part] for part in key): row for row in csv.DictReader(file)}.values())


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def under(rows: list[Row], *more: str) -> str:
    """Describe the machine of the newest row."""
    last = rows[-1]
    about = [last["device"], f"torch {last['torch']}", *more, f"commit {last['commit']}", last["date"]]
    return f"\n\n({', '.join(part for part in about if not part.endswith(' '))})"


def ranks(name: str) -> str:
    """Learners."""
    rows = read(name, "device", "cell", "envs_per_rank", "steps", "hidden", "ranks")
    if not rows:
        return ""
    first = rows[0]
    head = ["ranks", "update, ms", "million steps/s", "times one rank", "all-reduce, µs", "in a CUDA graph, µs"]
    one = [["1", first["update_ms_alone"], first["M_steps_per_s_alone"], "1", "", ""]]
    names = ("ranks", "update_ms", "M_steps_per_s", "ratio", "all_reduce_us", "all_reduce_captured_us")
    found = one + [[row[each] for each in names] for row in rows if row["ranks"] != "1"]
    size = f"{first['cell'].upper()} {first['hidden']}, {first['envs_per_rank']} x {first['steps']} steps per rank"
    if name == "scale_cpu.csv":
        head, found = head[:-1], [row[:-1] for row in found]
    return table(head, found) + under(rows, size, f"{int(first['parameters']):,} parameters")


def actors() -> str:
    """Return the table of Ray actors and their learners."""
    rows = read("scale_ray.csv", "device", "what", "actors")
    scaled = [row for row in rows if row["steps_per_s"]]
    if not scaled:
        return ""
    head = ["", "actors", "steps/s", "fraction of N times one", "CPU per step, ms"]
    names = ("what", "actors", "steps_per_s", "efficiency", "cpu_ms_per_step")
    return table(head, [[row[each] for each in names] for row in scaled]) + under(scaled, f"Ray {scaled[-1]['ray']}")


def overhead() -> str:
    """Return the table of the overhead of collectors with two workers."""
    rows = [row for row in read("scale_ray.csv", "device", "what", "actors") if row["overhead_ms_per_batch"]]
    if not rows:
        return ""
    return table(["", "ms per batch"], [[row["what"], row["overhead_ms_per_batch"]] for row in rows]) + under(rows)


def figure() -> str:
    """The figure that plots.py draws of all these."""
    text = "Speedup over one rank or actor, by the number of ranks and actors"
    return f"![{text}](figures/weak_scaling.svg)" if (RESULTS / "scale_ray.csv").exists() else ""


def faults_of_actors() -> str:
    """Return the table of the soak test of actors."""
    rows = read("soak_ray.csv", "sync", "max_lag")
    if not rows:
        return ""
    names = {
        "kills": "actors killed",
        "nodes_removed": "nodes removed",
        "delivered": "steps delivered",
        "asked": "steps requested",
        "doubled": "delivered twice",
        "out_of_order": "out of order",
        "never_executed": "never executed",
        "undelivered": "executed, not delivered",
        "undelivered_reported": "reported as such, upper bound",
        "orphans": "processes left over",
        "shared_files_left": "shared memory files left over",
    }
    said = {
        ("False", ""): "one actor at a time",
        ("True", "0"): "all actors together",
        ("True", "1"): "all actors together, one update ahead",
    }
    ways = [said[row["sync"], row["max_lag"]] for row in rows]
    found = [[what, *(row[name] for row in rows)] for name, what in names.items()]
    return table(["source of a batch", *ways], found) + under(rows, f"Ray {rows[-1]['ray']}")


def faults_of_ranks() -> str:
    """Return the table of the soak test of ranks."""
    rows = read("soak_ranks.csv", "ranks", "kills")
    if not rows:
        return ""
    names = {
        "kills": "ranks killed",
        "kills_while_starting": "of these during startup",
        "others_ended_s_max": "seconds until the others had ended, maximum",
        "updates": "updates",
        "updates_missing": "missing",
        "updates_doubled": "logged twice",
        "rows_that_differ": "with numbers that differ from the run without kills",
        "weights_that_differ": "tensors of weights that differ in a bit",
        "files_left": "files left in the run's folder",
        "orphans": "processes left over",
        "shared_files_left": "shared memory files left over",
    }
    found = [[said, *(row[name] for row in rows)] for name, said in names.items()]
    return table(["", *(f"{row['ranks']} ranks" for row in rows)], found) + under(rows)


def faults_while_learning() -> str:
    """Return the table of learning results with and without kills."""
    rows = read("soak_learning.csv", "kills", "seed")
    if not rows:
        return ""
    head = ["actors killed", "seed", "replaced", "steps lost, at most", "return at the end"]
    names = ("kills", "seed", "replaced", "frames_lost", "return_mean")
    return table(head, [[row[each] for each in names] for row in rows]) + under(rows)


TABLES: dict[str, Callable[[], str]] = {
    "scale_gpu": lambda: ranks("scale_gpu.csv"),
    "scale_cpu": lambda: ranks("scale_cpu.csv"),
    "scale_ray": actors,
    "overhead": overhead,
    "figure": figure,
    "soak_ray": faults_of_actors,
    "soak_ranks": faults_of_ranks,
    "soak_learning": faults_while_learning,
}


def filled(text: str) -> str:
    """Return a document with its tables filled in."""
    for name, make in TABLES.items():
        if f"<!-- {name} -->" not in text:
            continue
        before, begin, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}{begin}\n\n{make() or 'No results yet.'}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
