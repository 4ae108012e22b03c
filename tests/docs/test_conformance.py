"""docs/conformance.md has the matrix of the results, which cover all checks."""

from collections import Counter
from pathlib import Path

from recurl.conformance import CHECKS
from recurl.conformance.adapters import ADAPTERS
from recurl.conformance.matrix import matrix, read_results

ROOT = Path(__file__).parents[2]
RESULTS = read_results(ROOT / "benchmarks" / "results" / "conformance.csv")


def test_the_page_has_the_matrix() -> None:
    assert matrix(RESULTS) in (ROOT / "docs" / "conformance.md").read_text()


def test_results_cover_all_libraries_and_checks() -> None:
    assert Counter(result.library for result in RESULTS) == dict.fromkeys(ADAPTERS, len(CHECKS))
    assert {result.check for result in RESULTS} == set(CHECKS)


def test_recurl_passes_all() -> None:
    assert all(result.outcome == "passed" for result in RESULTS if result.library == "recurl")
