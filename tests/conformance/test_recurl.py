"""recurl passes its own checks."""

import pytest

from recurl.conformance import CHECKS, run_checks
from recurl.conformance.adapters.recurl import Recurl

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CHECKS)
def test_recurl_passes(name: str) -> None:
    (verdict,) = run_checks(Recurl(), [name])
    assert verdict.outcome == "passed", verdict.detail
