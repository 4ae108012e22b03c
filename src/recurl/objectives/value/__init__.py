"""Value estimation: advantages, returns and value targets."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.objectives.value.advantages import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator
    from recurl.objectives.value.vtrace import VTrace

lazy_names(
    __name__,
    {
        ".advantages": "GAE TD0Estimator TD1Estimator TDLambdaEstimator",
        ".vtrace": "VTrace",
    },
)

__all__ = ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace"]
