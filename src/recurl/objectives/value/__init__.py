"""Value estimation: advantages, returns and value targets."""

from recurl.objectives.value.advantages import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace

__all__ = ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace"]
