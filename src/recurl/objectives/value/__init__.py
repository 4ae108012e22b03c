"""Value estimation: advantages, returns and value targets."""

from typing import TYPE_CHECKING

from recurl.core.messages import absent_names
from recurl.objectives.value.advantages import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace

if not TYPE_CHECKING:  # type checkers assume that a module with __getattr__ has every name
    __getattr__ = absent_names(__name__)

__all__ = ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace"]
