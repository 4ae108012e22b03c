"""Helpers that collect the failing checks of a policy."""

from __future__ import annotations

from recurl.diagnostics import (
    CheckResult,
    check_wiring,
)


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


def failing(policy: object, env: object, **options: object) -> dict[str, CheckResult]:
    results = by_name(check_wiring(policy, env, **options))
    return {name: result for name, result in results.items() if not result.passed}
