"""Tables in the documentation equal the results files."""

from pathlib import Path

import pytest

import scale_tables


@pytest.mark.parametrize("document", scale_tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_the_results(document: Path) -> None:
    text = document.read_text()
    assert scale_tables.filled(text) == text, "run python benchmarks/scale_tables.py"


def test_every_table_is_in_a_document() -> None:
    text = "".join(document.read_text() for document in scale_tables.DOCUMENTS)
    assert all(f"<!-- end of {name} -->" in text for name in scale_tables.TABLES)
